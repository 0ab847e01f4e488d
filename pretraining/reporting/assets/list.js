"use strict";
// The list of all runs that a server shows: how each stands; those that are chosen are laid over each other.

let data = JSON.parse(document.getElementById("data").textContent);
const page = document.getElementById("page");
const chosen = new Set();

const last = (name) => (run) => run.last[name];
const secondsLeft = (run) => (stateOf(run) === "running" ? run.last["throughput/seconds_left"] : null);
// [heading, what a run is sorted by, how that is shown]
const COLUMNS = [
  ["run", (run) => run.name, (name) => el("a", { href: address([name]) }, name)],
  ["state", stateOf, (state, run) => el("span", { class: `pill ${state}`, title: standingText(run) }, state)],
  ["last written", (run) => run.alive, (moment) => `${duration(Math.max(1, Math.round(Date.now() / 1000 - moment)))} ago`],
  ["step", (run) => run.at_step, whole],
  ["of its tokens", (run) => run.budget_share, percent],
  ["training loss", last("train/loss"), fixed(4)],
  ["validation loss", last("eval/loss"), fixed(4)],
  ["tokens/s", last("throughput/tokens_per_second"), (rate) => compact(rate)],
  ["MFU", last("throughput/mfu"), percent],
  ["cost", last("cost/dollars"), money],
  ["time left", secondsLeft, duration],
];
const address = (names) => `/show?${names.map((name) => `run=${encodeURIComponent(name)}`).join("&")}`;

// A loss that is not a number comes as a text.
const compare = (a, b) => (typeof a === "string" && typeof b === "string" ? inOrder(a, b) : a - b || 0);
const inOrder = new Intl.Collator("en", { numeric: true }).compare;
const sorted = (runs) => {
  const [column, rising] = memory.get("sort", [2, false]), [, key] = COLUMNS[column];
  const has = (run) => key(run) !== null && key(run) !== undefined;
  const known = runs.filter(has).sort((a, b) => (rising ? 1 : -1) * compare(key(a), key(b)));
  return [...known, ...runs.filter((run) => !has(run))]; // what a run does not have comes last in either order
};

const box = (run) => el("input", { type: "checkbox", "aria-label": `choose ${run.name}`, checked: chosen.has(run.name),
  onchange: (event) => { chosen[event.target.checked ? "add" : "delete"](run.name); tools(); } });
const search = el("input", { type: "search", placeholder: "filter by name, state or description", "aria-label": "filter", oninput: () => list() });
const toolbar = el("div", { class: "tools" }), count = el("span", { class: "soft small" }), shown = el("div");

const tools = () => toolbar.replaceChildren(el("button", { type: "button", class: "plain", id: "together", disabled: !chosen.size, onclick: () => { location.href = address([...chosen]); } },
  `Lay ${chosen.size || "chosen"} over each other`), chosen.size ? el("button", { type: "button", class: "plain", onclick: () => { chosen.clear(); list(); } }, "Choose none") : "");

const list = () => {
  const words = search.value.toLowerCase().split(/\s+/);
  const runs = sorted(data.rows).filter((run) => words.every((word) => `${run.name} ${stateOf(run)} ${run.description}`.toLowerCase().includes(word)));
  const [column, rising] = memory.get("sort", [2, false]);
  const heads = COLUMNS.map(([label], i) => el("button", { type: "button", onclick: () => { memory.set("sort", [i, i === column ? !rising : i < 2]); list(); } },
    label, i === column ? (rising ? " ↑" : " ↓") : ""));
  const rows = runs.map((run) => [box(run), ...COLUMNS.map(([label, key, show]) => label === "run" ?
    el("div", {}, show(key(run), run), el("div", { class: "soft small about" }, run.description)) : show(key(run), run))]);
  shown.replaceChildren(table(["", ...heads], rows, COLUMNS.map((_, i) => i + 1).slice(2)));
  const hidden = data.num_hidden ? `; ${whole(data.num_hidden)} not shown, with links in the folder` : "";
  count.textContent = `${whole(runs.length)} of ${whole(data.rows.length)} runs${hidden}`;
  tools();
};

const draw = () => {
  page.replaceChildren(el("header", { class: "head" }, el("h1", {}, data.title), el("span", { class: "grow" }), themeButton()),
    el("section", { class: "card", id: "runs" }, el("div", { class: "head" }, search, count, el("span", { class: "grow" }), toolbar), shown));
  list();
};

applyTheme();
draw();
keepFresh(() => list());
document.documentElement.dataset.drawn = "yes";
