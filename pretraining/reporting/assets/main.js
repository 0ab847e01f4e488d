"use strict";
// The page: one run with everything, or several overlaid.

let data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const several = data.runs.length > 1;

const lossLines = () => {
  const strength = memory.get("smooth", 0.01);
  return data.runs.flatMap((run, i) => {
    const train = run.series["train/loss"], validation = run.series["eval/loss"];
    const main = several ? colorOfRun(i) : color("accent"), other = several ? colorOfRun(i) : color("second");
    const name = several ? run.name : "training", parts = (part) => ({ run: several ? run.name : null, runLabel: run.label, part });
    return [
      ...foreseenLines(run, i), // first: beneath the run's own
      ...["train/loss", "eval/loss"].flatMap((name) => publishedLines(run, i, name)),
      train && strength > 0 ? { label: `${name} raw`, belongsTo: name, quiet: true, color: faded(main, 0.28), width: 1, series: train, ...parts("training") } : null,
      train ? { label: name, ...parts("training"), color: main, width: 2, series: strength > 0 ? smoothed(train, strength) : train } : null,
      validation ? { label: several ? `${run.name} validation` : "validation", ...parts("validation"), color: other, width: 2, dash: several ? [6, 4] : null, dots: true, series: validation } : null,
      memory.get("forecast", false) ? forecastLine(run, i) : null,
    ].filter(Boolean);
  });
};

// A published series up to some tokens, as far as its axes may reach: the next point can lie many times the run beyond.
// Between two points it ends by the logarithm of the tokens, as its table has it.
const upTo = (series, reached) => {
  const next = series.tokens.findIndex((tokens) => tokens > reached), count = next < 0 ? series.tokens.length : next;
  const cut = Object.fromEntries(Object.entries(series).map(([key, values]) => [key, values.slice(0, count)]));
  const before = series.tokens[next - 1];
  if (next > 0 && before > 0 && before < reached) {
    const [low, high] = series.value.slice(next - 1, next + 1), share = Math.log(reached / before) / Math.log(series.tokens[next] / before);
    cut.tokens.push(reached);
    cut.step.push(series.step[next] * reached / series.tokens[next]);
    cut.value.push(low + share * (high - low));
  }
  return cut;
};

// The curve of the run that a recipe repeats, once for all runs that name it: as far as they have come, or to its end.
const publishedLines = (run, i, name) => {
  const made = run.published, series = made && made.series[name];
  if (!series || xName() === "hours" || data.runs.findIndex((other) => other.published && other.published.run === made.run) < i) return [];
  const reached = Math.max(...data.runs.map(({ last_place: at }) => at ? at.tokens : 0));
  const part = name === "train/loss" ? "published, training" : "published", note = made.is_comparable ? "" : " (not comparable)";
  return [{ label: `${part}: ${made.run}${note}`, run: null, part, metric: name, color: color("note"), dash: name === "train/loss" ? [1, 4] : [6, 4], width: 1.5, dots: name !== "train/loss",
    series: memory.get("publishedWhole", false) ? series : upTo(series, reached) }];
};

// What the ladder foresees of the validation: if the rate had fallen by then, and the band up to that of a stable rate.
const foreseenLines = (run, i) => {
  if (!run.foreseen || xName() === "hours") return [];
  const shade = several ? colorOfRun(i) : color("good"), label = several ? `${run.name} foreseen` : "foreseen, once decayed";
  return bandLines(label, shade, run.foreseen, { run: several ? run.name : null, runLabel: run.label, part: "foreseen", dash: [3, 4] });
};

const forecastLine = (run, i) => {
  const made = run.heading, at = run.last_place;
  if (!made || !at || xName() === "hours" || at.tokens >= made.tokens) return null;
  const tokens = Array.from({ length: 60 }, (_, k) => at.tokens + (k / 59) * (made.tokens - at.tokens));
  const series = { tokens, step: tokens.map((x) => (x / at.tokens) * at.step), value: tokens.map((x) => made.floor + made.scale * (x / made.unit) ** -made.exponent) };
  return { label: several ? `${run.name} heading` : "heading for", run: several ? run.name : null, runLabel: run.label, part: "heading for", color: several ? colorOfRun(i) : color("note"), dash: [2, 4], width: 1.5, series };
};

