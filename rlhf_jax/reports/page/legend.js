// One legend for all charts: each group is a button that shows or hides it.

function drawLegend() {
  const many = data.groups.length > MANY;
  const wanted = state.filter.toLowerCase();
  const matching = data.groups.map((group, number) => ({ ...group, number }))
    .filter((group) => group.name.toLowerCase().includes(wanted));
  const tools = many ? [
    el("input", { type: "search", value: state.filter, placeholder: `Filter ${data.groups.length} groups`, "aria-label": "Filter groups",
      on: { input: (event) => { state.filter = event.target.value; drawLegend(); } } }),
    tool("Show these", () => only(matching)),
    tool("None", () => only([])),
    tool("Flagged", () => only(data.groups.filter((group) => runsOf(group).some(flagged)))),
    el("span", { class: "faint" }, `${visibleGroups().length} of ${data.groups.length} shown`),
  ] : [];
  fill("legend", tools, matching.slice(0, 200).map(chip));
}

const tool = (text, act) => el("button", { type: "button", on: { click: act } }, text);

function chip(group) {
  const on = !state.hidden.has(group.name);
  const seeds = group.runs.length > 1 ? ` (${group.runs.length} seeds)` : "";
  return el("button", { type: "button", class: "group", "aria-pressed": on, "data-group": group.name,
    title: "Click to show or hide; Shift and click, or Shift and Enter, to show it alone",
    on: { click: (event) => (event.shiftKey ? only([group]) : toggle(group.name)), keydown: alongLegend } },
  swatch(group.number), group.name + seeds);
}

// The left and right arrow keys move along the legend, as in a toolbar.
function alongLegend(event) {
  if (event.key === "Enter" && event.shiftKey) {
    event.preventDefault(); // some browsers also send a click, some without Shift
    only([{ name: event.currentTarget.dataset.group }]);
    return;
  }
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const chips = [...byId("legend").querySelectorAll("button.group")];
  chips[(chips.indexOf(event.currentTarget) + step + chips.length) % chips.length].focus();
}

function toggle(name) {
  if (!state.hidden.delete(name)) state.hidden.add(name);
  drawLegend();
  drawCharts();
}

function only(groups) {
  const names = new Set(groups.map((group) => group.name));
  state.hidden = new Set(data.groups.map((group) => group.name).filter((name) => !names.has(name)));
  drawLegend();
  drawCharts();
}
