"use strict";
// The page's parts that are no charts: head, tiles, tables, samples.

// A run without an ending is silent once it has written nothing for longer than it ever paused.
const stateOf = (run) => run.state === "running" && Date.now() / 1000 - run.alive > run.silent_after ? "silent" : run.state;
const standingText = (run) => {
  const ago = (moment) => `${duration(Math.max(1, Math.round(Date.now() / 1000 - moment)))} ago`;
  const since = (moment) => `${clock(moment)}, ${ago(moment)}`, at = `step ${whole(run.at_step)}`, why = run.reason ? ` (${run.reason})` : "";
  switch (stateOf(run)) {
    case "running": return `last written ${ago(run.alive)}`;
    case "silent": return `nothing written since ${since(run.since)}, after ${at}: it may have been killed`;
    case "killed": return `after ${at}, last written ${since(run.since)}` + (run.checkpoint ? `; the same command continues from ${run.checkpoint}` : "");
    case "stopped": return `at ${at}, since ${since(run.since)}${why}`;
    case "finished": return since(run.since);
    default: return `at ${at}, ${since(run.since)}${why}`;
  }
};
const pill = (i) => el("span", { class: "pill", "data-standing": i });
const standing = (i) => el("span", { class: "soft small num", "data-standing": i, "data-long": "yes" });

const head = (run, data) => {
  const share = run.budget_share;
  const steps = run.last_place ? `step ${whole(run.last_place.step)}` : "no step yet";
  const tokens = run.last_place ? `${compact(run.last_place.tokens, 4)} of ${compact(run.budget.tokens, 4)} tokens` : "";
  return el("header", {},
    el("div", { class: "head" }, el("h1", {}, run.name), pill(0), standing(0),
      el("span", { class: "grow" }), themeButton()),
    run.description ? el("p", { class: "soft small", style: { margin: "6px 0 10px", maxWidth: "80ch" } }, run.description) : null,
    el("div", { class: "bar", role: "progressbar", "aria-valuenow": Math.round(100 * (share || 0)), "aria-label": "share of the budget" },
      el("div", { style: { width: `${100 * Math.min(1, share || 0)}%` } })),
    el("p", { class: "soft small num", style: { marginTop: "6px" } }, [steps, tokens,
      stateOf(run) === "running" && run.last["throughput/seconds_left"] ? `${duration(run.last["throughput/seconds_left"])} left` : "",
      run.began ? `begun ${clock(run.began)}` : ""].filter(Boolean).join(" · ")));
};

const themeButton = () => el("button", { type: "button", class: "plain", "aria-label": "light or dark", onclick: () => {
  memory.set("theme", theme() === "dark" ? "light" : "dark");
  applyTheme();
  draw();
} }, theme() === "dark" ? "Light" : "Dark");

const tile = (label, value, more) => el("div", { class: "tile" }, el("b", {}, value), el("span", {}, more ? `${label} · ${more}` : label));

const tiles = (run) => {
  const last = run.last, speed = run.speed, devices = run.plan.facts.world_size;
  const has = (name) => last[name] !== null && last[name] !== undefined;
  const memoryName = has("memory/peak_bytes") ? "memory/peak_bytes" : "memory/host_peak_bytes";
  const troubles = run.marks.filter((mark) => mark.level === "bad").length;
  return el("section", { class: "tiles", "aria-label": "now" },
    tile("training loss", fixed(4)(last["train/loss"]), "last row"),
    has("eval/loss") ? tile("validation loss", fixed(4)(last["eval/loss"])) : null,
    has("eval/bits_per_byte") ? tile("bits per byte", fixed(4)(last["eval/bits_per_byte"])) : null,
    tile("tokens/s", compact(speed.tokens_per_second), devices > 1 && speed.tokens_per_second ? `all steps, ${compact(speed.tokens_per_second / devices)} each of ${devices}` : "all steps"),
    "mfu" in speed ? tile("of the dense peak (MFU)", percent(speed.mfu), "all steps") : null,
    "step_seconds" in speed ? tile("a step", duration(speed.step_seconds), "mean of all") : null,
    run.spent ? tile("goodput", goodput(run), "of the wall time") : null,
    has(memoryName) ? memoryName === "memory/peak_bytes" ? tile("peak GPU memory", bytes(last[memoryName])) : tile("peak host memory", bytes(last[memoryName]), "whole process") : null,
    has("cost/dollars") ? tile("cost so far", money(last["cost/dollars"]), `${money(last["cost/dollars_at_end"])} at the end`) : null,
    tile(troubles === 1 ? "alarm" : "alarms", whole(troubles)));
};

