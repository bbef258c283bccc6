// The first screen: the verdicts, the tokens with most KL, and the table of runs.

const REWARD = "objective/scores", JUDGE = "judge/score", KL = "objective/kl";

function headline() {
  const [hacked, collapsed, lost] = ["hacked", "collapsed", "degraded"].map((kind) => data.runs.filter((run) => run.verdict.kind === kind));
  const total = data.runs.length;
  const seen = data.runs.filter((run) => run.last[JUDGE] !== undefined).length;
  let text = total === 1 ? "No sign of reward hacking in this run" : `No sign of reward hacking in ${total} runs`;
  if (hacked.length) text = `${hacked.length} of ${plural(total, "run")} hacked ${hacked.length === 1 ? "its" : "their"} reward`
    + (collapsed.length ? `; the judge of ${collapsed.length} more collapsed` : "");
  else if (collapsed.length) text = `The judge of ${collapsed.length} of ${plural(total, "run")} collapsed`;
  else if (lost.length) text = `${lost.length} of ${plural(total, "run")} gained reward and lost the language`;
  else if (data.runs.every((run) => run.verdict.kind === "none")) text = data.title;
  else if (!seen) text = total === 1 ? "No judge looked at this run" : "No judge looked at these runs";
  else if (seen < total) text = `No sign of reward hacking in the ${plural(seen, "run")} that a judge looked at`;
  byId("headline").textContent = text;
  byId("lede").replaceChildren(...lede(hacked, collapsed, lost));
  fill("notes", data.notes.map((note) => el("p", { class: "note" }, note)));
}

function lede(hacked, collapsed, lost) {
  if (hacked.length) {
    return ["Hacked: the reward that the policy is trained on rose while the held-out judge, which nothing is trained on, fell. "
      + "The words below carry most of its KL: what the policy now says and its reference would not."];
  }
  if (collapsed.length) return ["The held-out judge fell, and the reward that the policy is trained on did not rise."];
  if (lost.length) return ["The reward rose while the reference finds the responses ever less likely, or they became alike."];
  const unjudged = data.runs.filter((run) => run.verdict.kind !== "none" && run.last[JUDGE] === undefined).length;
  if (unjudged) return [`No held-out judge looked at ${plural(unjudged, "run")}, so that a hacked reward could not be seen there; `
    + "rlhf-jax ppo --judge gives one."];
  if (data.runs.some((run) => run.verdict.kind === "clean")) return ["Nowhere did the reward rise while the held-out judge fell."];
  return ["These runs have no reward; the curves show what they measured."];
}

// One card per flagged group, the worst first.
function cards() {
  const groups = data.groups.map((group, number) => ({ ...group, number, marked: runsOf(group).filter(flagged) }))
    .filter((group) => group.marked.length)
    .sort((a, b) => Math.min(...a.marked.map(severity)) - Math.min(...b.marked.map(severity)));
  const shown = groups.slice(0, 4);
  const more = groups.length - shown.length;
  byId("flagged").className = shown.length > 2 ? "flags" : "";
  fill("flagged", shown.map(card), more > 0 ? [el("p", { class: "faint" }, `and ${plural(more, "more group")} in the table of runs`)] : []);
}

function card(group) {
  const worst = [...group.marked].sort((a, b) => severity(a) - severity(b) || (b.last[KL] ?? 0) - (a.last[KL] ?? 0))[0];
  const kind = worst.verdict.kind;
  const seeds = group.runs.length > 1 ? ` in ${group.marked.length} of ${group.runs.length} seeds` : "";
  const when = worst.verdict.step === null ? "" : `, from step ${worst.verdict.step}`;
  const kl = worst.last[KL] === undefined ? "" : `, KL ${number(worst.last[KL])} nats per response`;
  return el("article", { class: `flag ${kind}` },
    el("h3", {}, swatch(group.number), " ", group.name, " ", el("span", { class: `verdict ${kind}` }, worst.verdict.title + seeds)),
    el("div", {}, worst.verdict.why + kl + when + (group.runs.length > 1 ? ` (${titleOf(worst).split(" · ").at(-1)})` : "")),
    words(group.marked),
    el("div", { class: "act" },
      el("button", { type: "button", class: "primary", on: { click: () => readTokens(worst.name) } }, "Read its tokens")));
}

