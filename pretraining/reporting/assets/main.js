"use strict";
// The page: one run with everything, or several overlaid.

const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const several = data.runs.length > 1;

const applyTheme = () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = memory.get("theme", system);
};

const lossLines = () => {
  const strength = memory.get("smooth", 0.01);
  return data.runs.flatMap((run, i) => {
    const train = run.series["train/loss"], validation = run.series["eval/loss"];
    const main = several ? runColor(i) : color("accent"), other = several ? runColor(i) : color("second");
    const name = several ? run.name : "training", parts = (part) => ({ run: several ? run.name : null, part });
    return [
      train && strength > 0 ? { label: `${name} raw`, belongsTo: name, quiet: true, color: faded(main, 0.28), width: 1, series: train, ...parts("training") } : null,
      train ? { label: name, ...parts("training"), color: main, width: 2, series: strength > 0 ? smoothed(train, strength) : train } : null,
      validation ? { label: several ? `${run.name} validation` : "validation", ...parts("validation"), color: other, width: 2, dash: several ? [6, 4] : null, dots: true, series: validation } : null,
      memory.get("forecast", false) ? forecastLine(run, i) : null,
    ].filter(Boolean);
  });
};

const forecastLine = (run, i) => {
  const made = run.heading, at = run.last_place;
  if (!made || !at || xName() === "hours" || at.tokens >= made.tokens) return null;
  const tokens = Array.from({ length: 60 }, (_, k) => at.tokens + (k / 59) * (made.tokens - at.tokens));
  const series = { tokens, step: tokens.map((x) => (x / at.tokens) * at.step), value: tokens.map((x) => made.floor + made.scale * (x / made.unit) ** -made.exponent) };
  return { label: several ? `${run.name} heading` : "heading for", run: several ? run.name : null, part: "heading for", color: several ? runColor(i) : color("note"), dash: [2, 4], width: 1.5, series };
};

const lossCard = () => {
  const charts = el("div");
  const redraw = () => draw();
  const slider = el("input", { type: "range", min: 0, max: 100, value: 100 * Math.sqrt(memory.get("smooth", 0.01) / 0.2), "aria-label": "smoothing",
    onchange: () => { memory.set("smooth", 0.2 * (slider.value / 100) ** 2); redraw(); } });
  const box = el("section", { class: "card", id: "loss" },
    el("div", { class: "head" }, el("h2", {}, "Loss"), el("span", { class: "soft small" }, "nats per token"), el("span", { class: "grow" }),
      el("div", { class: "tools" }, choice("x", [["tokens", "tokens"], ["step", "steps"], ["hours", "hours"]], "tokens", redraw),
        tick("logX", "log x", false, redraw), tick("logY", "log y", false, redraw), tick("whole", "from the start", false, redraw),
        data.runs.some((run) => run.heading) ? tick("forecast", "forecast", false, redraw) : null,
        el("label", {}, "smoothing", slider))),
    charts, markFilter());
  page.append(box);
  const chart = drawChart(charts, lossLines(), { unit: "loss", height: innerWidth < 560 ? 280 : 380, logY: memory.get("logY", false), settled: !memory.get("whole", false), runs: data.runs });
  if (!chart) charts.append(el("p", { class: "soft", style: { margin: "12px 0" } }, "No loss has been logged yet."));
};

const markFilter = () => {
  const counts = {};
  for (const run of data.runs) for (const mark of run.marks) counts[mark.level] = (counts[mark.level] || 0) + 1;
  const labels = { bad: "spikes, alerts, rollbacks", warn: "warnings", note: "starts, resumes, notes", good: "checkpoints" };
  return el("div", { class: "tools", style: { marginTop: "10px" } }, Object.entries(labels).filter(([level]) => counts[level]).map(([level, label]) => {
    const box = tick(`marks-${level}`, "", true, draw);
    box.append(el("span", { class: `level ${level}`, style: { marginRight: 0 } }), `${label} (${counts[level]})`);
    return box;
  }), el("span", { class: "grow" }), el("span", { class: "small" }, "drag to zoom, double-click to reset"));
};

