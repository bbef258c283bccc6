"""`--save-dtype` of every trainer changes the export and nothing else."""

import json

import numpy as np
import pytest
import toy_files
from safetensors.numpy import load_file
from test_help import TRAINERS
from test_trainers import ANSWERS, OTHER, PAIR, play

from rlhf_jax import hf
from rlhf_jax.runs import choices, metrics
from rlhf_jax.train import evaluate
from rlhf_jax.train.supervised import dpo, reward_model, sft

pytestmark = pytest.mark.usefixtures("quick_compilation")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    hf.save(
        *(folder / "model", toy_files.MODEL, toy_files.params()),
        tokenizer=toy_files.tokenizer(),
        dtype="bfloat16",
    )
    toy_files.jsonl(folder / "answers.jsonl", *ANSWERS * 2)
    toy_files.jsonl(folder / "pairs.jsonl", *[PAIR, PAIR | OTHER] * 4)
    return folder


RUNS = {
    "sft": (sft, "answers.jsonl", ()),
    "dpo": (dpo, "pairs.jsonl", ()),
    "reward-model": (reward_model, "pairs.jsonl", ("--normalise=None",)),
}


def train(name, files, out, *argv):
    command, data, options = RUNS[name]
    how = ("--model", files / "model", "--data", files / data, *options)
    return play(command, out, *how, "--batch-size=4", "--num-steps=2", *argv)


def weights(out):
    return load_file(out / "model" / "model.safetensors")


def dtypes(out):
    """Dtypes of the weights and of the config."""
    config = json.loads((out / "model" / "config.json").read_text())
    body = {k: x.dtype.name for k, x in weights(out).items() if k != "score.weight"}
    return {*body.values(), config["dtype"], config["torch_dtype"]}


def test_it_is_an_option_of_every_trainer_and_of_nothing_else():
    for command in TRAINERS.values():
        assert "--save-dtype" in dict(choices.options(command.Config))
    assert not any("save-dtype" in name for name, _ in choices.options(evaluate.Config))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_what_was_read_in_16_bits_is_saved_so(files, tmp_path, name):
    """Training and its snapshots remain in float32."""
    train(name, files, tmp_path / "same")
    assert dtypes(tmp_path / "same") == {"bfloat16"}
    train(name, files, tmp_path / "wide", "--save-dtype=float32")
    assert dtypes(tmp_path / "wide") == {"float32"}
    for key, wide in weights(tmp_path / "wide").items():
        same = weights(tmp_path / "same")[key]
        if key != "score.weight":  # normalised on what is saved
            np.testing.assert_array_equal(same, wide.astype(same.dtype))
    same, wide = (tmp_path / name / "metrics.jsonl" for name in ("same", "wide"))
    assert metrics.read(same) == metrics.read(wide)


@pytest.mark.slow
def test_a_resume_writes_a_finished_model_in_another_dtype(files, tmp_path, capsys):
    train("sft", files, tmp_path / "run")
    train("sft", files, tmp_path / "run", "--resume", "--save-dtype=float16")
    assert dtypes(tmp_path / "run") == {"bfloat16"}  # what is there stays
    assert "to write it in float16, move it away" in capsys.readouterr().out
    (tmp_path / "run" / "model").rename(tmp_path / "before")
    train("sft", files, tmp_path / "run", "--resume", "--save-dtype=float16")
    assert dtypes(tmp_path / "run") == {"float16"}


@pytest.mark.slow
def test_a_fresh_model_is_float32_or_as_asked(files, tmp_path):
    fresh = (
        *("--tokenizer", files / "model", "--data", files / "answers.jsonl"),
        *("--fresh-hidden-size=16", "--fresh-num-layers=1", "--fresh-num-heads=2"),
        *("--fresh-max-positions=16", "--batch-size=2", "--num-steps=1"),
    )
    play(sft, tmp_path / "fresh", *fresh)
    assert dtypes(tmp_path / "fresh") == {"float32"}
    play(sft, tmp_path / "half", *fresh, "--save-dtype=bfloat16")
    assert dtypes(tmp_path / "half") == {"bfloat16"}


def test_weights_that_do_not_fit_are_refused_before_the_run(tmp_path):
    params = toy_files.params()
    large = params["final_norm"]["scale"].at[0].set(1e6)
    hf.save(
        *(tmp_path / "model", toy_files.MODEL),
        params | {"final_norm": params["final_norm"] | {"scale": large}},
        tokenizer=toy_files.tokenizer(),
    )
    toy_files.jsonl(tmp_path / "answers.jsonl", *ANSWERS)
    with pytest.raises(SystemExit):
        train("sft", tmp_path, tmp_path / "run", "--save-dtype=float16")
    assert not (tmp_path / "run").exists()
