"use strict";
// Numbers, durations and elements. Every text of a run goes through textContent.

const el = (tag, props = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(props)) {
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else if (key === "style") Object.assign(node.style, value);
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  for (const child of children.flat()) {
    if (child !== null && child !== undefined && child !== false) node.append(child instanceof Node ? child : String(child));
  }
  return node;
};

const trimmed = (number, digits) => String(Number(number.toPrecision(digits)));

const compact = (number, digits = 3) => {
  if (typeof number !== "number") return number === null || number === undefined ? "–" : String(number);
  const size = Math.abs(number);
  for (const [unit, letter] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (size >= 0.9995 * unit) return trimmed(number / unit, digits) + letter;
  }
  if (size !== 0 && size < 1e-3) return number.toExponential(Math.max(0, digits - 2)).replace("e-", "e−");
  return trimmed(number, digits);
};

// Decimal units, as the command line has them.
const bytes = (number) => {
  if (typeof number !== "number") return "–";
  for (const [unit, name] of [[1e15, "PB"], [1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (Math.abs(number) >= 0.9995 * unit) return `${trimmed(number / unit, 3)} ${name}`;
  }
  return `${Math.round(number)} B`;
};

const percent = (share) => (typeof share === "number" ? `${trimmed(100 * share, 3)} %` : "–");
const fixed = (digits) => (number) => (typeof number === "number" ? number.toFixed(digits) : number === null || number === undefined ? "–" : String(number));
const whole = (number) => (typeof number === "number" ? Math.round(number).toLocaleString("en-US") : "–");

const duration = (seconds) => {
  if (typeof seconds !== "number" || !isFinite(seconds)) return "–";
  if (seconds < 1e-3) return `${trimmed(1e6 * seconds, 3)} µs`;
  if (seconds < 1) return `${trimmed(1000 * seconds, 3)} ms`;
  if (seconds < 90) return `${trimmed(seconds, 3)} s`;
  if (seconds < 90 * 60) return `${trimmed(seconds / 60, 2)} min`;
  const hours = Math.round(seconds / 3600);
  return hours < 48 ? `${trimmed(seconds / 3600, 3)} h` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
};

const money = (n) => typeof n !== "number" ? "–" : `$${n < 100 ? n.toFixed(2) : whole(n)}`;
const UNITS = { dollars: money, share: percent, bytes, seconds: duration, tokens: (n) => compact(n, 4), number: (n) => compact(n, 4), loss: fixed(4) };

const unitOf = (metric) => {
  if (/(^|[_ ])bytes$/.test(metric)) return "bytes";
  if (/seconds/.test(metric)) return "seconds";
  if (/dollars/.test(metric)) return "dollars";
  if (/tokens/.test(metric)) return "tokens";
  if (/(mfu|hfu|goodput|_share|utilization)$/.test(metric)) return "share";
  return /loss$|bits_per_byte$/.test(metric) ? "loss" : "number";
};

const spoken = (name) => name.replace(/^[a-z]+\//, "").replaceAll("_", " ");
const titled = (text) => text.charAt(0).toUpperCase() + text.slice(1);
// Names that are not spelled as the metric is.
const PROPER = { hellaswag: "HellaSwag", mfu: "MFU", hfu: "HFU" };
const proper = (name) => PROPER[name.toLowerCase()] || name;

// A value of an event in words: of an object every value by its name, of a list its values.
const inWords = (name, value) => {
  if (value === null || value === undefined) return "";
  if (Array.isArray(value)) return value.map((item) => inWords(name, item)).join(", ");
  if (typeof value === "object") return Object.entries(value).map(([key, item]) => `${proper(spoken(key))} ${inWords(key, item)}`).join(", ");
  if (typeof value === "boolean") return value ? "yes" : "no";
  return typeof value === "number" ? UNITS[unitOf(name)](value) : String(value);
};
const clock = (unixSeconds) => new Date(1000 * unixSeconds).toLocaleString([], { dateStyle: "medium", timeStyle: "short" });

// What the reader chose survives the page's own reloads.
const memory = (() => {
  const key = "report:" + location.pathname;
  let kept = {};
  try { kept = JSON.parse(sessionStorage.getItem(key)) || {}; } catch { kept = {}; }
  return {
    get: (name, otherwise) => (name in kept ? kept[name] : otherwise),
    set: (name, value) => {
      kept[name] = value;
      try { sessionStorage.setItem(key, JSON.stringify(kept)); } catch { /* private browsing: not kept */ }
    },
  };
})();

const choice = (name, options, otherwise, changed) => {
  const box = el("span", { class: "choice", role: "group", "aria-label": name });
  for (const [value, label] of options) {
    box.append(el("button", { type: "button", "aria-pressed": String(memory.get(name, otherwise) === value), onclick: (event) => {
      memory.set(name, value);
      for (const button of box.children) button.setAttribute("aria-pressed", String(button === event.currentTarget));
      changed(value);
    } }, label));
  }
  return box;
};

const tick = (name, label, otherwise, changed) => {
  const box = el("input", { type: "checkbox", onchange: () => { memory.set(name, box.checked); changed(); } });
  box.checked = memory.get(name, otherwise);
  return el("label", {}, box, label);
};
