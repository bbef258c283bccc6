// Samples of reference and policy side by side, with selection, search and order.

const ORDERS = {
  recorded: ["as recorded", null],
  kl: ["highest KL", (row) => -row.kl],
  "kl-low": ["lowest KL", (row) => row.kl],
  reward: ["best reward", (row) => -row.score],
  "reward-low": ["worst reward", (row) => row.score],
  judge: ["best by the judge", (row) => -row.judge],
  "judge-low": ["worst by the judge", (row) => row.judge],
  long: ["longest", (row) => -row.length],
  short: ["shortest", (row) => row.length],
};

const sampledRuns = () => data.runs.filter((run) => run.samples.length);

function field(label, control, extra = "") {
  return el("label", { class: `field ${extra}`.trim() }, label, control);
}

function select(id, choices, chosen, choose) {
  return el("select", { id, on: { change: (event) => { choose(event.target.value); state.limit = 12; drawSamples(); } } },
    choices.map(([value, text]) => el("option", { value, selected: value === chosen }, text)));
}

function drawSamples() {
  const runs = sampledRuns();
  hideTip();
  if (!runs.length) {
    for (const id of ["sample-controls", "sample-scale", "sample-list"]) fill(id, []);
    byId("sample-more").hidden = true;
    byId("sample-count").textContent = "These runs recorded no responses.";
    return;
  }
  const worst = [...runs].sort((a, b) => severity(a) - severity(b) || (b.last[KL] ?? 0) - (a.last[KL] ?? 0))[0];
  const run = runs.find((each) => each.name === state.run) ?? worst;
  state.run = run.name;
  drawControls(runs, run);
  drawScale();
  drawList(run);
  for (const row of byId("runs").querySelectorAll("tbody tr"))
    row.classList.toggle("chosen", row.cells[0].textContent === titleOf(run));
}

function drawControls(runs, run) {
  const steps = [...new Set(run.samples.map((row) => row.step))].sort((a, b) => a - b);
  if (state.step !== null && !steps.includes(state.step)) state.step = steps.at(-1);
  const at = state.step === null ? steps.length - 1 : steps.indexOf(state.step);
  const shown = el("span", {}, state.step === null ? `Step: all ${steps.length}` : `Step ${state.step}`);
  const slider = el("input", { id: "sample-step", type: "range", min: 0, max: steps.length - 1, value: at,
    "aria-valuetext": shown.textContent,
    on: { input: (event) => {
      state.step = steps[Number(event.target.value)];
      shown.textContent = `Step ${state.step}`;
      event.target.setAttribute("aria-valuetext", shown.textContent);
      byId("sample-all").checked = false;
      state.limit = 12;
      drawList(run);
    } } });
  const all = el("input", { id: "sample-all", type: "checkbox", checked: state.step === null,
    on: { change: (event) => { state.step = event.target.checked ? null : steps.at(-1); drawSamples(); } } });
  all.checked = state.step === null;
  const search = el("input", { id: "sample-search", type: "search", value: state.search, placeholder: "in prompts and responses",
    on: { input: (event) => { state.search = event.target.value; state.limit = 12; drawList(run); } } });
  const prompts = [...new Set(run.samples.map((row) => row.prompt))].sort();
  if (!prompts.includes(state.prompt)) state.prompt = "";
  const orders = Object.entries(ORDERS).filter(([, [, key]]) => !key || run.samples.some((row) => !Number.isNaN(key(row))));
  if (!orders.some(([name]) => name === state.order)) state.order = "recorded";
  fill("sample-controls",
    field("Run", select("sample-run", runs.map((each) => [each.name, `${titleOf(each)}${flagged(each) ? ` (${each.verdict.title})` : ""}`]),
      run.name, (value) => { state.run = value; })),
    field(shown, slider, "step"),
    el("label", { class: "faint" }, all, " all steps"),
    field("Order", select("sample-order", orders.map(([name, [text]]) => [name, text]), state.order, (value) => { state.order = value; })),
    field("Prompt", select("sample-prompt", [["", `all ${prompts.length}`], ...prompts.slice(0, 300).map((text) => [text, shortened(text)])],
      state.prompt, (value) => { state.prompt = value; })),
    field("Search", search));
}

const shortened = (text) => (text.length > 70 ? `${text.slice(0, 67)}…` : text);

