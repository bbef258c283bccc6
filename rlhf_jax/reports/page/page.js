// Draws the page, and follows a run under way.

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId("theme").textContent = theme === "dark" ? "◑ Light" : "◐ Dark";
  byId("theme").setAttribute("aria-label", `Switch to ${theme === "dark" ? "light" : "dark"} colours`);
}

function drawAll() {
  showSomeGroups();
  full = fullScale();
  document.querySelector(".brand").textContent = data.title;
  drawOverview();
  drawLegend();
  drawBand();
  metricChooser();
  drawSamples();
  drawConfigs();
  drawWatch();
}

function drawBand() {
  const several = data.groups.some((group) => group.runs.length > 1);
  const choose = (value) => { state.band = value; drawBand(); drawCurves(); };
  if (several) switchOf("band", { range: "range of seeds", interval: "95% interval", none: "mean alone" }, state.band, choose);
  byId("band").hidden = !several;
}

// Asks the server of --watch for newer data; the reader's choices are kept.
let tag = "";
async function follow() {
  const say = (text) => { byId("live").textContent = text; };
  try {
    const answer = await fetch("data.json", { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
    if (answer.status === 200) {
      tag = answer.headers.get("ETag") ?? "";
      const newer = await answer.json();
      if (JSON.stringify(newer) !== JSON.stringify(data)) {
        data = newer;
        drawAll();
        drawCharts();
      }
    }
    const steps = data.runs.filter((run) => !run.done).map((run) => run.steps);
    say(steps.length ? `● live, step ${Math.max(...steps)}` : "● finished");
  } catch {
    say("○ server stopped");
  }
  setTimeout(follow, 2000);
}

const preferred = matchMedia("(prefers-color-scheme: dark)");
setTheme(preferred.matches ? "dark" : "light");
const repaint = (theme) => { setTheme(theme); drawAll(); drawCharts(); };
byId("theme").addEventListener("click", () => repaint(isDark() ? "light" : "dark"));
preferred.addEventListener("change", (event) => repaint(event.matches ? "dark" : "light"));
state.metrics = [...data.first];
drawAll();
// Plotly is large: it is loaded after the rest of the page is shown, and the page stays
// responsive between one kind of chart and the next.
const then = (...acts) => requestAnimationFrame(() => setTimeout(() => {
  acts[0]();
  if (acts.length > 1) then(...acts.slice(1));
}));
then(
  () => document.head.append(el("script", {}, byId("plotly").textContent)),
  drawScatter,
  drawCurves,
  drawTimings,
  () => {
    document.documentElement.dataset.ready = "true";
    if (LIVE) follow();
  },
);