// As "Where the time went" has it.
const goodput = (run) => run.spent ? percent(run.spent.counted / run.spent.seconds) : "–";

const words = (run) => el("section", { class: "card" }, el("h2", {}, "What the curve says"),
  el("ul", { class: "words" }, run.sentences.map((sentence) => el("li", {}, sentence))));

const table = (heads, rows, numeric = []) => el("div", { class: "scroll" }, el("table", {},
  el("thead", {}, el("tr", {}, heads.map((text, i) => el("th", { class: numeric.includes(i) ? "num" : null }, text)))),
  el("tbody", {}, rows.map((cells) => el("tr", {}, cells.map((cell, i) => el("td", { class: numeric.includes(i) ? "num" : i === cells.length - 1 ? "wide" : null }, cell)))))));

const comparison = (data) => {
  const last = (name) => (run) => UNITS[unitOf(name)](run.last[name]), overall = (name) => (run) => UNITS[unitOf(name)](run.speed[name]);
  const best = Math.min(...data.runs.map((run) => run.best_validation).filter((loss) => typeof loss === "number"));
  const bestOf = (run) => run.best_validation === best ? el("b", {}, fixed(4)(best)) : fixed(4)(run.best_validation);
  const columns = [["training loss, last row", last("train/loss")], ["validation loss, last", last("eval/loss")], ["validation loss, best", bestOf], ["bits per byte, last", last("eval/bits_per_byte")],
    ["tokens/s, all steps", overall("tokens_per_second")], ["MFU, all steps", overall("mfu")], ["goodput", goodput]];
  const shown = columns.filter(([, value]) => data.runs.some((run) => value(run) !== "–"));
  const rows = data.runs.map((run, i) => [
    el("span", { class: "kind" }, el("span", { class: "swatch dot", style: { background: colorOfRun(i), marginRight: "8px" } }), run.name),
    el("span", {}, el("span", { "data-standing": i }), " ", standing(i)), run.last_place ? whole(run.last_place.step) : "–", run.last_place ? compact(run.last_place.tokens, 4) : "–",
    ...shown.map(([, value]) => value(run))]);
  return el("section", { class: "card" }, el("h2", {}, `${data.runs.length} runs`),
    table(["run", "state", "step", "tokens", ...shown.map(([label]) => label)], rows, [2, 3, ...shown.map((_, i) => i + 4)]));
};

// What is not the same in all runs, by the recipe's dotted keys.
const differing = (data) => el("section", { class: "card", id: "settings" }, el("h2", {}, "Settings that differ"),
  data.settings.length ? table(["setting", ...data.runs.map((run) => run.name)], data.settings.map(([key, ...values]) => [el("code", {}, key), ...values.map((value) => value === null ? "left out" : value)])) :
    el("p", { class: "soft" }, "None: these runs have the same recipe, ranks and versions."));

const FACTS = { parameters: compact, tokens: compact, steps: whole, tokens_per_step: whole, sequence_length: whole, world_size: whole,
  micro_batch: whole, accumulation_steps: whole, training_flops: (n) => n.toExponential(2), tokens_per_parameter: (n) => trimmed(n, 3) };

