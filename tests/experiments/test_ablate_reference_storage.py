"""The ablation of reference storages at toy size, against independent figures."""

import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
import tomllib

import jax
import numpy as np
import places
import pytest
import toy_files
import toys
from studies import ablate_reference_storage
from studies.storage import models, preparation, tables
from studies.storage.options import STORAGES, Config

from rlhf_jax import hf
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference import storage
from rlhf_jax.runs import command_line, metrics, run_config
from rlhf_jax.sweeps import declaration, planned
from rlhf_jax.train import sweep

TEXT = "the cat sat . the dog ran . it was very good and we sat on the dog . " * 8
FILE = places.EXPERIMENTS / "studies" / "storage" / "sweep.toml"
TOY = {
    "max_length": 12,
    "max_new_tokens": 6,
    "responses": 4,
    "batch_size": 4,
    "nudge_steps": 3,
    "nudge_learning_rate": 1e-2,
    "repeats": 1,
    "held_out": 0.2,
}
TOY_WORDS = [
    word
    for name, value in TOY.items()
    for word in run_config.words_of(f"--{name}", value)
]


def play(*argv):
    command_line.main(
        ablate_reference_storage.main,
        Config,
        description="",
        argv=[str(word) for word in argv],
    )


@pytest.fixture
def files(tmp_path):
    (tmp_path / "text.txt").write_text(TEXT)
    model = toy_files.checkpoint(tmp_path / "model")
    return ["--model", model, "--text", tmp_path / "text.txt"]


def row_of(folder):
    return json.loads((folder / "summary.json").read_text())["row"]


@pytest.mark.long
def test_the_rows_of_a_checkpoint_s_storages(tmp_path, files, capsys):
    for name in STORAGES:
        play(
            *("--storage", name, *files, *TOY_WORDS, "--no-progress"),
            *("--prepared", tmp_path / "prepared", "--out", tmp_path / name),
        )
    by_name = {name: row_of(tmp_path / name) for name in STORAGES}
    assert all(row["storage"] == name for name, row in by_name.items())
    _, params = hf.load(files[1])
    numbers = sum(leaf.size for leaf in jax.tree.leaves(params))
    whole = numbers * 4 / 2**20
    near = functools.partial(pytest.approx, abs=5e-4)  # digests: 8 bytes a leaf, twice
    assert by_name["copy"]["held_mib"] == near(whole)
    assert by_name["fp16"]["held_mib"] == near(whole / 2)
    eight = storage.nbytes(storage.store(params, dtype="int8")) / 2**20
    assert by_name["int8"]["held_mib"] == near(eight)
    assert by_name["host"]["held_mib"] == near(0)
    assert by_name["host"]["host_mib"] == near(whole)
    assert by_name["lora-base"]["held_mib"] == 0  # the very arrays of the base
    exact = ("copy", "host", "cpu", "lora-base")
    kl = kl_of(tmp_path / "prepared" / "seed_0", params)
    for name in exact:
        assert by_name[name]["logprob_error"] == by_name[name]["kl_error"] == 0
        assert by_name[name]["kl"] == pytest.approx(kl, abs=1e-5)
    assert kl > 1e-3
    precomputed = by_name["precomputed"]
    assert precomputed["logprob_error"] < 1e-5
    assert precomputed["kl_error"] < 1e-5
    assert precomputed["held_mib"] == precomputed["host_mib"] == 0
    for name in by_name.keys() - {*exact, "none", "precomputed"}:
        row = by_name[name]
        assert 0 < row["logprob_error"] < 0.02
        assert abs(row["kl"] - by_name["copy"]["kl"]) <= row["kl_error"] < 0.1
    assert by_name["none"]["kl"] is None
    ran = [row for name, row in by_name.items() if name != "precomputed"]
    assert all(row["peak_mib"] > row["held_mib"] for row in ran)
    assert by_name["none"]["peak_mib"] < 0.1 * by_name["copy"]["peak_mib"]
    summary = json.loads((tmp_path / "int8" / "summary.json").read_text())
    # The vocabulary is padded to 128 rows, which are held and count as no parameters.
    padding = (128 - toy_files.MODEL.vocab_size) * toy_files.MODEL.hidden_size
    assert summary["parameters"] == numbers - padding
    loss = loss_of(params)
    assert summary["held_out_loss"] == pytest.approx(loss, abs=0.05)
    assert "The reference as precomputed" in capsys.readouterr().out


