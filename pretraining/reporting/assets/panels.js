"use strict";
// Which charts there are: their group, title, unit and lines. How one is drawn: charts.js.

// [title, metrics, options] of the charts that have several metrics, or a better title than a metric's name.
const GROUPS = [
  ["Training", [
    ["Learning rate", ["train/learning_rate"]],
    ["Gradient norm before clipping", ["train/grad_norm"], { logY: true }],
  ]],
  ["Validation", [
    ["Bits per byte, validation", ["eval/bits_per_byte"]],
  ]],
  ["Scores", []],
  ["Speed", [
    ["Tokens per second, all ranks together", ["throughput/tokens_per_second"]],
    ["Samples per second, all ranks together", ["throughput/samples_per_second"]],
    ["Share of the GPU's dense peak: MFU and HFU", ["throughput/mfu", "throughput/hfu"]],
    ["Time of a step and its parts, mean", ["throughput/step_seconds", "throughput/forward_backward_seconds", "throughput/optimizer_seconds", "throughput/data_wait_seconds"]],
    ["Time of validations and saves since the row before", ["throughput/evaluation_seconds", "throughput/saving_seconds"]],
    ["Goodput: share of the wall time in steps that counted", ["throughput/goodput"]],
    ["Time for which a save held up training", ["train/save_blocked_seconds"]],
    ["Cost so far, and foreseen at the end, in dollars", ["cost/dollars", "cost/dollars_at_end"]],
  ]],
  ["Memory and hardware", [
    ["Peak memory of the fullest rank", ["memory/peak_bytes", "memory/reserved_bytes", "memory/host_peak_bytes"]],
    ["Host memory for the copy that is saved", ["train/save_snapshot_bytes"]],
    ["GPU use: share of the time with a kernel running, mean of all ranks", ["hardware/gpu_utilization"]],
    ["GPU temperature, the hottest of all ranks", ["hardware/gpu_temperature_celsius"]],
    ["GPU power, all ranks together", ["hardware/gpu_power_watts"]],
    ["GPU clock, the slowest of all ranks", ["hardware/gpu_clock_mhz"]],
    ["GPU memory clock, the slowest of all ranks", ["hardware/gpu_memory_clock_mhz"]],
    ["A GPU is slowed down by heat: 1 is yes", ["hardware/gpu_thermal_slowdown"]],
  ]],
  ["Stability", [
    ["Spikes of the loss so far", ["stability/spikes"]],
    ["Steps whose loss or gradients were not finite, so far", ["stability/non_finite_steps"]],
    ["Steps refused so far", ["stability/refused_steps"]],
    ["Gradient noise scale", ["stability/gradient_noise_scale"], { logY: true }],
  ]],
];
const NOT_DRAWN = ["train/loss", "eval/loss", "eval/perplexity", "train/perplexity", "throughput/samples_per_second", "train/tokens", "train/epoch", "throughput/budget_share", "throughput/seconds_left",
  "throughput/tokens_per_second_per_device", "throughput/slowest_rank_own_seconds", "throughput/slow_rank_seconds", "cost/gpu_hours", "throughput/data_wait_share"];

// `group/metric/part`: the parts of one metric, such as the layers of the gradient norm, are lines of one chart. So are
// what is trained and what is validated under one name, such as the loss of a source.
const MANY = 8; // lines of one chart, beyond which colours tell their order
const inOrder = new Intl.Collator("en", { numeric: true }).compare;
const isPart = (name) => name.split("/").length > 2;
const PHASES = { train: "training", eval: "validation" };
const phaseOf = (name) => isPart(name) ? undefined : PHASES[name.split("/")[0]];
const ofSource = (name) => data.runs.some((run) => run.sources.includes(name) || `eval/${name}_bits_per_byte` in run.series);
const chartOf = (name) => isPart(name) ? name.slice(0, name.lastIndexOf("/") + 1) : phaseOf(name) ? name.slice(name.indexOf("/") + 1) : name;
const PARTS = { "memory/host_peak_bytes": "host, whole process", "memory/peak_bytes": "GPU, allocated", "memory/reserved_bytes": "GPU, reserved", "throughput/step_seconds": "whole step" };
const partOf = (name) => PARTS[name] || (/^hardware.*\/\d+$/.test(name) ? `rank ${name.split("/")[2]}` : isPart(name) ? spoken(name.slice(name.lastIndexOf("/") + 1)) : phaseOf(name) && phasesOf(name).length > 1 ? phaseOf(name) : proper(spoken(name).replace(/ seconds$| bytes$/, "")));
const phasesOf = (name) => Object.keys(PHASES).filter((group) => data.runs.some((run) => `${group}/${chartOf(name)}` in run.series));

