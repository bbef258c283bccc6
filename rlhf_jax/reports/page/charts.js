// Curves with bands over seeds, and the reward beside the judge, drawn by Plotly.

const loaded = () => typeof Plotly !== "undefined"; // loaded after the first screen
const PLAIN = { displayModeBar: false, responsive: true, doubleClick: "reset" };

function layout({ x, y, top = 8 }) {
  const axis = (title) => ({
    title: { text: title, font: { size: 12, color: css("--soft") }, standoff: 8 },
    gridcolor: css("--grid"), zerolinecolor: css("--line"), linecolor: css("--line"),
    tickfont: { size: 11, color: css("--faint") }, automargin: true,
  });
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false,
    font: { family: css("--sans"), color: css("--ink") },
    margin: { l: 46, r: 10, t: top, b: 38 },
    xaxis: axis(x), yaxis: { ...axis(y), nticks: 6 },
    hovermode: "x unified",
    hoverlabel: { bgcolor: css("--panel"), bordercolor: css("--line"), font: { size: 12, color: css("--ink") }, namelength: 48 },
  };
}

// Escapes a run's text, since Plotly interprets some markup.
const plain = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");

function unitOf(metric) {
  return data.glossary[metric]?.unit ?? "";
}

function bandOf(curve) {
  if (!curve.lo || state.band === "none") return null;
  if (state.band === "range") return [curve.lo, curve.hi];
  const around = (sign) => curve.y.map((y, k) => (y === null || curve.t[k] === null ? null : y + sign * curve.t[k]));
  return [around(-1), around(1)];
}

function curveTraces(metric) {
  return visibleGroups().flatMap((group) => {
    const curve = curveOf(metric, group.number);
    if (!curve) return [];
    const [x, hex] = [stepsOf(curve), colour(group.number)];
    const edges = bandOf(curve);
    const line = { color: hex, width: 2, dash: dash(group.number) };
    const single = x.length === 1;
    const band = edges === null ? [] : edges.map((y, side) => ({
      x, y, type: "scatter", mode: "lines", line: { width: 0 }, hoverinfo: "skip",
      ...(side ? { fill: "tonexty", fillcolor: alpha(hex, 0.17) } : {}),
    }));
    return [...band, { x, y: curve.y, type: "scatter", mode: single ? "markers" : "lines", line, marker: { color: hex },
      name: plain(group.name), connectgaps: true, hovertemplate: "%{y:.4g}" }];
  });
}

function drawCurves() {
  if (!loaded()) return;
  const place = byId("charts");
  for (const panel of [...place.children]) {
    if (!state.metrics.includes(panel.dataset.metric)) {
      Plotly.purge(panel.querySelector(".chart"));
      panel.remove();
    }
  }
  for (const metric of state.metrics) {
    let panel = panelOf(metric);
    if (!panel) place.append(panel = curvePanel(metric));
    const chart = panel.querySelector(".chart");
    const stages = [...new Set(Object.values(data.curves.metrics[metric] ?? {}).map((curve) => curve.stage))];
    Plotly.react(chart, curveTraces(metric), layout({ x: `step of ${plain(stages.join(", "))}`, y: plain(unitOf(metric)) }), PLAIN);
    chart.setAttribute("aria-label", `${metric}: ${lastValues(metric)}`);
  }
}

const panelOf = (metric) => [...byId("charts").children].find((panel) => panel.dataset.metric === metric);

function lastValues(metric) {
  return visibleGroups().map((group) => [group.name, curveOf(metric, group.number)])
    .filter(([, curve]) => curve)
    .map(([name, curve]) => `${name} ends at ${number(curve.y.at(-1))}`).join("; ");
}

function curvePanel(metric) {
  const close = () => {
    state.metrics = state.metrics.filter((name) => name !== metric);
    drawCurves();
    byId("add-metric").focus();
  };
  return el("div", { class: "panel", "data-metric": metric },
    el("div", { class: "name" }, metric),
    el("p", { class: "about" }, data.glossary[metric]?.text ?? ""),
    el("div", { class: "chart", role: "img" }),
    el("button", { type: "button", class: "close", "aria-label": `Close ${metric}`, on: { click: close } }, "×"));
}

function metricChooser() {
  const names = Object.keys(data.curves.metrics).sort();
  fill("metric-names", names.map((name) => el("option", { value: name }, unitOf(name))));
  const input = byId("add-metric");
  input.onchange = () => {
    const name = input.value.trim();
    const known = names.includes(name);
    input.setCustomValidity(known || !name ? "" : "no run has this metric");
    input.reportValidity();
    if (!known) return;
    input.value = "";
    state.metrics = [name, ...state.metrics.filter((metric) => metric !== name)];
    drawCurves();
    byId("charts").prepend(panelOf(name));
  };
}

// Reward against judge: one path per group, from its start to the mark at its end.
function drawScatter() {
  if (!loaded()) return;
  const judged = JUDGE in data.curves.metrics;
  const across = judged && state.across === "reward" ? REWARD : KL;
  const up = judged ? JUDGE : REWARD;
  byId("scatter-title").textContent = judged ? "Reward against held-out judge" : "Reward against KL";
  byId("scatter-how").textContent = judged
    ? "A path per group, mean over its seeds, from its start to the mark at its end. To the right and down: the reward is being hacked."
    : "A path per group, mean over its seeds, from its start to the mark at its end. No held-out judge was recorded (--judge).";
  if (judged) {
    switchOf("scatter-axis", { reward: "reward", kl: "KL" }, state.across, (value) => { state.across = value; drawScatter(); });
  } else fill("scatter-axis", []);
  byId("scatter-axis").hidden = !judged;
  const traces = visibleGroups().flatMap((group) => path(group, across, up));
  const title = (metric) => `${metric} [${unitOf(metric).replace(" per response", "")}]`;
  const drawn = layout({ x: title(across), y: title(up) });
  Plotly.react(byId("scatter"), traces, { ...drawn, hovermode: "closest" }, PLAIN);
  byId("scatter").setAttribute("role", "img");
  byId("scatter").setAttribute("aria-label", `${byId("scatter-title").textContent}; the table of runs has the numbers`);
}

function path(group, across, up) {
  const [a, b] = [across, up].map((metric) => curveOf(metric, group.number));
  if (!a || !b || a.stage !== b.stage) return [];
  const both = new Set(stepsOf(a));
  const steps = stepsOf(b).filter((step) => both.has(step));
  const at = (curve) => steps.map((step) => curve.y[stepsOf(curve).indexOf(step)]);
  const hex = colour(group.number);
  const last = steps.length - 1;
  return [{ x: at(a), y: at(b), type: "scatter", mode: "lines+markers", name: plain(group.name),
    line: { color: hex, width: 2, dash: dash(group.number) },
    marker: { color: hex, size: steps.map((_, k) => (k === last ? 13 : last < 60 ? 4 : 1)),
      line: { width: steps.map((_, k) => (k === last ? 2 : 0)), color: css("--panel") } },
    text: steps.map((step) => `step ${step}`),
    hovertemplate: "%{text}<br>%{x:.4g}, %{y:.4g}<extra>%{fullData.name}</extra>" }];
}

function drawCharts() {
  drawScatter();
  drawCurves();
  drawTimings();
}
