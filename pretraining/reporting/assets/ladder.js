"use strict";
// The page of a ladder: its points and laws by compute, the forecast with its band, what each run is off, the answers.

const data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
X_AXES.flops = { label: "FLOPs", show: (x) => x.toExponential(0).replace("e+", "e") };
memory.set("x", "flops");
memory.set("logX", memory.get("logX", true));

const sizeLines = (column, law) => data.sizes.flatMap((size, i) => {
  const shade = depthColor(i, Math.max(2, data.sizes.length)), at = { flops: size.flops };
  return [
    law ? { label: `${size.name} law`, belongsTo: size.name, quiet: true, color: faded(shade, 0.6), series: size.law } : null,
    { label: size.name, color: shade, width: 0.01, dots: true, series: { ...at, value: size[column] } },
  ].filter(Boolean);
});

const chartCard = (title, note, lines, options) => {
  const box = el("section", { class: "card" }, el("div", { class: "head" }, el("h2", {}, title), el("span", { class: "soft small" }, note),
    el("span", { class: "grow" }), el("div", { class: "tools" }, tick("logX", "log x", true, draw))));
  page.append(box);
  drawChart(box, lines, options);
};

const draw = () => {
  forgetCharts();
  page.replaceChildren(el("header", { class: "head" }, el("h1", {}, `Ladder of ${data.name}`), el("span", { class: "grow" }), themeButton()));
  page.append(el("section", { class: "card", id: "answers" }, el("h2", {}, "What it answers"), table(["", ""], data.answers)));
  chartCard("Loss by compute", "nats per token; the dashed line is the family at the recipe's tokens per parameter", [...bandLines(`forecast, ${data.name}`, color("good"), data.forecast, { width: 2, dash: [6, 4] }), ...sizeLines("loss", true)], { unit: "loss", height: 380 });
  chartCard("What each run is off the law", "share of the loss", sizeLines("off", false), { unit: "share" });
  page.append(el("section", { class: "card", id: "runs" }, el("h2", {}, "Runs"), table(data.columns, data.rows, data.columns.map((_, i) => i).slice(1))));
};

applyTheme();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { applyTheme(); draw(); });
draw();
addEventListener("resize", fitCharts);
document.documentElement.dataset.drawn = "yes";