function drawScale() {
  const choose = el("select", { id: "sample-full", "aria-label": "Nats at which a colour is full",
    on: { change: (event) => { state.scale = event.target.value ? Number(event.target.value) : null; full = fullScale(); drawOverview(); drawSamples(); } } },
  [["", "auto"], ["1", "1"], ["2", "2"], ["4", "4"], ["8", "8"]].map(([value, text]) =>
    el("option", { value, selected: value === String(state.scale ?? "") }, text)));
  fill("sample-scale", el("span", {}, "KL of a token, log π − log π_ref: ", number(-full)), el("span", { class: "ramp", "aria-hidden": "true" }),
    el("span", {}, `${signed(full)} nats`), el("label", {}, "full colour at ", choose),
    el("span", { class: "faint" }, "Blue: the policy says it more often than its reference; orange: less. Point at a token, or press Tab and the arrow keys."));
}

function chosenRows(run) {
  const wanted = state.search.trim().toLowerCase();
  const rows = run.samples.filter((row) => (state.step === null || row.step === state.step)
    && (!state.prompt || row.prompt === state.prompt)
    && (!wanted || row.response.toLowerCase().includes(wanted) || row.prompt.toLowerCase().includes(wanted)));
  const key = ORDERS[state.order][1];
  if (!key) return rows;
  const last = (value) => (Number.isNaN(value) ? Infinity : value); // no number: at the end
  return rows.sort((a, b) => last(key(a)) - last(key(b)));
}

function drawList(run) {
  hideTip();
  const rows = chosenRows(run);
  const shown = rows.slice(0, state.limit);
  const left = run.sampled - run.samples.length;
  byId("sample-count").textContent = `${plural(rows.length, "response")} of ${run.samples.length} of ${titleOf(run)}`
    + (left > 0 ? `; ${left} more are in its samples.jsonl alone` : "");
  fill("sample-list", shown.map((row) => sample(run, row)));
  const more = byId("sample-more");
  more.hidden = shown.length === rows.length;
  more.textContent = `Show ${Math.min(24, rows.length - shown.length)} more of ${rows.length}`;
  more.onclick = () => { state.limit += 24; drawList(run); };
}

function sample(run, row) {
  const wanted = state.search.trim().toLowerCase();
  const figure = (name, value, unit = "") => (value === undefined ? null
    : el("span", {}, `${name} `, el("b", {}, number(value)), unit));
  const other = beside(run, row);
  const untouched = row.step === 0 && isReference(row) && !("reference" in row);
  const policy = row.tokens ? tokensOf(row, wanted) : el("div", { class: "said" }, marked(row.response, wanted));
  return el("article", { class: "sample" },
    el("header", {}, el("span", {}, "step ", el("b", {}, String(row.step))), figure("reward", row.score), figure("judge", row.judge),
      figure("KL", row.kl, " nats"), row.tokens ? figure("length", row.length, " tokens") : null, figure("observed", row.read, " tokens")),
    el("div", { class: "prompt" }, marked(row.prompt, wanted)),
    el("div", { class: "sides" },
      el("div", {}, el("h3", {}, other.title), el("div", { class: "said" }, other.text ?? el("span", { class: "faint" }, "none recorded"))),
      el("div", {}, el("h3", {}, untouched ? "Policy at step 0, its reference" : `Policy at step ${row.step}`), policy)));
}

// Whether the policy still was its reference: their log-probs of the tokens are equal.
function isReference(row) {
  const ref = row.ref_logprobs;
  return Boolean(ref?.length) && row.logprobs.every((own, k) => row.observed?.[k] || Math.abs(between(own, ref[k])) < 1e-3);
}

// The reference's response to the prompt; else the policy's response at step 0.
function beside(run, row) {
  if (row.reference !== undefined) return { title: "Reference, same prompt and key", text: row.reference };
  const first = run.samples.filter((each) => each.step === 0 && each.stage === row.stage);
  const early = (each) => (isReference(each) ? "Step 0, when the policy was its reference" : "Policy at step 0");
  const same = first.find((each) => each.prompt === row.prompt);
  if (same) return { title: `${early(same)}; same prompt`, text: same.response };
  const any = first[run.samples.filter((each) => each.step === row.step).indexOf(row) % Math.max(1, first.length)];
  return { title: any ? `${early(any)}; another prompt` : "Policy at step 0", text: any && `${any.prompt} ⟶ ${any.response}` };
}

// Marks the hits of a search in a text.
function marked(text, wanted) {
  if (!wanted) return text;
  const parts = [];
  let from = 0;
  const low = text.toLowerCase();
  for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, from)) {
    parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, text.slice(from)];
}
