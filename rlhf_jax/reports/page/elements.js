// Elements, numbers and colours. Text is always added as text nodes, never as markup.

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined) continue;
    if (value === false && !name.startsWith("aria-")) continue;
    if (name === "on") {
      for (const [event, handler] of Object.entries(value)) node.addEventListener(event, handler);
    } else if (name === "style") Object.assign(node.style, value);
    else node.setAttribute(name, value === true && !name.startsWith("aria-") ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

const byId = (id) => document.getElementById(id);
const FOCUSABLE = "button, input, select, a[href], [tabindex]";
const keyOf = (node) => node.id || node.dataset.group || [node.tagName, node.getAttribute("aria-label") ?? "", node.textContent].join(" ");
const alike = (place, key) => [...place.querySelectorAll(FOCUSABLE)].filter((each) => keyOf(each) === key);

// Moves the focus to the replacement of the focused element, by id, group or text.
function fill(id, ...children) {
  const place = byId(id);
  const before = place !== document.activeElement && place.contains(document.activeElement) ? document.activeElement : null;
  const key = before && keyOf(before);
  const nth = before && alike(place, key).indexOf(before);
  const at = before?.type === "search" ? before.selectionStart : null;
  place.replaceChildren(...children.flat());
  if (!before) return;
  const found = alike(place, key);
  const after = found[Math.min(nth, found.length - 1)];
  after?.focus({ preventScroll: true });
  if (after && at !== null) after.setSelectionRange(at, at);
}

function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e5)) return value.toExponential(1).replace("-", "−");
  const shown = size >= 100 ? value.toFixed(0) : Number(value.toPrecision(digits)).toString();
  return shown.replace("-", "−");
}

// log π - log π_ref; undefined if one is not a number, as in a run that diverged.
const between = (own, ref) => (Number.isFinite(own) && Number.isFinite(ref) ? own - ref : undefined);
const signed = (value, digits = 3) => (value > 0 ? "+" : "") + number(value, digits);
const plural = (count, noun) => `${count} ${noun}${count === 1 ? "" : "s"}`;

// Okabe and Ito's colours for the colour-blind, without yellow, which is faint on white.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#b0559a", "#3d9fdc", "#b77b00", "#5b5b66", "#7b4a12"];
const DARK = ["#5aaeea", "#ff9151", "#3ecfa5", "#e79bcb", "#9bd6fa", "#f0bf4a", "#b9bcc8", "#d6a469"];
const DASHES = ["solid", "dash", "dot", "dashdot"];

const isDark = () => document.documentElement.dataset.theme === "dark";
const colour = (number) => (isDark() ? DARK : LIGHT)[number % LIGHT.length];
const dash = (number) => DASHES[Math.floor(number / LIGHT.length) % DASHES.length];
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function alpha(hex, share) {
  const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
  return `rgba(${parts.join(", ")}, ${share})`;
}

// A group's line in the legend, with its colour and dashes.
function swatch(number) {
  const space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  const line = document.createElementNS(space, "line");
  const gaps = { solid: "", dash: "6 3", dot: "2 3", dashdot: "6 3 2 3" }[dash(number)];
  for (const [name, value] of Object.entries({ width: 22, height: 8, "aria-hidden": "true", class: "swatch" }))
    svg.setAttribute(name, value);
  const drawn = { x1: 0, x2: 22, y1: 4, y2: 4, stroke: colour(number), "stroke-width": 3, "stroke-dasharray": gaps };
  for (const [name, value] of Object.entries(drawn)) line.setAttribute(name, value);
  svg.append(line);
  return svg;
}

// A group of buttons of which exactly one is on.
function switchOf(id, choices, chosen, choose) {
  fill(id, Object.entries(choices).map(([value, text]) =>
    el("button", { type: "button", "aria-pressed": value === chosen, on: { click: () => choose(value) } }, text)));
}

// A table: columns are {name, text, cell, title}; rows are arguments of `cell`.
function table(columns, rows, { caption, rowClass = () => null, sort = null } = {}) {
  const head = columns.map((column) => {
    const sorted = sort && sort.column === column.name;
    const title = sort
      ? el("button", { type: "button", on: { click: () => sort.by(column.name) } }, column.title)
      : column.title;
    const order = sorted ? (sort.down ? "descending" : "ascending") : null;
    return el("th", { scope: "col", class: column.text ? "text" : null, "aria-sort": order }, title);
  });
  const body = rows.map((row) => el("tr", { class: rowClass(row) }, columns.map((column) =>
    el("td", { class: [column.text ? "text" : "", column.long ? "long" : ""].join(" ").trim() || null }, column.cell(row)))));
  return el("table", { "aria-label": caption }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body));
}
