// Tables of differences between configs, of alarms, drift and fingerprints.

function drawConfigs() {
  if (!data.options.length) {
    fill("config-table", el("p", { class: "empty" }, data.runs.length > 1
      ? "Nothing but the seed: all runs have one config." : "There is one config."));
    return;
  }
  const columns = [
    { title: "Group", text: true, cell: (group) => [swatch(group.number), " ", group.name] },
    { title: "Seeds", cell: (group) => String(group.runs.length) },
    ...data.options.map((option, k) => ({ title: option, text: true, cell: (group) => group.values[k] })),
  ];
  const rows = data.groups.map((group, number) => ({ ...group, number }));
  fill("config-table", el("p", { class: "how" }, data.options.length === 1
      ? "One option differs; all others are equal." : `${data.options.length} options differ; all others are equal.`),
    inPanel(table(columns, rows, { caption: "Options that differ" })));
}

const inPanel = (node) => el("div", { class: "panel" }, el("div", { class: "scroll", tabindex: "0", role: "region",
  "aria-label": node.getAttribute("aria-label") }, node));

function drawWatch() {
  const raised = data.runs.flatMap((run) => run.alarms.map((alarm) => ({ run, ...alarm })))
    .sort((a, b) => severity(a.run) - severity(b.run) || a.run.group - b.run.group || a.step - b.step);
  const columns = [
    { title: "Run", text: true, cell: ({ run }) => [swatch(run.group), " ", titleOf(run)] },
    { title: "Alarm", text: true, cell: ({ name }) => name.replaceAll("_", " ") },
    { title: "Since", text: true, cell: ({ stage, step }) => `${stage}, step ${step}` },
    { title: "What was seen, and what to do", text: true, long: true, cell: ({ message }) => message },
  ];
  fill("alarm-table", raised.length ? inPanel(table(columns, raised.slice(0, 500), { caption: "Alarms" }))
    : el("p", { class: "empty" }, "No alarm was raised."));
  const references = data.runs.filter((run) => run.reference.fingerprint || run.last["drift/relative"] !== undefined);
  const proof = [
    { title: "Run", text: true, cell: (run) => titleOf(run) },
    { title: "Reference's fingerprint", text: true, cell: ({ reference: { fingerprint } }) =>
      (fingerprint ? el("span", { class: "hash", title: fingerprint }, fingerprint.slice(0, 16)) : "–") },
    { title: "At the end", text: true, cell: ({ reference, done }) => (reference.verified ? "verified unmoved" : done ? "not told" : "running") },
    { title: "Weight drift of the policy [share]", cell: (run) => number(run.last["drift/relative"]) },
  ];
  fill("reference-table", references.length ? inPanel(table(proof, references, { caption: "References and drift" })) : []);
}
