"""KL by token: its numbers against loops over logits, and its renderings."""

import dataclasses
import html.parser
import math

import jax.numpy as jnp
import numpy as np
import pytest
import toy_files
import toys

from rlhf_jax import hf, policy
from rlhf_jax.data import tokenization
from rlhf_jax.functional.checks import InputError
from rlhf_jax.inspection import token_kl, token_logprobs
from rlhf_jax.inspection.token_logprobs import Alternative, Divergence, Token

PARAMS, REF_PARAMS = toys.params(), toys.params(toys.LLAMA, seed=1)
logprobs = toys.jit(policy.logprobs, static_argnames=("model", "temperature"))
LETTERS = "abcdefghijklm"


def decode(ids):
    return "".join(LETTERS[i] for i in ids)


def divergences_of(tokens, **options):
    predicted = token_logprobs.compute(
        PARAMS,
        REF_PARAMS,
        model=toys.GPT2,
        ref_model=toys.LLAMA,
        tokens=tokens,
        decode=decode,
        **options,
    )
    assert "".join(token.text for token in predicted) == decode(tokens)
    assert predicted[0].divergence is None
    return [token.divergence for token in predicted[1:] if token.divergence is not None]


def rows_of(params, model, rows, temperature=1.0):
    tokens = jnp.asarray(rows, jnp.int32)
    mask = jnp.ones_like(tokens, bool)
    output = logprobs(
        params, model=model, tokens=tokens, mask=mask, temperature=temperature
    )
    return np.asarray(output, np.float64)


@pytest.mark.slow
@pytest.mark.parametrize(
    "temperature", [pytest.param(1.0, marks=pytest.mark.slow), 0.5]
)
def test_logprobs_are_those_of_the_two_models(temperature):
    tokens = [3, 9, 1, 12, 0, 7, 7]
    predicted = divergences_of(tokens, temperature=temperature, alternatives=4)
    both = [
        rows_of(params, model, [tokens], temperature)[0, 1:]
        for params, model in ((PARAMS, toys.GPT2), (REF_PARAMS, toys.LLAMA))
    ]
    k1s = [token.k1 for token in predicted]
    assert sum(k1s) == pytest.approx((both[0] - both[1]).sum(), abs=1e-4)
    np.testing.assert_allclose([p.logprob for p in predicted], both[0], atol=1e-4)
    np.testing.assert_allclose([p.ref_logprob for p in predicted], both[1], atol=1e-4)
    # What could have come, from logits one place before the token.
    row = jnp.asarray([tokens], jnp.int32)
    tables = []
    for params, model in ((PARAMS, toys.GPT2), (REF_PARAMS, toys.LLAMA)):
        logits = toys.logits(
            params, model=model, tokens=row, mask=jnp.ones_like(row, bool)
        )
        scaled = np.asarray(logits, np.float64)[0] / temperature
        tables.append(scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True)))
    own, ref = tables
    for t, token in enumerate(predicted):
        exact = sum(math.exp(own[t, v]) * (own[t, v] - ref[t, v]) for v in range(13))
        assert token.exact == pytest.approx(exact, abs=1e-4)
        likeliest = sorted(range(13), key=lambda v: -own[t, v])[:4]
        assert [other.text for other in token.alternatives] == [
            LETTERS[v] for v in likeliest
        ]
        for v, other in zip(likeliest, token.alternatives, strict=True):
            assert other[1:] == pytest.approx((own[t, v], ref[t, v]), abs=1e-4)


def test_a_model_has_no_kl_to_itself():
    predicted = token_logprobs.compute(
        PARAMS,
        PARAMS,
        model=toys.GPT2,
        ref_model=toys.GPT2,
        tokens=[3, 4, 5],
        decode=decode,
        alternatives=99,
    )
    for token in predicted[1:]:
        assert token.divergence is not None
        assert token.divergence.k1 == 0
        assert token.divergence.exact == pytest.approx(0, abs=1e-6)
        assert len(token.divergence.alternatives) == 13  # there are no more


@pytest.mark.slow
def test_a_long_text_is_read_in_windows_that_overlap_by_half():
    """40 tokens in a context of 24: windows from 0, 12 and 16."""
    tokens = np.random.default_rng(0).integers(0, 13, 40).tolist()
    starts = (0, 12, 16)
    rows = rows_of(PARAMS, toys.GPT2, [tokens[start : start + 24] for start in starts])
    expected = [*rows[0, 1:24], *rows[1, 24 - 12 : 24], *rows[2, 36 - 16 : 24]]
    predicted = divergences_of(tokens)
    np.testing.assert_allclose([p.logprob for p in predicted], expected, atol=1e-4)