def kl_of(prepared, params):
    """Mean KL per response, nats: the sampler's log-probs less those of the model."""
    with np.load(prepared / "shared.npz") as arrays:
        tokens, mask, chosen, old = (
            arrays[f"responses/{name}"]
            for name in ("tokens", "mask", "response_mask", "old_logprobs")
        )
    logits = toys.logits(params, model=toy_files.MODEL, tokens=tokens, mask=mask)
    scores = np.asarray(logits[:, :-1], np.float64)
    scores -= np.log(np.exp(scores).sum(-1, keepdims=True))
    ref = np.take_along_axis(scores, tokens[:, 1:, None], -1)[..., 0]
    return np.where(chosen[:, 1:], old[:, 1:] - ref, 0.0).sum(1).mean()


def loss_of(params):
    """Mean loss on the whole text, of which the held-out blocks are a sample."""
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


def environment():
    return {**os.environ, "PYTHONPATH": places.PYTHONPATH}


@pytest.mark.slow
def test_two_runs_that_begin_at_once_prepare_once(tmp_path, files, monkeypatch, capsys):
    """Runs a sweep of two storages from file to tables, with more seeds added later."""
    monkeypatch.setenv("PYTHONPATH", places.PYTHONPATH)
    declared = tomllib.loads(FILE.read_text())
    options = {
        **TOY,
        "model": str(files[1]),
        "text": str(files[3]),
        "prepared": str(tmp_path / "prepared"),
    }
    lines = [
        f"program = [{str(places.EXPERIMENTS)!r}, {declared['program'][1]!r}]",
        "[options]",
        *(f"{name} = {value!r}" for name, value in options.items()),
        "[grid]",
        'storage = ["copy", "int8"]',
        "[measures]",
        *(
            f"{name} = {{ summary = {measure['summary']!r} }}"
            for name, measure in declared["measures"].items()
            if name != "tpu_peak"
        ),
        "[claims]",
        "rounds = \"logprob_error(storage='copy') < logprob_error(storage='int8')\"",
    ]
    file, out = tmp_path / "sweep.toml", tmp_path / "out"
    file.write_text("\n".join(lines))
    sweep.main(sweep.Config(file=file, out=out, jobs=2))
    logs = [path.read_text() for path in sorted(out.glob("logs/*/seed_0.log"))]
    assert sum("waiting for the run that prepares" in log for log in logs) == 1
    rows = metrics_of(tmp_path / "prepared" / "seed_0")
    assert [row["step"] for row in rows] == [0, 1, 2]  # by one run alone
    results = json.loads((out / "results.json").read_text())
    assert results["claims"]["rounds"]["answer"] == "not enough seeds"
    assert results["claims"]["rounds"]["difference"] > 0
    capsys.readouterr()
    tables.main(tables.Config(sweep=out))
    printed = capsys.readouterr().out
    assert "Cost of a reference's storage" in printed
    loss = json.loads((tmp_path / "prepared/seed_0/summary.json").read_text())
    assert f"held-out loss of {loss['held_out_loss']:.3f} nats per token" in printed
    recorded_rows = json.loads((out / "storage.json").read_text())["rows"]
    assert recorded_rows == [
        row_of(out / f"runs/storage={n}/seed_0") for n in ("copy", "int8")
    ]
    assert (out / "storage.png").stat().st_size > 0


def metrics_of(folder):
    return metrics.read(folder / "metrics.jsonl")