const CHARTS = [
  ["Learning rate", ["train/learning_rate"]],
  ["Gradient norm", ["train/grad_norm"], { logY: true }],
  ["Throughput", ["throughput/tokens_per_second"]],
  ["Share of the dense peak", ["throughput/mfu", "throughput/hfu"]],
  ["Where a step's time goes", ["throughput/step_seconds", "throughput/forward_backward_seconds", "throughput/optimizer_seconds", "throughput/data_wait_seconds"]],
  ["Pauses", ["throughput/evaluation_seconds", "throughput/saving_seconds"]],
  ["Goodput", ["throughput/goodput"]],
  ["GPU utilization", ["hardware/gpu_utilization"]],
  ["Memory", ["memory/peak_bytes", "memory/reserved_bytes", "memory/host_peak_bytes"]],
  ["Bits per byte", ["eval/bits_per_byte"], { unit: "loss" }],
];
const NOT_DRAWN = ["train/loss", "eval/loss", "train/perplexity", "eval/perplexity", "throughput/samples_per_second", "train/tokens", "train/epoch", "throughput/budget_share", "throughput/seconds_left",
  "throughput/tokens_per_second_per_device", "throughput/slowest_rank_own_seconds", "throughput/data_wait_share"];

const chartLines = (names) => names.flatMap((name, k) => data.runs.map((run, i) => ({
  label: [several ? run.name : "", names.length > 1 || !several ? partOf(name) : ""].filter(Boolean).join(" "),
  run: several ? run.name : null, part: names.length > 1 ? partOf(name) : null, noisy: NOISY.test(name),
  color: several ? runColor(i) : names.length > MANY ? depthColor(k, names.length) : runColor(k), dash: several && k ? [1 + (5 * k) % 6, 3 + (k % 6)] : null, dots: name.startsWith("eval/"), series: run.series[name],
}))).flatMap((line, _, all) => all.some((other) => other !== line && other.run === line.run && same(other.series, line.series) && all.indexOf(other) < all.indexOf(line)) ? [] :
  line.noisy && names.length <= MANY ? withSmooth(line, memory.get("smooth", 0.01)) : [line]);
const NOISY = /^stability|^train.*loss$|grad_norm|tokens_per_second|mfu|utilization|^throughput.step_seconds/;
const same = (a, b) => a && b && a.value.length === b.value.length && a.value.every((y, i) => y === b.value[i]);

const planned = (names) => {
  if (several || !names.includes("memory/peak_bytes")) return [];
  const pair = data.runs[0].plan.pairs.find(({ quantity }) => quantity === "peak_memory_bytes");
  const measured = data.runs[0].series["memory/peak_bytes"];
  if (!pair || typeof pair.predicted !== "number" || !measured) return [];
  return [{ label: "planned peak", color: color("note"), dash: [6, 4], series: { ...measured, value: measured.value.map(() => pair.predicted) } }];
};

// `group/metric/part`: the parts of one metric, such as the layers of the gradient norm, are lines of one chart. So are
// what is trained and what is validated under one name, such as the loss of a source.
const MANY = 8; // lines of one chart, beyond which colours tell their order
const inOrder = new Intl.Collator("en", { numeric: true }).compare;
const isPart = (name) => name.split("/").length > 2;
const PHASES = { train: "training", eval: "validation" };
const phaseOf = (name) => isPart(name) ? undefined : PHASES[name.split("/")[0]];
const ofSource = (name) => data.runs.some((run) => run.sources.includes(name) || `eval/${name}_bits_per_byte` in run.series);
const chartOf = (name) => isPart(name) ? name.slice(0, name.lastIndexOf("/") + 1) : phaseOf(name) ? name.slice(name.indexOf("/") + 1) : name;
const PARTS = { "memory/host_peak_bytes": "host, whole process", "memory/peak_bytes": "GPU, allocated", "memory/reserved_bytes": "GPU, reserved" };
const partOf = (name) => PARTS[name] || (isPart(name) ? spoken(name.slice(name.lastIndexOf("/") + 1)) : phaseOf(name) && phasesOf(name).length > 1 ? phaseOf(name) : spoken(name).replace(/ seconds$| bytes$/, ""));
const TITLES = { "train/save_blocked_seconds": "Time for which a save held up training", "train/save_snapshot_bytes": "Host memory for the copy that is saved",
  "stability/refused_steps": "Steps refused so far" };
const phasesOf = (name) => Object.keys(PHASES).filter((group) => data.runs.some((run) => `${group}/${chartOf(name)}` in run.series));
const titleOf = (name) => {
  if (name in TITLES) return TITLES[name];
  if (name.startsWith("stability/gradient_norm/")) return "Gradient norm by layer";
  if (isPart(name)) return name.startsWith("eval/") ? proper(chartOf(name).slice(5, -1)) : titled(spoken(chartOf(name)).slice(0, -1));
  const source = /^(.+)_(loss|bits_per_byte)$/.exec(chartOf(name));
  const title = source && ofSource(source[1]) ? `${titled(spoken(source[2]))} of ${source[1]}` : titled(proper(spoken(name)));
  return phaseOf(name) && phasesOf(name).length < 2 && source ? `${title}, ${phaseOf(name)}` : title;
};

