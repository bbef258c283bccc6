// Seconds per step by phase, one bar per group.

const SHADES = ["#0072b2", "#56b4e9", "#009e73", "#e69f00", "#cc79a7", "#d55e00", "#8a6d3b", "#7a7f8a"];

// Mean over a group's runs of the seconds of each phase.
function phasesOf(group) {
  const timed = runsOf(group).filter((run) => Object.keys(run.phases).length);
  const names = [...new Set(timed.flatMap((run) => Object.keys(run.phases)))];
  return new Map(names.map((name) => [name, timed.reduce((sum, run) => sum + (run.phases[name] ?? 0), 0) / timed.length]));
}

function drawTimings() {
  if (!loaded()) return;
  const groups = visibleGroups().map((group) => ({ ...group, phases: phasesOf(group) })).filter((group) => group.phases.size);
  const names = [...new Set(groups.flatMap((group) => [...group.phases.keys()]))];
  const named = names.filter((name) => name !== "other");
  const order = [...named, "other"];
  const short = (text) => (text.length > 26 ? `${text.slice(0, 25)}…` : text);
  const labels = groups.map((group) => `${plain(short(group.name))} `);
  const traces = order.map((name, k) => ({ type: "bar", orientation: "h", name: plain(name),
    y: groups.map((_, at) => at), x: groups.map((group) => group.phases.get(name) ?? 0),
    marker: { color: name === "other" ? SHADES.at(-1) : SHADES[k % (SHADES.length - 1)] },
    hovertemplate: `${plain(name)}: %{x:.3g} s<extra></extra>` }));
  const drawn = layout({ x: "seconds per step", y: "" });
  byId("timing-chart").style.height = `${Math.max(150, 80 + 34 * groups.length)}px`;
  byId("timing-chart").hidden = !groups.length;
  if (groups.length) {
    Plotly.react(byId("timing-chart"), traces, { ...drawn, barmode: "stack", hovermode: "closest", bargap: 0.35, showlegend: named.length > 0,
      legend: { orientation: "h", y: 1.02, yanchor: "bottom", font: { size: 12, color: css("--soft") }, itemclick: false, itemdoubleclick: false },
      margin: { ...drawn.margin, t: 34 },
      yaxis: { ...drawn.yaxis, autorange: "reversed", tickmode: "array", tickvals: groups.map((_, at) => at), ticktext: labels, showgrid: false } }, PLAIN);
    byId("timing-chart").setAttribute("role", "img");
    byId("timing-chart").setAttribute("aria-label", "Seconds per step by phase; the table below has the numbers");
  }
  const columns = [
    { title: "Group", text: true, cell: (group) => [swatch(group.number), " ", group.name] },
    ...order.map((name) => ({ title: `${name} [s per step]`, cell: (group) => number(group.phases.get(name)) })),
    { title: "Whole run [s]", cell: (group) => number(runsOf(group).reduce((sum, run) => sum + run.seconds, 0) / group.runs.length) },
  ];
  fill("timing-table", groups.length ? inPanel(table(columns, groups, { caption: "Timings" })) : el("p", { class: "empty" }, "No timings were recorded."));
}