const plan = (run) => {
  const { facts, pairs } = run.plan;
  if (!pairs.length && !Object.keys(facts).length) return null;
  const rows = pairs.map(({ label, unit, predicted, measured }) => [label,
    UNITS[unit](predicted), UNITS[unit](measured),
    typeof predicted === "number" && typeof measured === "number" && predicted ? `${trimmed(measured / predicted, 3)} ×` : "–"]);
  return el("section", { class: "card" }, el("h2", {}, "Plan beside measured"),
    table(["", "planned", "measured", "ratio"], rows, [1, 2, 3]),
    el("p", { class: "soft small", style: { marginTop: "10px" } }, Object.entries(facts).map(([name, value]) =>
      `${spoken(name)} ${(FACTS[name] || String)(value)}`).join(" · ")));
};

// This run beside the one that its recipe repeats, newest first; below zero this run is better.
const publishedBeside = (run) => {
  const made = run.published;
  if (!made || !(made.rows.length || made.notes.length)) return null;
  const signed = (gap) => (gap > 0 ? "+" : "") + fixed(4)(gap);
  const cells = made.rows.slice().reverse().map(([tokens, own, published, gap]) => [compact(tokens, 4), fixed(4)(own), fixed(4)(published), signed(gap)]);
  const beside = made.rows.length ? table(["tokens", `${spoken(made.metric)}, this run`, "published", "gap"], cells, [0, 1, 2, 3]) : null;
  if (beside) beside.classList.add("tall");
  return el("section", { class: "card", id: "published" }, el("h2", {}, `Beside the published run: ${made.run}`), made.notes.map((note) => el("p", { class: "soft" }, note)), beside);
};

// The steps that count, then what was lost to which cause.
const spent = (run) => {
  if (!run.spent) return null;
  const { seconds, ranks, counted, lost } = run.spent, share = (part) => percent(part / seconds);
  return el("section", { class: "card", id: "spent" }, el("h2", {}, "Where the time went"),
    table(["", "time", "share"], [["steps that count", duration(counted), share(counted)], ...lost.map(([name, lasted]) => [name, duration(lasted), share(lasted)])], [1, 2]),
    el("p", { class: "soft small", style: { marginTop: "10px" } }, `${duration(seconds)} of wall time, ${duration(ranks)} of all ranks together; without the time between a stop on request and the next start.`));
};

const scores = (run) => {
  const { names, rows } = run.scores;
  if (!rows.length) return null;
  const cells = rows.slice().reverse().map(([step, ...values]) => [whole(step), ...values.map((value, i) =>
    el("span", { style: { fontWeight: names[i] === "eval/loss" && value === run.best_validation ? 700 : 400 } }, fixed(4)(value)))]);
  const all = names.map((_, i) => i + 1);
  const box = el("section", { class: "card" }, el("h2", {}, "Evaluation scores"), table(["step", ...names.map(spoken)], cells, [0, ...all]));
  box.querySelector(".scroll").classList.add("tall");
  return box;
};

// One slider over the steps, and one over the prompts if there are several.
const samples = (run) => {
  const { prompts, steps } = run.samples;
  if (!steps.length) return null;
  const label = el("span", { class: "soft small" }), text = el("pre"), last = steps.length - 1;
  const slider = (name, most, first) => el("input", { type: "range", min: 0, max: most, value: Math.min(most, memory.get(name, first) ?? most), "aria-label": `which ${name}`,
    // at the newest step it stays there when the page loads again
    oninput: (event) => { const at = Number(event.target.value); memory.set(name, name === "step" && at === most ? null : at); show(); } });
  const ofStep = slider("step", last, last), ofPrompt = slider("prompt", prompts.length - 1, 0);
  const show = () => {
    const [step, ...texts] = steps[Number(ofStep.value)], k = Number(ofPrompt.value);
    label.textContent = [`step ${whole(step)}`, prompts.length > 1 ? `prompt ${k + 1} of ${prompts.length}` : "", prompts[k] ? `“${prompts[k]}”` : "no prompt"].filter(Boolean).join(" · ");
    text.textContent = texts[k] === null ? "No sample of this prompt at this step." : texts[k];
  };
  show();
  return el("section", { class: "card", id: "samples" }, el("div", { class: "head" }, el("h2", {}, "Samples"), el("span", { class: "grow" }),
    el("div", { class: "tools" }, el("label", {}, "step", ofStep), prompts.length > 1 ? el("label", {}, "prompt", ofPrompt) : null)), label, text);
};