const groupOf = (name) => {
  const first = name.split("/")[0];
  if (first === "eval" && isPart(name)) return "Scores";
  if (first === "memory" || first === "hardware" || /gpu|_bytes$|_watts$|_celsius$|_mhz$/.test(name)) return "Memory and hardware";
  return { eval: "Validation", throughput: "Speed", cost: "Speed", stability: "Stability" }[first] || "Training";
};
const titleOf = (name) => {
  const ofLayers = /^stability\/(gradient_norm|activation|attention_logit)\//.exec(name);
  if (ofLayers) return { gradient_norm: "Gradient norm by layer", activation: "Activation (root mean square) by layer", attention_logit: "Largest attention logit by layer" }[ofLayers[1]];
  if (name.startsWith("hardware/gpu_")) return `GPU ${spoken(chartOf(name)).slice(4, -1).replace(/ (celsius|watts|mhz)$/, "")} of each rank`;
  if (isPart(name)) return name.startsWith("eval/") ? proper(chartOf(name).slice(5, -1)) : titled(spoken(chartOf(name)).slice(0, -1));
  const source = /^(.+)_(loss|perplexity|bits_per_byte)$/.exec(chartOf(name));
  const title = source && ofSource(source[1]) ? `${titled(spoken(source[2]))} of ${source[1]}` : titled(proper(spoken(name)));
  return phaseOf(name) && phasesOf(name).length < 2 && (source || groupOf(name) === "Validation") ? `${title}, ${phaseOf(name)}` : title;
};

// What the numbers at an axis count. Times, bytes and shares carry their unit themselves.
const UNIT_NAMES = [[/bits_per_byte$/, "bits per byte"], [/loss$/, "nats per token"], [/samples_per_second/, "samples/s"], [/tokens_per_second/, "tokens/s"],
  [/noise_scale$/, "tokens"], [/celsius/, "°C"], [/watts/, "W"], [/mhz/, "MHz"], [/steps$/, "steps"]];
const unitName = (metric) => (UNIT_NAMES.find(([pattern]) => pattern.test(metric)) || [, ""])[1];

// [[group, [[title, metrics, options], ...]], ...] of what the runs have.
const chartsOfRuns = () => {
  const known = GROUPS.flatMap(([, charts]) => charts.flatMap(([, names]) => names));
  const names = [...new Set(data.runs.flatMap((run) => Object.keys(run.series)))].filter((name) => !known.includes(name) && !NOT_DRAWN.includes(name));
  // Steps refused, or pauses: if there were none, their axis would only mislead.
  const isNothing = (metrics) => metrics.every((name) => data.runs.every((run) => !run.series[name] || run.series[name].value.every((y) => y === 0)));
  const hasValues = (name) => data.runs.some((run) => run.series[name] && run.series[name].value.some((y) => y !== null));
  const others = [...new Set(names.map(chartOf))].map((chart) => names.filter((name) => chartOf(name) === chart).sort((a, b) => inOrder(phaseOf(a) || a, phaseOf(b) || b)));
  return GROUPS.map(([group, charts]) => {
    const found = others.filter((together) => groupOf(together.find((name) => name.startsWith("train/")) || together[0]) === group);
    return [group, [...charts, ...found.map((together) => [titleOf(together[0]), together])].map(([title, metrics, options]) => {
      const there = metrics.filter(hasValues); // a chart of several metrics that has one of them says which
      return [there.length === 1 && (metrics.length > 1 || isPart(there[0])) ? `${title}: ${partOf(there[0])}` : title, there, options];
    }).filter(([, metrics]) => !isNothing(metrics))];
  }).filter(([, charts]) => charts.length);
};

