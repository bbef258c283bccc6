"""The command `rlhf-jax kl`: the KL of a text, token by token.

    rlhf-jax kl --policy RUN/model --reference gpt2 --text text.txt --html text.html

A token's colour is k1 = log π - log π_ref of that token, on the terminal and in the
file. The file adds the exact KL of the two distributions at each token, and the tokens
that the policy finds most likely there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import string
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path

from rich.console import Console
from rich.text import Text

from rlhf_jax.checkpoints import hf, pretrained
from rlhf_jax.data import hub, json_lines, tokenization
from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import InputError, located
from rlhf_jax.inspection import token_logprobs
from rlhf_jax.inspection.token_logprobs import Divergence, Token
from rlhf_jax.runs import folder, receipt, report, write_errors

MARK = b'content="rlhf-jax kl"'  # in every page written by this command
LARGEST = 10  # tokens in the table of largest KL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The text, the two models, and the outputs."""

    policy: str
    """Checkpoint folder or hub id of the policy."""
    reference: str
    """Checkpoint folder or hub id of the reference; must have the same vocabulary."""
    text: Path | None = None
    """File with the text. Give this option or --prompt."""
    prompt: str | None = None
    """The text itself. Give this option or --text."""
    html: Path | None = None
    """The HTML file to write; None writes none."""
    tokenizer: str | None = None
    """Folder or hub id of the tokenizer; None takes the one in --policy."""
    temperature: float = 1.0
    """Temperature that divides the logits of both models. That of the rollouts shows
    the KL of training."""
    alternatives: int = 3
    """Number of the policy's most likely tokens that --html shows at each place."""
    limit: float = 2.0
    """KL at which a token's colour is saturated, nats."""

    def __post_init__(self) -> None:
        if (self.text is None) == (self.prompt is None):
            got = "neither" if self.text is None else "both"
            raise InputError(
                f"expected one of --text and --prompt, got {got}; give one"
            )
        checks.positive(temperature=self.temperature, limit=self.limit)
        checks.non_negative(alternatives=self.alternatives)
        if self.html is not None:
            write_errors.check_place(
                self.html, option="--html", called="page of KL", is_own=_is_page
            )


def _is_page(path: Path) -> bool:
    with path.open("rb") as file:
        return MARK in file.read(200)


def summary(tokens: Sequence[Token]) -> str:
    """Returns a line with the number of tokens, both KL sums, and both perplexities."""
    predicted = [token.divergence for token in tokens if token.divergence is not None]
    k1 = math.fsum(divergence.k1 for divergence in predicted)
    exact = math.fsum(divergence.exact for divergence in predicted)
    own, ref = (
        math.exp(-math.fsum(column) / len(predicted))
        for column in zip(*(divergence[:2] for divergence in predicted), strict=True)
    )
    return (
        f"{len(predicted)} tokens: k1 {k1:.4g} nats in all, exact KL {exact:.4g} nats "
        f"in all; perplexity {own:.4g} under the policy, {ref:.4g} under the reference"
    )


def coloured(tokens: Sequence[Token], *, limit: float) -> Text:
    """Returns the text coloured for a terminal, below a legend.

    Tokens are blue if they are more likely under the policy than under the reference,
    and orange if less. Colours are saturated at `limit`, nats. Spaces are shown as dots
    and line breaks as ⏎.
    """
    shown = Text("k1 [nats]  ")
    for share in (-1.0, -0.5, 0.0, 0.5, 1.0):
        shown.append(f" {share * limit:+.3g} ", style=_terminal_style(share))
    shown.append(
        "  log π - log π_ref: blue, the token is more likely under the policy\n\n"
    )
    for token in tokens:
        share = 0.0 if token.divergence is None else token.divergence.k1 / limit
        shown.append(_visible(token.text), style=_terminal_style(share))
    return shown


def _terminal_style(share: float) -> str:
    strength = min(1.0, abs(share))
    if strength < 0.05:
        return ""
    full = (90, 150, 255) if share > 0 else (255, 140, 60)
    red, green, blue = (round(255 + strength * (end - 255)) for end in full)
    return f"black on rgb({red},{green},{blue})"


def html(tokens: Sequence[Token], *, limit: float, title: str) -> str:
    """Returns the text as one HTML file; colours are saturated at `limit`, nats."""
    spans = "".join(
        _span(token, place, limit=limit) for place, token in enumerate(tokens)
    )
    rows = "".join(
        f"<tr><td>{place}</td><td><code>{escape(_on_one_line(token.text))}</code></td>"
        f"<td>{divergence.k1:+.3f}</td><td>{divergence.exact:.3f}</td>"
        f"<td>{divergence.logprob:.3f}</td><td>{divergence.ref_logprob:.3f}</td></tr>"
        for place, token, divergence in largest(tokens)
    )
    page = resources.files("rlhf_jax.inspection").joinpath("token_kl.html")
    return string.Template(page.read_text(encoding="utf-8")).substitute(
        title=escape(title),
        summary=escape(summary(tokens)),
        low=f"{-limit:+.3g}",
        high=f"{limit:+.3g}",
        full=f"{limit:.3g}",
        spans=spans,
        rows=rows,
    )


