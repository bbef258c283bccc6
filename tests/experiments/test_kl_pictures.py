"""The pictures of the KL at toy size, against sums over the whole vocabulary."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from studies import kl_pictures
from studies.pictures import model_pair

from rlhf_jax import policy
from rlhf_jax.runs import command_line

TOY = (
    *("--vocab-size=12", "--hidden-size=8", "--num-layers=1", "--scale=0.4"),
    *("--perturbation=0.2", "--lengths", "1", "3", "--num-responses=64"),
    *("--prompt-length=2", "--num-prompts=6", "--response-length=3"),
    *("--prefix-length=1", "--num-candidates=4", "--no-progress"),
)
pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(options, folder) of a run started by its command line."""
    folder = tmp_path_factory.mktemp("pictures") / "run"
    argv = [*TOY, "--out", str(folder)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        command_line.main(
            kl_pictures.main, kl_pictures.Config, description="", argv=argv
        )
    options = command_line.parse(kl_pictures.Config, description="", argv=argv)
    return options, folder


@pytest.fixture(scope="module")
def summary(run):
    return json.loads((run[1] / "summary.json").read_text())


def exact_kl(pair, tokens) -> np.ndarray:
    """f64[B, S], column t about tokens[:, t], by NumPy from both models' logits."""
    tokens = jnp.asarray(tokens, jnp.int32)
    mask = jnp.ones(tokens.shape, bool)
    logits = [
        policy.logits(params, model=pair.model, tokens=tokens, mask=mask)
        for params in (pair.policy, pair.reference)
    ]
    values = np.zeros(tokens.shape)
    values[:, 1:] = oracles.exact_kl(*map(np.asarray, logits))[:, :-1]
    return values


def test_six_words():
    pictures = kl_pictures.six_words()
    published = {"close": 0.0041, "moved": 0.2541, "elsewhere": 2.6733}
    for name, expected in published.items():
        assert pictures[name]["kl"] == pytest.approx(expected, abs=5e-5)
        assert sum(pictures[name]["contributions"]) == pytest.approx(expected, abs=5e-5)


@pytest.mark.long
def test_estimators_of_a_response(summary):
    short, long = summary["estimators"]
    assert (short["length"], long["length"]) == (1, 3)
    for row in (short, long):
        # Unbiased: within five standard errors of k1, whose noise is the largest.
        for name in ("k1", "k3", "k3 of Σ"):
            error = row["k1 std"] / np.sqrt(64)
            assert abs(row[f"{name} mean"] - row["exact mean"]) < 5 * error
        assert row["exact std"] < row["k1 std"]
    # One token: every response stands behind the same word, and Σ has one term.
    assert short["exact std"] == pytest.approx(0, abs=1e-6)
    for name in ("k2", "k3"):
        assert short[f"{name} of Σ std"] == pytest.approx(short[f"{name} std"])
        assert long[f"{name} of Σ std"] > long[f"{name} std"]


@pytest.mark.long
def test_estimators_are_those_of_the_models(run, summary):
    options, _ = run
    pair = kl_pictures.draw_pair(options)
    expected = exact_kl(pair, [[kl_pictures.BEGIN, 3]])[0, 1]
    assert summary["estimators"][0]["exact mean"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.long
def test_a_prefix_is_the_best_of_all_and_measured_as_it_is_said(run, summary):
    options, _ = run
    pair = kl_pictures.draw_pair(options)
    rows = {row["prefix"]: row for row in summary["prefixes"]}
    words = np.arange(1, options.vocab_size)
    key = jax.random.split(jax.random.fold_in(jax.random.key(options.seed), 1))[1]
    prompt_key, response_key = jax.random.split(key)
    options_of = {"model": pair.model}
    begin = jnp.full((options.num_prompts, 1), kl_pictures.BEGIN, jnp.int32)
    prompts = model_pair.answer(
        pair.reference, begin, key=prompt_key, max_new_tokens=2, **options_of
    )
    texts = model_pair.answer(
        pair.policy, prompts, key=response_key, max_new_tokens=3, **options_of
    )
    measured = {}
    for word in words:
        behind = np.insert(np.asarray(texts), 1, word, axis=1)
        measured[str(word)] = exact_kl(pair, behind)[:, -3:].sum(1).mean()
    none = exact_kl(pair, texts)[:, -3:].sum(1).mean()
    near = {"rel": 1e-4}
    assert rows["none"]["kl_same"] == pytest.approx(none, **near)
    assert rows["none"]["kl_own"] == rows["none"]["kl_same"]
    for name in ("likeliest", "by lot", "unlikeliest", "smallest KL", "largest KL"):
        assert rows[name]["kl_same"] == pytest.approx(
            measured[rows[name]["words"]], **near
        )
    rng = np.random.default_rng(options.seed)
    candidates = [str(word) for word in 1 + rng.permutation(11)[:4]]
    of = {word: measured[word] for word in candidates}
    assert rows["largest KL"]["words"] == max(of, key=of.__getitem__)
    assert rows["smallest KL"]["words"] == min(of, key=of.__getitem__)
    assert rows["likeliest"]["ref_logprob"] >= rows["unlikeliest"]["ref_logprob"]


@pytest.mark.long
def test_what_is_drawn(run):
    drawn = sorted(path.name for path in (run[1] / "plots").iterdir())
    assert drawn == ["estimators.png", "prefixes.png", "six_words.png"]


def test_mistakes(tmp_path, capsys):
    for argv, message in (
        (("--lengths", "0"), "lengths: expected numbers of tokens, 1 or more"),
        (("--num-candidates=128",), "--num-candidates: expected 2 to 127"),
        (("--num-prompts=1",), "expected at least 2 --num-responses and 2"),
        (("--perturbation=0",), "perturbation: expected a finite number above 0"),
    ):
        with pytest.raises(SystemExit, match="2"):
            command_line.main(
                kl_pictures.main,
                kl_pictures.Config,
                description="",
                argv=[*argv, "--out", str(tmp_path / "run")],
            )
        assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
