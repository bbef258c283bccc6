// A response token by token: colours by KL, and both log-probs of the active token.

function visible(text) {
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥") || "∅";
}

// Nats at which a colour is full: the 98th percentile of |k1| over all tokens, 1 to 8.
function fullScale() {
  if (state.scale !== null) return state.scale;
  const all = data.runs.flatMap((run) => run.samples.flatMap((row) =>
    (row.ref_logprobs ? row.logprobs.map((own, k) => Math.abs(between(own, row.ref_logprobs[k]))) : []))).filter(Number.isFinite);
  if (!all.length) return 2;
  all.sort((a, b) => a - b);
  return Math.min(8, Math.max(1, Math.round(all[Math.floor(0.98 * (all.length - 1))])));
}
let full = 2;

// Blue if the token is likelier under the policy than under the reference, else orange.
function shade(node, k1, colours = { more: css("--more"), less: css("--less") }) {
  const strength = Math.min(1, Math.abs(k1) / full);
  if (!(strength >= 0.04)) return;
  node.style.backgroundColor = `rgba(${k1 > 0 ? colours.more : colours.less}, ${(0.08 + 0.62 * strength).toFixed(3)})`;
}

// The number of a response's tokens: sampled ones, and those observed between turns.
const everyToken = (row) => row.length + (row.read ?? 0);

function tokensOf(row, search) {
  const found = matches(row.tokens, search);
  const node = el("div", { class: "said tokens", tabindex: "0", role: "group",
    "aria-label": "Tokens of the policy's response; left and right arrows go through them" });
  const colours = { more: css("--more"), less: css("--less") };
  row.tokens.forEach((text, k) => {
    const kinds = [found.has(k) && "found", row.observed?.[k] && "observed"].filter(Boolean);
    const span = el("span", { "data-k": k, class: kinds.join(" ") || null }, text);
    if (row.ref_logprobs) shade(span, between(row.logprobs[k], row.ref_logprobs[k]), colours);
    node.append(span);
  });
  const cut = everyToken(row) - row.tokens.length;
  if (cut > 0) node.append(el("em", { class: "faint" }, ` … and ${plural(cut, "more token")}`));
  listen(node, row);
  return node;
}

// Numbers of the tokens that a search's hits in the response overlap.
function matches(tokens, search) {
  const found = new Set();
  if (!search) return found;
  const text = tokens.join("").toLowerCase();
  let [k, end] = [0, tokens[0]?.length ?? 0];
  for (let at = text.indexOf(search); at >= 0; at = text.indexOf(search, at + 1)) {
    while (k < tokens.length - 1 && end <= at) end += tokens[++k].length;
    let [j, reach] = [k, end];
    found.add(j);
    while (j < tokens.length - 1 && reach < at + search.length) { reach += tokens[++j].length; found.add(j); }
  }
  return found;
}

function listen(node, row) {
  const activate = (span) => {
    node.querySelector(".active")?.classList.remove("active");
    if (!span) return hideTip();
    span.classList.add("active");
    showTip(span, row, Number(span.dataset.k));
  };
  const over = (event) => event.target.closest("span[data-k]");
  node.addEventListener("pointermove", (event) => { if (event.pointerType === "mouse") activate(over(event)); });
  node.addEventListener("pointerleave", () => { if (document.activeElement !== node) activate(null); });
  node.addEventListener("click", (event) => activate(over(event)));
  node.addEventListener("blur", () => activate(null));
  node.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity }[event.key];
    if (event.key === "Escape") activate(null);
    if (step === undefined) return;
    event.preventDefault();
    const spans = [...node.querySelectorAll("span[data-k]")];
    const from = spans.indexOf(node.querySelector(".active"));
    const to = from < 0 && Math.abs(step) === 1 ? (step > 0 ? 0 : spans.length - 1) : Math.max(0, Math.min(spans.length - 1, from + step));
    spans[to]?.scrollIntoView({ block: "nearest" });
    activate(spans[to]);
  });
}

const percent = (logprob) => {
  if (!Number.isFinite(logprob)) return "–";
  const share = 100 * Math.exp(logprob);
  return share >= 99.95 ? "100%" : share < 0.01 ? "under 0.01%" : `${Number(share.toPrecision(2))}%`;
};

function showTip(span, row, k) {
  const tip = byId("tip");
  const [own, ref] = [row.logprobs?.[k], row.ref_logprobs?.[k]];
  const lines = [el("div", {}, el("b", {}, visible(row.tokens[k])), el("span", {}, `  token ${k + 1} of ${everyToken(row)}`))];
  if (row.observed?.[k]) lines.push(el("div", {}, "Observed: the policy read it, and did not say it."));
  if (between(own, ref) !== undefined) {
    const times = Math.exp(Math.abs(own - ref));
    const how = own >= ref ? "likelier" : "less likely";
    lines.push(el("div", {}, `KL ${signed(own - ref)} nats: ${times >= 1000 ? "over 1000" : number(times, 2)}× ${how} than under the reference`));
  }
  const cell = (tag, text) => el(tag, {}, text);
  const say = (name, value) => el("tr", {}, cell("th", name), cell("td", value === null ? "no number" : `${number(value, 4)} nats`), cell("td", percent(value)));
  const rows = [];
  if (own !== undefined && !row.observed?.[k]) rows.push(say("log π", own));
  if (ref !== undefined && !row.observed?.[k]) rows.push(say("log π_ref", ref));
  if (rows.length) lines.push(el("table", {}, rows));
  const others = row.alternatives?.[k];
  if (others?.length) {
    lines.push(el("table", {}, el("tr", {}, cell("th", "or"), cell("th", "π"), cell("th", "π_ref")),
      others.map(([text, a, b]) => el("tr", {}, cell("td", visible(text)), cell("td", percent(a)), cell("td", b === undefined ? "" : percent(b))))));
  }
  tip.replaceChildren(...lines);
  tip.hidden = false;
  anchor = span;
  placeTip();
}

// Places the tip above its token, or below if there is no room.
function placeTip() {
  const [tip, span] = [byId("tip"), anchor];
  if (tip.hidden || !span?.isConnected) return hideTip();
  const [at, size] = [span.getBoundingClientRect(), tip.getBoundingClientRect()];
  const left = Math.min(Math.max(8, at.left), document.documentElement.clientWidth - size.width - 8);
  const above = at.top - size.height - 8;
  Object.assign(tip.style, { left: `${left}px`, top: `${above > 8 ? above : at.bottom + 8}px` });
}

let anchor = null; // the token that the tip is about

function hideTip() { byId("tip").hidden = true; }
addEventListener("scroll", placeTip, { passive: true, capture: true });