def largest(tokens: Sequence[Token]) -> list[tuple[int, Token, Divergence]]:
    """Returns (place, token, divergence) of the tokens with the largest exact KL."""
    predicted = [
        (place, token, token.divergence)
        for place, token in enumerate(tokens)
        if token.divergence is not None
    ]
    return sorted(predicted, key=lambda entry: -entry[2].exact)[:LARGEST]


def _span(token: Token, place: int, *, limit: float) -> str:
    # Dots for spaces are faint, and lines may break at them.
    text = escape(_visible(token.text)).replace("·", "<wbr><i>·</i>")
    if token.divergence is None:
        return f'<span class="first" title="{place}: not predicted">{text}</span>'
    kl = token.divergence
    title = [
        f"{place}: {_on_one_line(token.text)}",
        f"k1 {kl.k1:+.3f} nats, exact KL {kl.exact:.3f} nats",
        f"log π {kl.logprob:.3f}, log π_ref {kl.ref_logprob:.3f}",
        *(
            f"or {_on_one_line(other.text)}  log π {other.logprob:.3f}, "
            f"log π_ref {other.ref_logprob:.3f}"
            for other in kl.alternatives
        ),
    ]
    colour = "37,99,235" if kl.k1 > 0 else "234,88,12"
    strength, line = (min(1.0, abs(x) / limit) for x in (kl.k1, kl.exact))
    return (
        f'<span title="{escape(chr(10).join(title))}" '
        f'style="background:rgba({colour},{0.55 * strength:.3f});'
        f'border-color:rgba(147,51,234,{line:.3f})">{text}</span>'
    )


def _visible(text: str) -> str:
    """Marks spaces, tabs and line breaks, and shows control characters by number."""
    return receipt.visible(text).replace(" ", "·")


def _on_one_line(text: str) -> str:
    return _visible(text).replace("\n", "")


def run(options: Options) -> None:
    """Computes the KL of the text, prints it in colour and writes the page.

    Raises:
      InputError: a checkpoint or the text cannot be read, the reference has another
        vocabulary, or the text is too short.
    """
    if options.text is not None:
        with located("--text"):
            text = json_lines.read_text(options.text)
    else:
        assert options.prompt is not None  # checked by Options
        text = options.prompt
    start = pretrained.described(
        options.policy, tokenizer=options.tokenizer, option="--policy"
    )
    policy = pretrained.load(options.policy, start=start)
    with located("--reference", hub.NoCheckpoint):
        ref_model, ref_params = hf.load(options.reference, dtype="float32")
    _check_tokenizer(options.reference, ids=policy.tokenizer.get_vocab())
    if ref_model.vocab_size == policy.model.vocab_size:  # or `compute` refuses it
        ref_model = dataclasses.replace(ref_model, unused_ids=policy.model.unused_ids)
    tokens = token_logprobs.compute(
        policy.params,
        ref_params,
        model=policy.model,
        ref_model=ref_model,
        tokens=policy.contract().written(text),
        decode=functools.partial(tokenization.decode, policy.tokenizer),
        temperature=options.temperature,
        alternatives=options.alternatives,
    )
    Console().print(coloured(tokens, limit=options.limit), "\n", sep="")
    report.table(
        "Largest exact KL",
        ("place", "token", "k1 [nats]", "exact KL [nats]", "log π", "log π_ref"),
        [
            (place, _on_one_line(token.text), kl.k1, kl.exact, *kl[:2])
            for place, token, kl in largest(tokens)
        ],
    )
    print(summary(tokens))
    if options.html is not None:
        title = f"KL by token: {options.policy} against {options.reference}"
        if options.temperature != 1:
            title += f", temperature {options.temperature:g}"
        page = html(tokens, limit=options.limit, title=title)
        folder.write_text(options.html, page)
        print(f"written to {options.html}")


def _check_tokenizer(reference: str, *, ids: dict[str, int]) -> None:
    try:
        own = tokenization.load_tokenizer(reference).get_vocab()
    except InputError:  # without a tokenizer only the sizes can be compared
        return
    differing = sorted(t for t in ids.keys() & own.keys() if ids[t] != own[t])
    if differing or ids.keys() != own.keys():
        shown = differing or sorted(ids.keys() ^ own.keys())
        raise InputError(
            f"--reference {reference}: expected the policy's tokenizer, got one that "
            f"differs in {len(shown)} tokens, such as {shown[0]!r}; their KL is over "
            "the same tokens"
        )