@pytest.mark.parametrize(
    ("tokens", "model", "message"),
    [
        ([3], toys.LLAMA, "at least 2 tokens, got 1"),
        (
            [3],
            dataclasses.replace(toys.LLAMA, vocab_size=14),
            r"one vocabulary, .*\nexpected a text of at least 2 tokens",
        ),
        (
            [3, 4],
            dataclasses.replace(toys.LLAMA, vocab_size=14),
            "one vocabulary, got 13 ids of the policy and 14 of the reference",
        ),
    ],
)
def test_what_cannot_be_scored(tokens, model, message):
    with pytest.raises(InputError, match=message):
        token_logprobs.compute(
            PARAMS,
            REF_PARAMS,
            model=toys.GPT2,
            ref_model=model,
            tokens=tokens,
            decode=decode,
        )


def test_tokens_read_as_in_their_place(shared_data):
    """With real byte-level tokens, some characters of which take several tokens."""
    reader = tokenization.load_tokenizer(shared_data / "gpt2-tokenizer")
    text = "Naïve “café” 🙂🤖 for  two\n\n\tlines — 日本語."
    ids = reader(text)["input_ids"]
    pieces = tokenization.pieces(ids, decode=reader.decode)
    assert len(ids) > len(text) / 2
    assert "�" in "".join(pieces)
    assert "".join(pieces).replace("�", "") == text
    assert pieces[-1] == "."


TOKENS = [
    Token("<b>", None),
    Token(" a", Divergence(-1.0, -2.5, 0.25, (Alternative(' "x"', -0.5, -0.75),))),
    Token("\n&", Divergence(-3.0, -2.0, 3.0, ())),
    Token("\x1b[2J", Divergence(-0.5, -0.5, 0.0, ())),
]


