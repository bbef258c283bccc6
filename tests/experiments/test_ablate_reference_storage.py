"""The ablation of storages at toy size: its table against figures taken another way."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
import toy_files
import toys
from studies import ablate_reference_storage

from rlhf_jax import hf
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference import storage
from rlhf_jax.runs import command_line

TEXT = "the cat sat . the dog ran . it was very good and we sat on the dog . " * 8


def play(*argv):
    command_line.main(
        ablate_reference_storage.main,
        ablate_reference_storage.Config,
        description="",
        argv=[str(word) for word in argv],
    )


@pytest.mark.long
def test_a_checkpoint_s_storages(tmp_path, capsys):
    model = toy_files.checkpoint(tmp_path / "model")
    (tmp_path / "text.txt").write_text(TEXT)
    out = tmp_path / "run"
    play(
        *("--model", model, "--text", tmp_path / "text.txt", "--out", out),
        *("--max-length=12", "--max-new-tokens=6", "--responses=4", "--batch-size=4"),
        *("--nudge-steps=3", "--nudge-learning-rate=1e-2", "--repeats=1"),
        *("--held-out=0.2", "--no-progress"),
    )
    rows = json.loads((out / "storage.json").read_text())["rows"]
    by_name = {row["storage"]: row for row in rows}
    _, params = hf.load(model)
    whole = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / 2**20
    near = functools.partial(pytest.approx, abs=5e-4)  # digests: 8 bytes a leaf, twice
    assert by_name["copy"]["held_mib"] == near(whole)
    assert by_name["fp16"]["held_mib"] == near(whole / 2)
    eight = storage.nbytes(storage.store(params, dtype="int8")) / 2**20
    assert by_name["int8"]["held_mib"] == near(eight)
    assert by_name["host"]["held_mib"] == near(0)
    assert by_name["host"]["host_mib"] == near(whole)
    assert by_name["lora-base"]["held_mib"] == 0  # the very arrays of the base
    exact = ("copy", "host", "cpu", "lora-base")
    for name in exact:
        assert by_name[name]["logprob_error"] == by_name[name]["kl_error"] == 0
        assert by_name[name]["kl"] == by_name["copy"]["kl"] > 1e-3
    said = by_name["precomputed"]
    assert said["logprob_error"] < 1e-5
    assert said["kl_error"] < 1e-5
    assert said["held_mib"] == said["host_mib"] == 0
    for name in by_name.keys() - {*exact, "none", "precomputed"}:
        row = by_name[name]
        assert 0 < row["logprob_error"] < 0.02
        assert abs(row["kl"] - by_name["copy"]["kl"]) <= row["kl_error"] < 0.1
    assert by_name["none"]["kl"] is None
    ran = [row for row in rows if row["storage"] != "precomputed"]
    assert all(row["peak_mib"] > row["held_mib"] for row in ran)
    assert by_name["none"]["peak_mib"] < 0.1 * by_name["copy"]["peak_mib"]
    summary = json.loads((out / "summary.json").read_text())
    assert summary["held_out_loss"] == pytest.approx(loss_of(out, params), abs=0.05)
    assert (out / "plots" / "storage.png").exists()
    text = capsys.readouterr().out
    assert "Cost of a reference's storage" in text
    assert f"held-out loss of {summary['held_out_loss']:.3f} nats per token" in text


def loss_of(out, params):
    """Of the whole text, of which the held-out blocks are a sample."""
    tokens = np.array(toy_files.tokenizer()(TEXT)["input_ids"][:144])
    rows = tokens.reshape(-1, 12)
    logits = toys.logits(
        params,
        model=toy_files.MODEL,
        tokens=rows.astype(np.int32),
        mask=np.ones_like(rows, bool),
    )
    logprobs = np.asarray(jax.nn.log_softmax(logits[:, :-1]))
    return -np.take_along_axis(logprobs, rows[:, 1:, None], -1).mean()


@pytest.mark.slow
def test_a_model_of_its_own_reads_bytes(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("naïve " * 10)
    options = ablate_reference_storage.Config(
        out=tmp_path / "run", text=str(text), max_length=8, max_new_tokens=4
    )
    _, _, examples = ablate_reference_storage.blocks(
        dataclasses.replace(options, hidden_size=8, num_layers=1, num_heads=1)
    )
    whole = text.read_bytes()
    assert bytes(examples[0].response) == whole[:8]
    assert bytes(examples[1].response) == whole[7:15]
    joined = bytes(examples[0].response) + b"".join(
        bytes(example.response[1:]) for example in examples[1:]
    )
    assert joined == whole


def test_options_that_leave_no_prompt(tmp_path, capsys):
    with pytest.raises(InputError, match="max_new_tokens: expected less than max_len"):
        ablate_reference_storage.Config(
            out=tmp_path, text="a.txt", max_length=8, max_new_tokens=8
        )
    with pytest.raises(SystemExit):
        play("--text", tmp_path / "no.txt", "--out", tmp_path / "run")
    assert "no.txt" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
