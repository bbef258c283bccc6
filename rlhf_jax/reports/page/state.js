// The state of the page: the data of the runs, and the reader's choices.

const read = () => JSON.parse(document.getElementById("data").textContent);
let data = read();

const MANY = 12; // largest number of groups shown at first

// Choices refer to groups and runs by name, so that newer data keep them.
const state = {
  hidden: new Set(), // groups
  known: new Set(), // groups seen before
  filter: "", // of the legend
  metrics: [], // of the open charts
  band: "range",
  across: "reward", // horizontal axis of the scatter
  sort: { column: "verdict", down: false }, // of the table of runs
  run: null, // name of the run whose samples are shown
  step: null, // null is all steps
  search: "",
  prompt: "",
  order: "kl",
  limit: 12, // samples shown
  scale: null, // nats at which a token's colour is full; null derives it from the data
};

const SEVERITY = ["hacked", "collapsed", "degraded", "alarm", "unjudged", "clean", "none"];
const severity = (run) => SEVERITY.indexOf(run.verdict.kind);
const flagged = (run) => severity(run) < 3;
const runsOf = (group) => group.runs.map((number) => data.runs[number]);
const runNamed = (name) => data.runs.find((run) => run.name === name);
const groupOf = (run) => data.groups[run.group];

// The displayed name of a run: its group and its seed.
function titleOf(run) {
  const group = groupOf(run);
  if (group.runs.length === 1 && data.groups.length > 1) return group.name;
  const repeated = runsOf(group).some((each) => each !== run && each.seed === run.seed);
  return run.seed === null || repeated ? run.name : `${group.name} · seed ${run.seed}`;
}

// If there are many groups, shows flagged ones first, and others up to MANY.
function showSomeGroups() {
  const names = data.groups.map((group) => group.name);
  const fresh = names.filter((name) => !state.known.has(name));
  if (names.length > MANY && state.known.size === 0) {
    const worst = (group) => Math.min(...runsOf(group).map(severity));
    const ordered = [...data.groups].sort((a, b) => worst(a) - worst(b));
    ordered.slice(MANY).forEach((group) => state.hidden.add(group.name));
  }
  fresh.forEach((name) => state.known.add(name));
}

const visibleGroups = () =>
  data.groups.map((group, number) => ({ ...group, number }))
    .filter((group) => !state.hidden.has(group.name));

// The curve is of the group's last stage with the metric; stages of groups may differ.
const curveOf = (metric, number) => data.curves.metrics[metric]?.[String(number)];
const stepsOf = (curve) => data.curves.steps[curve.x];
