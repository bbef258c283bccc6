"""The samples that normalise the scores of `rlhf-jax reward-model`."""

import json

import jax
import numpy as np
import pytest
import toy_files

from rlhf_jax import hf, rewards
from rlhf_jax.data import batches, encoding, tokenization
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.runs import command_line
from rlhf_jax.train.supervised import reward_model

PAIR = {"prompt": "the cat", "chosen": "is very good .", "rejected": "was bad"}
WRITTEN = [
    {"prompt": "the dog", "response": "sat on a cat ."},
    {"prompt": "a cat", "response": "ran"},
    {"prompt": "the cat and the dog", "response": "was very very good"},
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model")
    toy_files.jsonl(folder / "pairs.jsonl", *[PAIR, PAIR | {"prompt": "a dog"}] * 6)
    toy_files.jsonl(folder / "written.jsonl", *WRITTEN)
    return folder


def play(out, files, *argv):
    words = [
        *("--out", out, "--no-progress", "--model", files / "model"),
        *("--data", files / "pairs.jsonl", "--batch-size=4", "--num-steps=3"),
        *argv,
    ]
    command_line.main(
        reward_model.main,
        reward_model.Config,
        description="",
        argv=[str(word) for word in words],
    )
    return json.loads((out / "summary.json").read_text())


def scores_of_written(folder):
    model, params = hf.load_reward(folder)
    reader = tokenization.load_tokenizer(folder)
    examples = encoding.encode_demonstrations(
        TextContract(reader), WRITTEN, limits=Limits(16)
    )
    [texts] = batches.sequences_in_order(examples, batch_size=3, pad_id=0)
    score = jax.jit(rewards.sequence_scores, static_argnames="model")
    return np.asarray(score(params, model=model, tokens=texts.tokens, mask=texts.mask))


pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.mark.slow
def test_samples_are_normalised_before_and_after(files, tmp_path):
    """Where training changes nothing, scores are standardised before and after it."""
    argv = (
        "--normalise=samples,num_samples=8,max_new_tokens=4",
        "--learning-rate=1e-12",
    )
    summary = play(tmp_path / "run", files, *argv)
    assert summary["untrained_std"] != pytest.approx(1, abs=0.1)
    assert summary["trained_mean"] == pytest.approx(0, abs=1e-5)
    assert summary["trained_std"] == pytest.approx(1, abs=1e-5)


@pytest.mark.slow
def test_demonstrations_get_mean_0_by_a_bias_alone(files, tmp_path):
    how = f"--normalise=demonstrations,source={files / 'written.jsonl'}"
    summary = play(tmp_path / "run", files, "--learning-rate=1e-2", how)
    scores = scores_of_written(tmp_path / "run" / "model")
    assert scores.mean() == pytest.approx(0, abs=1e-5)
    assert scores.std() == pytest.approx(summary["trained_std"], rel=1e-4)
    assert abs(summary["trained_mean"]) > 1e-2
    assert "untrained_mean" not in summary

    left = play(tmp_path / "none", files, "--learning-rate=1e-2", "--normalise=None")
    assert "trained_mean" not in left
    raw = scores_of_written(tmp_path / "none" / "model")
    assert raw.mean() == pytest.approx(summary["trained_mean"], rel=1e-4)
    np.testing.assert_allclose(raw - raw.mean(), scores, atol=1e-5)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--normalise=demonstrations",), "source"),
        (("--normalise=demonstrations,temperature=1",), "temperature"),
        (
            ("--normalise=samples,num_samples=0",),
            "num_samples: expected a finite number above 0, got 0",
        ),
    ],
)
def test_options_that_cannot_be(files, tmp_path, capsys, argv, message):
    with pytest.raises(SystemExit) as exit_:
        play(tmp_path / "run", files, *argv)
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()
