"use strict";
// Draws charts: uPlot with marks, tooltips, log axes and one x axis for all of them. Which charts there are: panels.js.

const RUN_COLORS = {
  light: ["#2563d9", "#d9730d", "#1a8f4d", "#9b3fc4", "#c2255c", "#0b8793", "#7a6a00", "#5c677d"],
  dark: ["#6ea3ff", "#f5a04c", "#4cc380", "#c98bea", "#f06595", "#46c2cf", "#cdb93a", "#a3b0c2"],
};
const theme = () => document.documentElement.dataset.theme;
const applyTheme = () => {
  const system = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  document.documentElement.dataset.theme = memory.get("theme", system);
};
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const runColor = (index) => RUN_COLORS[theme()][index % 8];
const mixed = (a, b, share) => "#" + [1, 3, 5].map((i) =>
  Math.round((1 - share) * parseInt(a.slice(i, i + 2), 16) + share * parseInt(b.slice(i, i + 2), 16)).toString(16).padStart(2, "0")).join("");
const depthColor = (k, count) => {
  const [first, middle, last] = [0, 4, 1].map(runColor), place = (2 * k) / (count - 1);
  return place < 1 ? mixed(first, middle, place) : mixed(middle, last, place - 1);
};
// Of many runs, as of a sweep, colours tell the order; eight colours that repeat would not tell them apart.
const colorOfRun = (index) => data.runs.length > RUN_COLORS.light.length ? depthColor(index, data.runs.length) : runColor(index);
const faded = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");

const X_AXES = {
  tokens: { label: "tokens", show: (x) => compact(x, 3) },
  step: { label: "step", show: (x) => (Math.abs(x) < 1e5 ? whole(x) : compact(x, 4)) },
  hours: { label: "hours", show: (x) => (x < 100 ? trimmed(x, 3) : whole(x)) },
};
const xName = () => memory.get("x", "tokens");

// [xs, ys] of a series on the chosen axis: ascending, one point an x, and positive where the axis is logarithmic.
const points = (series, logY, logX = memory.get("logX", false)) => {
  const xs = [], ys = [];
  const column = series[xName()] || [];
  for (let i = 0; i < column.length; i++) {
    const x = column[i];
    let y = series.value[i];
    if (x === null || (logX && x <= 0)) continue;
    if (logY && y !== null && y <= 0) y = null;
    if (xs.length && x <= xs[xs.length - 1]) { if (x === xs[xs.length - 1]) ys[ys.length - 1] = y; continue; }
    xs.push(x); ys.push(y);
  }
  return [xs, ys];
};