const chartGrid = () => {
  const grid = el("section", { class: "grid" });
  page.append(grid);
  const known = CHARTS.flatMap(([, names]) => names);
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].filter((name) => !known.includes(name) && !NOT_DRAWN.includes(name));
  // Steps refused, or pauses: if there were none, their axis would only mislead.
  const isNothing = (metrics) => metrics.every((name) => data.runs.every((run) => !run.series[name] || run.series[name].value.every((y) => y === 0)));
  const hasValues = (name) => data.runs.some((run) => run.series[name] && run.series[name].value.some((y) => y !== null));
  const others = [...new Set(names.map(chartOf))].map((chart) => names.filter((name) => chartOf(name) === chart).sort((a, b) => inOrder(phaseOf(a) || a, phaseOf(b) || b)));
  const charts = [...CHARTS, ...others.map((together) => [titleOf(together[0]), together])];
  const wanted = charts.map(([title, metrics, options]) => {
    const there = metrics.filter(hasValues); // a chart of several metrics that has one of them says which
    return [there.length === 1 && (metrics.length > 1 || isPart(there[0])) ? `${title}: ${partOf(there[0])}` : title, there, options];
  }).filter(([, metrics]) => !isNothing(metrics));
  const boxes = wanted.map(([title]) => el("div", { class: "card" }, el("h3", {}, title)));
  grid.append(...boxes); // all of them before the first is drawn: their number decides their width
  wanted.forEach(([, metrics, options], i) => drawChart(boxes[i], [...chartLines(metrics), ...planned(metrics)], { unit: unitOf(metrics[0]), runs: data.runs, ...options }));
};

const detailed = () => {
  if (!several) return data.runs[0];
  const chosen = Math.min(memory.get("run", 0), data.runs.length - 1);
  page.append(el("div", { class: "head" }, el("h2", {}, "Details of"), choice("run", data.runs.map((run, i) => [i, run.name]), chosen, draw)));
  return data.runs[chosen];
};

const draw = () => {
  const place = scrollY;
  forgetCharts();
  page.replaceChildren();
  if (several) page.append(el("header", { class: "head" }, el("h1", {}, data.runs.map((run) => run.name).join(" · ")), el("span", { class: "grow" }), themeButton()), comparison(data));
  else page.append(head(data.runs[0], data), tiles(data.runs[0]), words(data.runs[0]));
  lossCard();
  chartGrid();
  const run = detailed();
  page.append(...[several ? words(run) : null, plan(run), scores(run), samples(run), events(run),
    folded("Recipe", run.recipe, "recipe"), folded("Environment", run.environment, "environment")].filter(Boolean), footer(run));
  age();
  scrollTo(0, place);
};

const footer = (run) => el("footer", {}, [`written ${clock(data.written)}`, `${whole(run.num_rows)} logged rows`, run.folder,
  run.broken_lines ? `${run.broken_lines} line(s) of metrics.jsonl could not be read` : ""].filter(Boolean).join(" · "));

// A page whose run is alive loads itself again, unless somebody is reading with hand on it. How its runs stand is told
// by the reader's clock: nobody writes the page of a run that was killed.
const age = () => {
  for (const node of document.querySelectorAll("[data-standing]")) {
    const run = data.runs[node.dataset.standing], state = stateOf(run);
    if (node.classList.contains("pill")) node.className = `pill ${state}`;
    node.textContent = node.dataset.long ? standingText(run) : state;
  }
};

let lastTouch = 0;
for (const kind of ["pointermove", "pointerdown", "wheel", "keydown"]) addEventListener(kind, () => { lastTouch = Date.now(); }, { passive: true });
setInterval(age, 1000);
if (data.every_seconds) {
  setInterval(() => { if (!document.hidden && Date.now() - lastTouch > 5000) { memory.set("scroll", scrollY); location.reload(); } }, 1000 * Math.max(5, data.every_seconds));
}

applyTheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(); draw(); });
draw();
scrollTo(0, memory.get("scroll", 0));
memory.set("scroll", 0);
let fitting = 0;
addEventListener("resize", () => { cancelAnimationFrame(fitting); fitting = requestAnimationFrame(fitCharts); });
document.documentElement.dataset.drawn = "yes";