const lossCard = () => {
  const charts = el("div");
  const redraw = () => draw();
  const slider = el("input", { type: "range", min: 0, max: 100, value: 100 * Math.sqrt(memory.get("smooth", 0.01) / 0.2), "aria-label": "smoothing",
    onchange: () => { memory.set("smooth", 0.2 * (slider.value / 100) ** 2); redraw(); } });
  const box = el("section", { class: "card", id: "loss" },
    el("div", { class: "head" }, el("h2", {}, "Loss, training and validation"), el("span", { class: "soft small" }, "nats per token"), el("span", { class: "grow" }),
      el("div", { class: "tools" }, choice("x", [["tokens", "tokens"], ["step", "steps"], ["hours", "hours"]], "tokens", redraw),
        tick("logX", "log x", false, redraw), tick("logY", "log y", false, redraw), tick("whole", "from the start", false, redraw),
        data.runs.some((run) => run.heading) ? tick("forecast", "forecast", false, redraw) : null,
        data.runs.some((run) => run.published) ? tick("publishedWhole", "published to its end", false, redraw) : null,
        el("label", {}, "smoothing", slider), csvButton("CSV", "loss", ["train/loss", "eval/loss"]))),
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
  if (data.address) page.append(el("a", { href: "/", class: "small" }, "← all runs"));
  if (several) page.append(el("header", { class: "head" }, el("h1", {}, data.runs.map((run) => run.name).join(" · ")), el("span", { class: "grow" }), themeButton()), comparison(data), differing(data));
  else page.append(head(data.runs[0], data), tiles(data.runs[0]), words(data.runs[0]));
  if (data.runs.some((run) => run.is_partial)) page.append(el("p", { class: "soft", id: "partial" }, "A first look: some rows from all over a long run. All of them are being read."));
  lossCard();
  chartGroups();
  const run = detailed();
  page.append(...[several ? words(run) : null, publishedBeside(run), plan(run), spent(run), scores(run), samples(run), events(run), consoleLog(run),
    folded("Recipe", run.recipe, "recipe"), folded("Environment", run.environment, "environment")].filter(Boolean), footer(run));
  age();
  scrollTo(0, place);
};

const everyMetric = () => [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))];
const footer = (run) => el("footer", { class: "head" }, csvButton("All curves as CSV", data.runs.map((run) => run.name).join("-"), everyMetric()), [`written ${clock(data.written)}`, `${whole(run.num_rows)} logged rows`, run.folder,
  run.broken_lines ? `${run.broken_lines} line(s) of metrics.jsonl could not be read` : ""].filter(Boolean).join(" · "));

// A page whose run is alive loads itself again, unless somebody is reading with hand on it. The state of
// its runs follows from the reader's clock: nobody writes the page of a run that was killed.
const age = () => {
  for (const node of document.querySelectorAll("[data-standing]")) {
    const run = data.runs[node.dataset.standing], state = stateOf(run);
    if (node.classList.contains("pill")) node.className = `pill ${state}`;
    node.textContent = node.dataset.long ? standingText(run) : state;
  }
};

setInterval(age, 1000);
if (data.address) keepFresh(draw);
else if (data.every_seconds) {
  setInterval(() => { if (!document.hidden && !isBusy()) { memory.set("scroll", scrollY); location.reload(); } }, 1000 * Math.max(5, data.every_seconds));
}

applyTheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(); draw(); });
draw();
scrollTo(0, memory.get("scroll", 0));
memory.set("scroll", 0);
let fitting = 0;
addEventListener("resize", () => { cancelAnimationFrame(fitting); fitting = requestAnimationFrame(fitCharts); });
document.documentElement.dataset.drawn = "yes";