@pytest.mark.slow
def test_a_preparer_that_is_killed_is_gone_on_from(tmp_path, files):
    options = [*files, *TOY_WORDS, "--no-progress", "--storage", "none"]
    options += ["--nudge-steps", "12", "--snapshot-every", "1"]
    command = [sys.executable, places.EXPERIMENTS, "studies.ablate_reference_storage"]
    shared = tmp_path / "prepared"
    process = subprocess.Popen(
        [*command, *options, "--prepared", shared, "--out", tmp_path / "killed"],
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    while not (shared / "seed_0" / "snapshots" / "nudge" / "2").exists():
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (shared / "seed_0" / "summary.json").exists()
    play(*options, "--prepared", shared, "--out", tmp_path / "next")
    play(*options, "--out", tmp_path / "whole")  # prepares for itself
    whole = tmp_path / "whole" / "prepared" / "seed_0"
    assert metrics_of(shared / "seed_0") == metrics_of(whole)
    with (
        np.load(shared / "seed_0" / "shared.npz") as gone_on,
        np.load(whole / "shared.npz") as uninterrupted,
    ):
        for name in uninterrupted.files:
            np.testing.assert_array_equal(gone_on[name], uninterrupted[name])
    # And the run that was killed goes on, with what the other has prepared.
    play(*options, "--prepared", shared, "--out", tmp_path / "killed", "--resume")
    clocks = {"seconds": None}
    rows = [row_of(tmp_path / name) | clocks for name in ("killed", "next", "whole")]
    assert rows[0] == rows[1] == rows[2]


@pytest.mark.slow
def test_what_was_prepared_otherwise_is_refused(tmp_path, files, capsys):
    options = [*files, *TOY_WORDS, "--no-progress", "--prepared", tmp_path / "shared"]
    play(*options, "--storage", "none", "--out", tmp_path / "none")

    def refused(*more):
        with pytest.raises(SystemExit) as stop:
            play(*options, "--storage", "copy", "--out", tmp_path / "copy", *more)
        assert stop.value.code == 2
        assert not (tmp_path / "copy").exists()
        (line,) = capsys.readouterr().err.splitlines()
        return line

    capsys.readouterr()
    assert "got temperature 1.0 there and 0.7 here" in refused("--temperature", 0.7)
    (tmp_path / "text.txt").write_text(TEXT + "the cat .")
    assert "got that of another text" in refused()
    (tmp_path / "text.txt").write_text(TEXT)
    # Another checkpoint in the place of the first is seen when it is loaded.
    again = Config(
        storage="copy",
        out=tmp_path / "copy",
        prepared=tmp_path / "shared",
        model=str(files[1]),
        text=str(files[3]),
        **TOY,
    )
    summary = tmp_path / "shared" / "seed_0" / "summary.json"
    other = json.loads(summary.read_text()) | {"reference_fingerprint": "0" * 32}
    summary.write_text(json.dumps(other))
    with pytest.raises(InputError, match=r"got other parameters in .*model"):
        preparation.get(again)


@pytest.mark.slow
def test_a_model_of_its_own_reads_bytes(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("naïve " * 10)
    options = Config(
        out=tmp_path / "run",
        storage="copy",
        text=str(text),
        max_length=8,
        max_new_tokens=4,
    )
    _, _, examples = models.blocks(
        dataclasses.replace(options, hidden_size=8, num_layers=1, num_heads=1)
    )
    whole = text.read_bytes()
    assert bytes(examples[0].response) == whole[:8]
    assert bytes(examples[1].response) == whole[7:15]
    joined = bytes(examples[0].response) + b"".join(
        bytes(example.response[1:]) for example in examples[1:]
    )
    assert joined == whole


@pytest.mark.long
def test_a_model_that_was_trained_is_read_as_it_was(tmp_path):
    """The reference read from disk has the weights that training left."""
    (tmp_path / "text.txt").write_text(TEXT)
    play(
        *("--storage", "copy", "--text", tmp_path / "text.txt", *TOY_WORDS),
        *("--hidden-size=8", "--num-layers=1", "--num-heads=1", "--num-steps=3"),
        *("--no-progress", "--out", tmp_path / "run"),
    )
    row, of_sft = row_of(tmp_path / "run"), tmp_path / "run" / "prepared" / "seed_0"
    assert row["logprob_error"] == row["kl_error"] == 0
    assert [row["stage"] for row in metrics_of(of_sft)] == ["sft"] * 3 + ["nudge"] * 3
    _, params = hf.load(of_sft / "reference")
    assert row["held_mib"] == pytest.approx(
        sum(leaf.size for leaf in jax.tree.leaves(params)) * 4 / 2**20, abs=5e-4
    )


def test_the_sweep_s_file_has_every_storage_and_options_of_the_program(tmp_path):
    declared = declaration.read(FILE)
    assert [cell.name for cell in declared.cells] == [
        f"storage={name}" for name in STORAGES
    ]
    for run in planned.runs_of(declared, out=tmp_path):
        config = command_line.parse(Config, description="", argv=run.options)
        assert config.storage == dict(run.cell.values)["storage"]
        assert config.preparation().out.name == "seed_0"
        # What a run is looked at with is its own, not that of what all of them share.
        watched = dataclasses.replace(config, profile="1:2")
        assert watched.preparation() == config.preparation()
    assert {measure.summary for measure in declared.measures.values()} == {
        f"row.{name}" for name in (tables.COST | tables.ERROR)
    }


def test_tables_of_rows(tmp_path, capsys):
    names = ["copy", "precomputed"]
    cells = {f"storage={name}": {"storage": name} for name in names}
    (tmp_path / "sweep.json").write_text(json.dumps({"cells": cells}))
    row = dict.fromkeys(tables.COST | tables.ERROR)
    for name, peak in zip(names, [2.5, None], strict=True):
        folder = tmp_path / "runs" / f"storage={name}" / "seed_1"
        folder.mkdir(parents=True)
        of_run = {"storage": name, **row, "held_mib": 1.25, "peak_mib": peak, "kl": 0.5}
        summary = {"row": of_run, "held_out_loss": 3.14159}
        (folder / "summary.json").write_text(json.dumps(summary))
    tables.main(tables.Config(sweep=tmp_path, seed=1))
    printed = capsys.readouterr().out
    assert "1.25" in printed
    assert "2.5" in printed
    assert "loss of 3.142" in " ".join(printed.split())
    assert "on a TPU" not in printed  # nobody asked
    with pytest.raises(InputError, match=r"seed 0 that is done .* \(2 of 2 lack one\)"):
        tables.main(tables.Config(sweep=tmp_path))
    with pytest.raises(InputError, match=r"sweep.json: expected a file of a sweep"):
        tables.main(tables.Config(sweep=tmp_path / "runs"))
    (folder / "summary.json").write_text(json.dumps({"held_out_loss": 1.0}))
    with pytest.raises(InputError, match="got: one without row"):
        tables.main(tables.Config(sweep=tmp_path, seed=1))


def test_options_that_cannot_be(tmp_path, capsys):
    options = {"out": tmp_path / "run", "storage": "copy", "text": "a.txt"}
    with pytest.raises(InputError, match="max_new_tokens: expected less than max_len"):
        Config(**options, max_length=8, max_new_tokens=8)
    with pytest.raises(InputError, match=r"--storage: expected one of copy, .* int7"):
        Config(**(options | {"storage": "int7"}))
    with pytest.raises(SystemExit):
        play(
            *("--storage", "copy", "--text", tmp_path / "no.txt"),
            *("--out", tmp_path / "run"),
        )
    assert "no.txt" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_prepared(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "text.txt").write_text(TEXT)
    options = Config(
        out=tmp_path / "run",
        storage="copy",
        text=str(tmp_path / "text.txt"),
        prepared=tmp_path / "file",
    )
    with pytest.raises(InputError, match=r"file: expected a folder that can be made"):
        preparation.get(options)
