"""An embedding padded beyond the tokenizer does not change a run."""

import dataclasses
import json
import signal
import sys

import jax
import numpy as np
import pytest
import toy_files
from test_trainers import play

import rlhf_jax.train.methods.ppo
from rlhf_jax import hf
from rlhf_jax.data import tokenization
from rlhf_jax.runs import metrics

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]
TOKENS = toy_files.MODEL.vocab_size
PADDED = dataclasses.replace(toy_files.MODEL, vocab_size=TOKENS + 16)
REWARD = r"""
import signal
calls_left = None

def score(prompts, responses, rows):
    global calls_left
    if calls_left is not None:
        calls_left -= 1
        if calls_left == 0:
            signal.raise_signal(signal.SIGTERM)
    return [float(len(set(response.split()))) for response in responses]
"""
EXACT = ("--penalty.value-estimator=exact", "--penalty.placement=both")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """One model twice: with 16 embedding rows of no token, and without them."""
    folder = tmp_path_factory.mktemp("files")
    params = jax.tree.map(lambda leaf: 4 * leaf, toy_files.params(PADDED))
    for name, model in (("padded", PADDED), ("plain", toy_files.MODEL)):
        hf.save(folder / name, model, params, tokenizer=toy_files.tokenizer())
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog was", "it is")]
    toy_files.jsonl(folder / "prompts.jsonl", *rows)
    (folder / "distinct_of_padded.py").write_text(REWARD)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        yield folder


def ppo(out, files, model, *argv):
    return play(
        *(rlhf_jax.train.methods.ppo, out, "--model", files / model),
        *("--prompts", files / "prompts.jsonl", "--reward=distinct_of_padded:score"),
        *("--batch-size=8", "--max-new-tokens=6", "--num-minibatches=2"),
        *("--snapshot-every=2", "--sample-every=1", "--num-shown=8"),
        *("--learning-rate=1e-2", "--num-alternatives=99", *argv),
    )


def test_a_padded_embedding_changes_nothing(files, tmp_path):
    """Policy, reference, exact KL and sampler agree; resumed to the bit."""
    steps = "--num-steps=4"
    ppo(tmp_path / "padded", files, "padded", *EXACT, steps)
    ppo(tmp_path / "plain", files, "plain", *EXACT, steps)
    padded, plain = (
        metrics.read(tmp_path / name / "metrics.jsonl") for name in ("padded", "plain")
    )
    assert abs(padded[0]["objective/kl"]) < 1e-5
    assert padded[-1]["objective/kl"] > 1e-3
    for row, expected in zip(padded, plain, strict=True):
        assert abs(row["policy/sampler_mismatch"]) < 1e-5
        assert row.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, float) and not name.startswith("drift/"):
                # Scores in standard deviations are of rounding alone where none is.
                near = 1e-2 if name.endswith("_z") else 1e-4
                assert row[name] == pytest.approx(value, rel=1e-3, abs=near), name
    text = (tmp_path / "padded" / "samples.jsonl").read_text()
    assert "Infinity" not in text  # among 99 alternatives there are 24 tokens
    of_plain = metrics.read(tmp_path / "plain" / "samples.jsonl")
    rows = [json.loads(line) for line in text.splitlines()]
    assert [row["tokens"] for row in rows] == [row["tokens"] for row in of_plain]
    sys.modules["distinct_of_padded"].calls_left = 3  # the rehearsal's is step 0's
    with pytest.raises(SystemExit) as exit_:
        ppo(tmp_path / "parts", files, "padded", *EXACT, steps)
    assert exit_.value.code == 128 + signal.SIGTERM
    assert len(metrics.read(tmp_path / "parts" / "metrics.jsonl")) < 4
    ppo(tmp_path / "parts", files, "padded", *EXACT, steps, "--resume")
    for name in ("metrics.jsonl", "samples.jsonl", "model/model.safetensors"):
        parts, whole = (tmp_path / run / name for run in ("parts", "padded"))
        assert parts.read_bytes() == whole.read_bytes(), name
    # The saved embedding keeps its rows; no gradient has reached them.
    model, params = hf.load(str(tmp_path / "padded" / "model"))
    _, start = hf.load(str(files / "padded"))
    own, before = (
        np.asarray(weights["embed"]["tokens"]) for weights in (params, start)
    )
    assert model.vocab_size == PADDED.vocab_size
    np.testing.assert_array_equal(own[TOKENS:], before[TOKENS:])
    assert np.abs(own[:TOKENS] - before[:TOKENS]).max() > 1e-3
    tokenizer = tokenization.load_tokenizer(tmp_path / "padded" / "model")
    assert len(tokenizer) == TOKENS