// The end of what rank 0 printed.
const consoleLog = (run) => {
  if (!run.console) return null;
  const text = el("pre", { class: "log" }, run.console);
  const box = el("details", { class: "card", id: "console", ontoggle: () => { memory.set("open-console", box.open); text.scrollTop = text.scrollHeight; } },
    el("summary", {}, "Console"), text);
  box.open = memory.get("open-console", false);
  return box;
};

// Saves and uploads are many and go well: the reader asks for them.
const events = (run) => {
  if (!run.events.length) return null;
  const level = (kind) => (run.marks.find((mark) => mark.kind === kind) || { level: "note" }).level;
  const count = run.events.filter(({ routine }) => routine).length, all = memory.get("routine", false);
  const rows = run.events.slice().reverse().filter(({ routine }) => all || !routine).map((event) => {
    const { time, event: kind, step, routine, export: files, ...rest } = event;
    const details = Object.entries(rest).map(([key, value]) => [key, inWords(key, value)]).filter(([, text]) => text !== "");
    return [el("span", { class: "num soft" }, time ? clock(Date.parse(time) / 1000) : ""),
      el("span", { class: "kind" }, el("span", { class: `level ${level(kind)}` }), spoken(String(kind))), whole(step),
      details.map(([key, text]) => `${proper(spoken(key))} ${text}`).join(" · ")];
  });
  const box = el("section", { class: "card", id: "events" }, el("div", { class: "head" }, el("h2", {}, "Events"), el("span", { class: "grow" }),
    count ? el("div", { class: "tools" }, tick("routine", `saves and uploads (${count})`, false, draw)) : null), table(["when", "what", "step", "details"], rows, [2]));
  box.querySelector(".scroll").classList.add("tall");
  return box;
};

const folded = (label, value, name) => {
  if (!value || !Object.keys(value).length) return null;
  const box = el("details", { class: "card", ontoggle: () => memory.set(`open-${name}`, box.open) }, el("summary", {}, label), el("pre", {}, JSON.stringify(value, null, 2)));
  box.open = memory.get(`open-${name}`, false);
  return box;
};

// Asks the server that the page comes from for what has changed, and draws that; says so when nobody answers.
const keepFresh = (changed) => {
  let tag = data.tag;
  const note = el("div", { class: "stale", role: "status" });
  const ask = async () => {
    try {
      const answer = document.hidden || isBusy() ? null : await fetch(data.address, { headers: { "If-None-Match": tag } });
      if (answer && answer.status === 200) {
        data = await answer.json();
        tag = answer.headers.get("ETag");
        changed();
      }
      if (answer) note.textContent = answer.ok || answer.status === 304 ? "" : `The server answers ${answer.status}: ${await answer.text()}`;
    } catch { note.textContent = "The server does not answer: what is shown is not fresh."; }
    setTimeout(ask, 1000 * data.every_seconds);
  };
  document.body.append(note);
  setTimeout(ask, 1000 * data.every_seconds);
};
// Whether somebody has just had hand on the page.
let lastTouch = 0;
for (const kind of ["pointermove", "pointerdown", "wheel", "keydown"]) addEventListener(kind, () => { lastTouch = Date.now(); }, { passive: true });
const isBusy = () => Date.now() - lastTouch < 2000;