const NOISY = /^stability|^train.*(loss|perplexity)$|grad_norm|per_second|mfu|utilization|^throughput.step_seconds/;
const same = (a, b) => a && b && a.value.length === b.value.length && a.value.every((y, i) => y === b.value[i]);
const chartLines = (names) => [...names.flatMap((name) => data.runs.flatMap((run, i) => publishedLines(run, i, name))), ...ownLines(names)];
const ownLines = (names) => names.flatMap((name, k) => data.runs.map((run, i) => ({
  label: [several ? run.name : "", names.length > 1 || !several ? partOf(name) : ""].filter(Boolean).join(" "),
  run: several ? run.name : null, runLabel: run.name, part: names.length > 1 ? partOf(name) : null, metric: name, noisy: NOISY.test(name),
  color: several ? colorOfRun(i) : names.length > MANY ? depthColor(k, names.length) : runColor(k), dash: several && k ? [1 + (5 * k) % 6, 3 + (k % 6)] : null, dots: name.startsWith("eval/"), series: run.series[name],
}))).flatMap((line, _, all) => all.some((other) => other !== line && other.run === line.run && same(other.series, line.series) && all.indexOf(other) < all.indexOf(line)) ? [] :
  line.noisy && names.length <= MANY ? withSmooth(line, memory.get("smooth", 0.01)) : [line]);

const planned = (names) => {
  if (several || !names.includes("memory/peak_bytes")) return [];
  const pair = data.runs[0].plan.pairs.find(({ quantity }) => quantity === "peak_memory_bytes");
  const measured = data.runs[0].series["memory/peak_bytes"];
  if (!pair || typeof pair.predicted !== "number" || !measured) return [];
  return [{ label: "planned peak", color: color("note"), dash: [6, 4], series: { ...measured, value: measured.value.map(() => pair.predicted) } }];
};

// The points of these metrics, one a line: a table that pandas and spreadsheets read.
const csvOf = (names) => {
  const cell = (text) => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = data.runs.flatMap((run) => names.filter((name) => run.series[name]).flatMap((name) => {
    const { step, tokens, hours, value } = run.series[name];
    return value.map((y, i) => [cell(run.name), cell(name), step[i], tokens[i], hours[i], y === null ? "NaN" : y].join(","));
  }));
  return ["run,metric,step,tokens,hours,value", ...rows, ""].join("\n");
};
const csvButton = (label, file, names) => el("button", { type: "button", class: "plain", title: `The points drawn here. Every row: python -m pretraining.reporting csv ${data.runs.map((run) => run.folder).join(" ")}`, onclick: () => {
  const address = URL.createObjectURL(new Blob([csvOf(names)], { type: "text/csv" }));
  el("a", { href: address, download: `${file.replace(/[^\w.-]+/g, "-").toLowerCase()}.csv` }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
} }, label);

const chartGroups = () => {
  for (const [group, charts] of chartsOfRuns()) {
    const grid = el("div", { class: "grid" }), id = group.toLowerCase().replaceAll(" ", "-");
    const box = el("details", { class: "group", id }, el("summary", {}, group, el("span", { class: "soft small" }, ` ${charts.length}`)), grid);
    box.open = memory.get(`open-${id}`, true);
    page.append(box);
    let empty = true;
    const fill = () => {
      if (!box.open || !empty) return; // a closed group has no width to draw in
      empty = false;
      const cards = charts.map(([title, metrics]) => el("div", { class: "card" }, el("div", { class: "title" }, el("h3", {}, title),
        el("span", { class: "soft small" }, unitName(metrics[0])), el("span", { class: "grow" }), csvButton("CSV", title, metrics))));
      grid.append(...cards); // all of them before the first is drawn: their number decides their width
      charts.forEach(([, metrics, options], i) => drawChart(cards[i], [...chartLines(metrics), ...planned(metrics)], { unit: unitOf(metrics[0]), runs: data.runs, ...options }));
    };
    box.addEventListener("toggle", () => { memory.set(`open-${id}`, box.open); fill(); });
    fill();
  }
};