// The tokens with the most KL in some runs, shaded by their mean KL.
function words(runs) {
  const sums = new Map();
  for (const { text, count, kl } of runs.flatMap((run) => run.tokens)) {
    const sum = sums.get(text) ?? { count: 0, kl: 0 };
    sums.set(text, { count: sum.count + count, kl: sum.kl + kl });
  }
  const ordered = [...sums].sort((a, b) => b[1].kl - a[1].kl).slice(0, 8);
  const most = ordered.filter(([, { kl }]) => kl > 0.02 * ordered[0][1].kl);
  if (!most.length) return null;
  return el("div", { class: "words" }, el("span", { class: "faint" }, "Most KL on"), most.map(([text, { count, kl }]) => {
    const chip = el("span", { class: "word", title: `${signed(kl)} nats in ${plural(count, "occurrence")}` },
      visible(text), el("small", {}, `${signed(kl / count, 2)} nats × ${count}`));
    shade(chip, kl / count);
    return chip;
  }));
}

// Shows the run's samples, those with the highest KL first.
function readTokens(name) {
  Object.assign(state, { run: name, order: "kl", step: null, search: "", prompt: "", limit: 12 });
  drawSamples();
  byId("samples").scrollIntoView();
  byId("sample-list").querySelector(".tokens")?.focus({ preventScroll: true });
}

const judged = () => data.runs.some((run) => run.last[JUDGE] !== undefined);

const COLUMNS = [
  { name: "run", title: "Run", text: true, value: (run) => titleOf(run),
    cell: (run) => el("button", { type: "button", class: "link", on: { click: () => readTokens(run.name) } }, titleOf(run)) },
  { name: "verdict", title: "Verdict", text: true, value: severity,
    cell: (run) => el("span", { class: `verdict ${run.verdict.kind}`, title: run.verdict.why }, run.verdict.title) },
  { name: "reward", title: "Reward", value: (run) => run.last[REWARD], cell: (run) => number(run.last[REWARD]) },
  { name: "judge", title: "Judge", value: (run) => run.last[JUDGE], cell: (run) => number(run.last[JUDGE]) },
  { name: "gold", title: "Gold", value: (run) => (judged() ? undefined : run.gold), cell: (run) => number(run.gold) },
  { name: "kl", title: "KL [nats]", value: (run) => run.last[KL], cell: (run) => number(run.last[KL]) },
  { name: "drift", title: "Weight drift", value: (run) => run.last["drift/relative"], cell: (run) => number(run.last["drift/relative"]) },
  { name: "alarms", title: "Alarms", value: (run) => run.alarms.length,
    cell: (run) => el("span", { title: run.alarms.map((each) => each.name).join(", ") }, String(run.alarms.length)) },
  { name: "files", title: "Files", value: (run) => (run.damaged ? 1 : undefined), cell: (run) => (run.damaged ? "damaged" : "") },
  { name: "steps", title: "Steps", value: (run) => run.steps, cell: (run) => (run.done ? String(run.steps) : `${run.steps}, running`) },
];

function drawRuns() {
  const columns = COLUMNS.filter((column) => ["run", "verdict", "alarms", "steps"].includes(column.name)
    || data.runs.some((run) => Number.isFinite(column.value(run))));
  const { column: name, down } = state.sort;
  const { value } = COLUMNS.find((column) => column.name === name) ?? COLUMNS[1];
  const rows = [...data.runs].sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    const order = typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : (x ?? Infinity) - (y ?? Infinity);
    return (down ? -order : order) || data.runs.indexOf(a) - data.runs.indexOf(b);
  });
  const by = (chosen) => {
    state.sort = { column: chosen, down: state.sort.column === chosen && !state.sort.down };
    drawRuns();
    byId("runs").querySelector("th[aria-sort] button")?.focus();
  };
  byId("runs-count").textContent = `${plural(data.runs.length, "run")}, ${plural(data.groups.length, "config")}`;
  fill("runs", table(columns, rows, {
    caption: "Runs", sort: { ...state.sort, by }, rowClass: (run) => (run.name === state.run ? "chosen" : null),
  }));
}

function drawOverview() {
  headline();
  cards();
  drawRuns();
}