// Exponential mean over rows, not over points: a bucket of many rows moves it as they would. Forwards and backwards, so
// that it does not lag behind the curve.
const onePass = (values, counts, halfLife) => {
  let mean = 0, weight = 0;
  return values.map((y, i) => {
    if (y === null) return null;
    const keep = 0.5 ** (counts[i] / halfLife);
    mean = keep * mean + (1 - keep) * y;
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
};

const smoothed = (series, strength) => {
  const source = series.mean || series;
  const counts = source.count || source.value.map(() => 1);
  const halfLife = Math.max(0.5, strength * counts.reduce((a, b) => a + b, 0));
  const there = onePass(source.value, counts, halfLife);
  const back = onePass(source.value.slice().reverse(), counts.slice().reverse(), halfLife).reverse();
  return { ...source, value: there.map((y, i) => (y === null ? null : (y + back[i]) / 2)) };
};

const shownMarks = (runs) => runs.filter((run) => !run.hidden).flatMap((run) => run.marks).filter((mark) => memory.get(`marks-${mark.level}`, true));

const drawMarks = (u, marks) => {
  const { ctx, bbox } = u;
  const ratio = devicePixelRatio;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top - 8 * ratio, bbox.width, bbox.height + 8 * ratio);
  ctx.clip();
  for (const mark of marks) {
    const x = Math.round(u.valToPos(mark[xName()], "x", true)) + 0.5;
    if (!isFinite(x)) continue;
    ctx.strokeStyle = ctx.fillStyle = color(mark.level);
    ctx.globalAlpha = mark.level === "bad" ? 0.75 : 0.35;
    ctx.lineWidth = ratio;
    ctx.setLineDash(mark.level === "bad" ? [] : [3 * ratio, 4 * ratio]);
    ctx.beginPath(); ctx.moveTo(x, bbox.top); ctx.lineTo(x, bbox.top + bbox.height); ctx.stroke();
    ctx.globalAlpha = 1;
    ctx.beginPath();
    ctx.moveTo(x - 4 * ratio, bbox.top - 7 * ratio); ctx.lineTo(x + 4 * ratio, bbox.top - 7 * ratio); ctx.lineTo(x, bbox.top);
    ctx.fill();
  }
  ctx.restore();
};

const nearestValue = (u, s, index) => {
  const xs = u.data[0], ys = u.data[s];
  for (let reach = 0; reach < xs.length; reach++) {
    for (const i of [index - reach, index + reach]) {
      if (ys[i] === undefined) continue;
      return Math.abs(u.valToPos(xs[i], "x") - u.cursor.left) < 40 ? ys[i] : undefined;
    }
  }
  return undefined;
};

// Of many lines those whose values are nearest to the pointer, in the lines' order; what is not finite first of all.
const MOST_IN_TIP = 8;
const closest = (values, u) => {
  if (values.length <= MOST_IN_TIP) return values;
  const far = ({ value }) => (value === null ? -1 : Math.abs(u.valToPos(value, "y") - u.cursor.top));
  const near = new Set(values.slice().sort((a, b) => far(a) - far(b)).slice(0, MOST_IN_TIP));
  return values.filter((each) => near.has(each));
};

const tooltip = (u, tip, lines, marks, unit) => {
  const { left, idx } = u.cursor;
  if (left < 0 || idx === null || idx === undefined) { tip.style.display = "none"; return; }
  tip.replaceChildren(el("div", { class: "soft" }, X_AXES[xName()].label, el("b", {}, X_AXES[xName()].show(u.posToVal(left, "x")))));
  const values = lines.map((line, i) => ({ line, value: line.quiet || !u.series[i + 1].show ? undefined : nearestValue(u, i + 1, idx) }));
  for (const { line, value } of closest(values.filter(({ value }) => value !== undefined), u)) {
    tip.append(el("div", {}, el("span", { class: "swatch", style: { background: line.color, alignSelf: "center" } }), line.label,
      el("b", {}, value === null ? "not finite" : UNITS[unit](value))));
  }
  const close = marks.filter((mark) => Math.abs(u.valToPos(mark[xName()], "x") - left) < 6).slice(0, 4);
  for (const mark of close) tip.append(el("div", {}, el("span", { class: `level ${mark.level}` }), mark.label));
  tip.style.display = "block";
  const room = u.over.clientWidth, place = u.over.offsetLeft + left;
  tip.style.left = left > room / 2 ? "" : `${place + 14}px`;
  tip.style.right = left > room / 2 ? `${room - left + 14}px` : "";
  tip.style.top = "8px";
};

const axis = (show, size) => ({
  stroke: color("soft"), grid: { stroke: color("line"), width: 1 }, ticks: { show: false }, size, gap: 6, font: "11px system-ui, sans-serif",
  values: (u, splits) => splits.map((value) => (value === null ? "" : show(value))),
});

const drawn = new Set();

// The part of a curve that is worth looking at: from the lowest value to the highest after the first steps' fall. How
// long that is the runs' own series say, up to `last`: what is drawn beneath them may be much longer. What rises above it
// is cut off; its mark is not.
const settledRange = (lines, last) => (u) => {
  const xs = u.data[0], [from, to] = u.series[0].idxs || [0, xs.length - 1];
  const end = last > xs[from] ? Math.min(last, xs[to]) : xs[to];
  const first = from === 0 ? xs[0] + 0.04 * (end - xs[0]) : xs[from];
  let low = Infinity, high = -Infinity;
  lines.forEach((line, k) => {
    if (line.quiet || !u.series[k + 1].show) return;
    for (let i = from; i <= to; i++) {
      const y = u.data[k + 1][i];
      if (xs[i] < first || y === null || y === undefined) continue;
      low = Math.min(low, y); high = Math.max(high, y);
    }
  });
  if (!(high >= low)) return [0, 1];
  const room = Math.max(high - low, 1e-3 * Math.abs(high));
  return [low - 0.12 * room, high + 0.25 * room];
};

// A noisy series as its points, faint, and a smooth line through them.
const withSmooth = (line, strength) => !line.series || strength <= 0 || line.series.value.length < 60 ? [line] : [
  { ...line, label: `${line.label} raw`, belongsTo: line.label, quiet: true, color: faded(line.color, 0.25), width: 1 },
  { ...line, series: smoothed(line.series, strength) },
];

// lines: [{label, run, runLabel, part, color, series, width, dash, quiet, dots, fill}]
// A line with its interval: {loss, low, high}, each a series.
const bandLines = (label, shade, band, more) => {
  const side = (name, fill) => ({ label: `${label} ${name}`, belongsTo: label, quiet: true, color: faded(shade, 0.45), width: 1, series: band[name], ...fill });
  return [side("high", { fill: faded(shade, 0.1) }), side("low"), { label, color: shade, series: band.loss, ...more }];
};

const drawChart = (box, lines, { unit = "number", height = 200, logY = false, runs = [], toggles = true, settled = false } = {}) => {
  const usable = lines.filter((line) => line.series && line.series.value.some((y) => y !== null));
  if (!usable.length) return null;
  const logX = memory.get("logX", false), marks = shownMarks(runs);
  const last = Math.max(0, ...runs.map((run) => (run.last_place ? run.last_place[xName()] : 0))); // events may be newer than rows
  const tables = [...usable.map((line) => points(line.series, logY)), last ? [[last], [null]] : [[], []]];
  const columns = uPlot.join(tables).slice(0, usable.length + 1);
  const tip = el("div", { class: "tip", role: "status" });
  const holder = el("div", { class: "chart" }, tip);
  box.append(holder);
  const chart = new uPlot({
    width: Math.max(200, holder.clientWidth), height, padding: [10, 10, 0, 0], legend: { show: false },
    cursor: { sync: { key: `x-${xName()}-${logX}` }, drag: { x: true, y: false }, points: { size: 6 }, y: false, focus: { prox: 24 } },
    scales: { x: { time: false, distr: logX ? 3 : 1 }, y: { distr: logY ? 3 : 1, ...(settled && !logY ? { range: settledRange(usable, last) } : {}) } },
    axes: [axis(X_AXES[xName()].show, 28), axis((y) => (unit === "loss" ? compact(y, 4) : UNITS[unit](y)), unit === "bytes" || unit === "share" ? 62 : 54)],
    series: [{}, ...usable.map((line) => ({
      label: line.label, stroke: line.color, width: line.width || 1.5, dash: line.dash, spanGaps: false,
      points: { show: line.series.value.length < (line.dots ? 80 : 3), size: 5, fill: line.color },
    }))],
    bands: usable.flatMap((line, k) => (line.fill ? [{ series: [k + 1, k + 2], fill: line.fill }] : [])), // to the line after it
    hooks: { draw: [(u) => drawMarks(u, marks)], setCursor: [(u) => tooltip(u, tip, usable, marks, unit)] },
  }, columns, holder);
  const name = usable.map((line) => line.label).join() + [...box.closest("section, .card").querySelectorAll("h2, h3")].map((title) => title.textContent);
  if (zooms.has(name)) chart.setScale("x", zooms.get(name));
  drawn.add({ chart, holder, name });
  if (toggles && usable.filter((line) => !line.quiet).length > 1) box.append(legendOf(chart, usable));
  return chart;
};

const swatch = (color, dash) => el("span", { class: "swatch", style: { background: dash ?
  `repeating-linear-gradient(90deg, ${color} 0 ${dash[0]}px, transparent ${dash[0]}px ${dash[0] + dash[1]}px)` : color } });

// One entry a line. Where several runs share a chart of several parts: one a run, by its colour, and one a part, by its
// dashes; a line is shown if both of its entries are chosen.
const legendEntries = (lines) => {
  const loud = lines.filter((line) => !line.quiet);
  const firsts = (key) => loud.filter((line, i) => line[key] && loud.findIndex((other) => other[key] === line[key]) === i);
  const runs = firsts("run"), parts = firsts("part");
  if (runs.length > 1 && parts.length > 1) return [
    ...runs.map((line) => ({ label: line.runLabel, color: line.color, covers: (other) => other.run === line.run })),
    ...parts.map((line) => ({ label: line.part, color: color("soft"), dash: line.dash, covers: (other) => other.part === line.part }))];
  return loud.map((line) => ({ label: line.run && line.label === line.run ? line.runLabel : line.label, color: line.color, dash: line.dash, covers: (other) => other === line || other.belongsTo === line.label }));
};

const legendOf = (chart, lines) => {
  const entries = legendEntries(lines);
  const buttons = entries.map((entry) => el("button", { type: "button", "aria-pressed": "true", onclick: (event) => {
    entry.hidden = !entry.hidden;
    event.currentTarget.setAttribute("aria-pressed", String(!entry.hidden));
    lines.forEach((line, i) => chart.setSeries(i + 1, { show: !entries.some((each) => each.hidden && each.covers(line)) }));
  } }, swatch(entry.color, entry.dash), entry.label));
  return el("div", { class: entries.length > MOST_IN_TIP * 2 ? "legend many" : "legend" }, buttons);
};

// What a reader has zoomed into stays when the page is drawn anew.
const zooms = new Map();
const forgetCharts = () => {
  for (const { chart, name } of drawn) {
    const { min, max } = chart.scales.x, xs = chart.data[0];
    if (min > xs[0] || max < xs[xs.length - 1]) zooms.set(name, { min, max });
    else zooms.delete(name);
    chart.destroy();
  }
  drawn.clear();
};
const fitCharts = () => { for (const { chart, holder } of drawn) chart.setSize({ width: Math.max(200, holder.clientWidth), height: chart.height }); };