class Page(html.parser.HTMLParser):
    """Collects every tag with its attributes, and the text of each part."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.tokens, self.cells = [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.tags.append((tag, attributes))
        if tag not in ("meta", "br", "wbr"):
            self.open.append((tag, attributes))
        if tag == "span" and "title" in attributes:
            self.tokens.append([attributes, ""])
        if tag == "tr":
            self.cells.append([])
        if tag in ("td", "th"):
            self.cells[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        if any("title" in attributes for _, attributes in self.open):
            self.tokens[-1][1] += data
        if "td" in tags or "th" in tags:
            self.cells[-1][-1] += data


def test_the_page_holds_the_numbers_and_nothing_runs_in_it():
    text = token_kl.html(TOKENS, limit=2.0, title='<script>"of" a & b')
    page = Page(text)
    assert page.open == []  # every tag is closed
    assert {tag for tag, _ in page.tags}.isdisjoint({"script", "link", "img", "iframe"})
    assert "http" not in text
    assert "<title>&lt;script&gt;&quot;of&quot; a &amp; b</title>" in text
    shown = [(attributes["title"], body) for attributes, body in page.tokens]
    assert shown == [
        ("0: not predicted", "<b>"),
        (
            "1: ·a\nk1 +1.500 nats, exact KL 0.250 nats\nlog π -1.000, "
            'log π_ref -2.500\nor ·"x"  log π -0.500, log π_ref -0.750',
            "·a",
        ),
        (
            "2: ⏎&\nk1 -1.000 nats, exact KL 3.000 nats\n"
            "log π -3.000, log π_ref -2.000",
            "⏎\n&",
        ),
        (
            "3: \\x1b[2J\nk1 +0.000 nats, exact KL 0.000 nats\n"
            "log π -0.500, log π_ref -0.500",
            "\\x1b[2J",
        ),
    ]
    styles = [attributes.get("style", "") for attributes, _ in page.tokens]
    # 0.55 · 1.5/2 of blue over 0.25/2 of the line; half of orange over a full line.
    assert styles[1] == (
        "background:rgba(37,99,235,0.413);border-color:rgba(147,51,234,0.125)"
    )
    assert styles[2] == (
        "background:rgba(234,88,12,0.275);border-color:rgba(147,51,234,1.000)"
    )
    assert page.cells[1:] == [
        ["2", "⏎&", "-1.000", "3.000", "-3.000", "-2.000"],
        ["1", "·a", "+1.500", "0.250", "-1.000", "-2.500"],
        ["3", "\\x1b[2J", "+0.000", "0.000", "-0.500", "-0.500"],
    ]
    assert "color-scheme: light dark" in text
    # Perplexities exp(4.5/3) and exp(5/3).
    summary = (
        "3 tokens: k1 0.5 nats in all, exact KL 3.25 nats in all; perplexity 4.482 "
        "under the policy, 5.294 under the reference"
    )
    assert token_kl.summary(TOKENS) == summary
    assert f"<p>{summary}.</p>" in text


def test_the_terminal_shows_it_in_colour():
    shown = token_kl.coloured(TOKENS, limit=2.0)
    legend, _, text = shown.plain.partition("\n\n")
    assert legend.startswith("k1 [nats]   -2  -1  +0  +1  +2 ")
    assert text == "<b>·a⏎\n&\\x1b[2J"
    styles = {shown.plain[span.start : span.end]: span.style for span in shown.spans}
    # From white, three quarters of the way to (90, 150, 255).
    assert styles["·a"] == "black on rgb(131,176,255)"
    assert styles["⏎\n&"] == styles[" -1 "] == "black on rgb(255,198,158)"
    assert styles[" +2 "] == "black on rgb(90,150,255)"
    assert "<b>" not in styles
    assert "\\x1b[2J" not in styles


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("policy", "reference")):
        toy_files.checkpoint(folder / name, seed=seed)
    return folder


@pytest.mark.slow
def test_a_run_prints_and_writes(checkpoints, tmp_path, capsys):
    text = "the cat sat on a dog"
    (tmp_path / "text.txt").write_text(text)
    options = token_kl.Options(
        policy=str(checkpoints / "policy"),
        reference=str(checkpoints / "reference"),
        text=tmp_path / "text.txt",
        html=tmp_path / "out.html",
        temperature=0.5,
    )
    token_kl.run(options)
    printed = capsys.readouterr().out
    for part in (
        "the·cat·sat·on·a·dog",
        "Largest exact KL",
        "5 tokens: k1",
        "out.html",
    ):
        assert part in printed
    page = (tmp_path / "out.html").read_text(encoding="utf-8")
    assert "".join(body for _, body in Page(page).tokens) == "the·cat·sat·on·a·dog"
    assert "temperature 0.5</title>" in page
    # The same text, given on the command line: the same numbers, no file.
    options_of_prompt = dataclasses.replace(options, text=None, html=None, prompt=text)
    token_kl.run(options_of_prompt)
    again = capsys.readouterr().out
    assert again == printed.replace(f"written to {tmp_path / 'out.html'}\n", "")
    dataclasses.replace(options, html=tmp_path / "out.html")  # a page of its own
    warm = dataclasses.replace(options_of_prompt, temperature=1.0)
    token_kl.run(warm)
    assert capsys.readouterr().out != again


@pytest.mark.cases(quick=4)
@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"prompt": None}, "one of --text and --prompt, got neither"),
        ({"text": "x.txt"}, "one of --text and --prompt, got both"),
        (
            {"text": "the cat", "prompt": None},
            "^--text: .*the cat: expected a readable",
        ),
        ({"temperature": 0.0}, "temperature: expected"),
        ({"limit": -1.0}, "limit: expected"),
        ({"alternatives": -1}, "alternatives: expected"),
        ({"html": "nowhere/out.html"}, "expected a file in a folder that exists"),
        ({"html": "mine.html"}, "an earlier page of KL, got another file, which would"),
        ({"prompt": "cat"}, "at least 2 tokens, got 1"),
        ({"reference": "other"}, "expected the policy's tokenizer, got one that"),
        ({"reference": "smaller"}, "got 24 ids of the policy and 23"),
    ],
)
def test_mistakes(checkpoints, wrong, message, tmp_path):
    shuffled = [*toy_files.WORDS[1:], toy_files.WORDS[0]]
    if wrong.get("reference") == "other":
        toy_files.checkpoint(checkpoints / "other", words=shuffled)
    if wrong.get("reference") == "smaller":  # and without a tokenizer of its own
        model = dataclasses.replace(toy_files.MODEL, vocab_size=23)
        hf.save(checkpoints / "smaller", model, toy_files.params(model))
    options = {
        "policy": "policy",
        "reference": "reference",
        "prompt": "the cat",
    } | wrong
    for name in ("policy", "reference"):
        options[name] = str(checkpoints / options[name])
    for name in ("text", "html"):
        if name in options:
            options[name] = tmp_path / options[name]
    (tmp_path / "mine.html").write_text("<p>mine</p>")
    with pytest.raises(InputError, match=message):
        token_kl.run(token_kl.Options(**options))
    assert (tmp_path / "mine.html").read_text() == "<p>mine</p>"
