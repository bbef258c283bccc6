"""`rlhf-jax distill`: exact resume, the teacher's placement, and refused input."""

import dataclasses
import importlib
import json
import re
import signal
import sys

import numpy as np
import pytest
import toy_files
import transformers
from safetensors.numpy import load_file

from rlhf_jax import config
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import metrics
from rlhf_jax.train import main, trainer
from rlhf_jax.train.methods import distill

STEPS = 5
# Twice as wide as the student, deeper and of another family.
TEACHER = config.llama(
    vocab_size=toy_files.MODEL.vocab_size,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=24,
    max_positions=32,
)
REWARD = r"""
import re
import signal
calls = 0

def score(prompts, responses, rows):
    global calls
    calls += 1
    if calls == 3:  # in step 2: the rehearsal's call is step 0's
        signal.raise_signal(signal.SIGTERM)
    return [float(len(set(response.split()))) for response in responses]
"""
BASICS = (
    *("--batch-size=8", "--max-new-tokens=5", f"--num-steps={STEPS}", "--no-progress"),
    *("--learning-rate=1e-2", "--snapshot-every=2", "--sample-every=2"),
)
slow = pytest.mark.slow


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "stopping.py").write_text(REWARD)
    toy_files.checkpoint(folder / "student")
    wide = dataclasses.replace(toy_files.MODEL, max_positions=48)
    toy_files.checkpoint(folder / "wide", model=wide)
    toy_files.checkpoint(folder / "teacher", model=TEACHER, seed=3)
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog was", "we ran")]
    toy_files.jsonl(folder / "prompts.jsonl", *rows)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        yield folder


def play(files, out, *argv):
    words = [
        *("--out", out, "--model", files / "student", "--reference", files / "teacher"),
        *("--prompts", files / "prompts.jsonl", *BASICS, *argv),
    ]
    distill.command(list(map(str, words)))
    return json.loads((out / "summary.json").read_text())


def result(out):
    record = {
        name: (out / name).read_bytes() for name in ("metrics.jsonl", "samples.jsonl")
    }
    for key, tensor in load_file(out / "model" / "model.safetensors").items():
        record[key] = tensor.tobytes()
    return record


@slow
def test_a_stopped_run_goes_on_to_the_last_bit(files, tmp_path, capsys):
    """With a reward, Jensen-Shannon over the top k, and the KL also in the reward."""
    options = (
        *("--reward=stopping:score", "--kl-coef=0.3", "--divergence=jensen_shannon"),
        *("--jsd-beta=0.4", "--top-k=5", "--penalty.placement=reward"),
        *("--num-minibatches=2", "--micro-batch-size=2"),
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    with pytest.raises(SystemExit) as exit_:
        play(files, parts, *options)
    assert exit_.value.code == 128 + signal.SIGTERM
    assert len(metrics.read(parts / "metrics.jsonl")) < STEPS
    play(files, parts, *options, "--resume")
    summary = play(files, whole, *options)
    assert result(parts) == result(whole)
    assert summary["reference_verified"]
    capsys.readouterr()
    main.main(["verify", str(parts)])
    assert "none moved" in capsys.readouterr().out
    rows = metrics.read(whole / "metrics.jsonl")
    for name in ("loss/divergence", "loss/policy", "objective/kl", "objective/scores"):
        assert all(np.isfinite(row[name]) for row in rows)
    assert any(row["objective/non_score_reward"] for row in rows)
    k1 = [
        np.subtract(row["logprobs"], row["ref_logprobs"])
        for row in metrics.read(whole / "samples.jsonl")
    ]
    assert (
        max(np.abs(values).max() for values in k1) > 0.01
    )  # the teacher is another model


@slow
def test_the_distance_of_another_teacher_is_no_drift(files, tmp_path):
    """A teacher of the student's shape is another model from the first step on."""
    toy_files.checkpoint(tmp_path / "other", seed=5)
    out = tmp_path / "run"
    argv = ("--reference", tmp_path / "other", "--num-steps=2", "--alarms.drift=0.2")
    summary = play(files, out, *argv)
    first, *_ = metrics.read(out / "metrics.jsonl")
    assert first["drift/relative"] > 0.2  # the limit of the alarm
    assert "weight_drift" not in {alarm["name"] for alarm in summary["alarms"]}


@pytest.mark.long
@slow
def test_a_teacher_anywhere_gives_the_same_numbers(files, tmp_path):
    """On its own devices, on the host, and beside a student over four devices."""
    places = {
        "with the student": (),
        "on two devices of its own": ("--placement.reference=last:data=2",),
        "on the CPU": ("--placement.reference=cpu",),
        "in pinned memory": ("--placement.reference=pinned_host",),
        "beside four devices": (
            *(
                "--placement.policy=data=2,fsdp=2",
                "--placement.reference=last:tensor=4",
            ),
        ),
        "in int8": ("--reference-storage.dtype=int8",),
    }
    runs = {}
    for name, options in places.items():
        out = tmp_path / name.replace(" ", "_")
        play(files, out, *options)
        runs[name] = metrics.read(out / "metrics.jsonl")
    first = runs.pop("with the student")
    rounded = runs.pop("in int8")
    assert len(first) == STEPS
    for name, rows in runs.items():
        for row, expected in zip(rows, first, strict=True):
            assert row.keys() == expected.keys()
            for key, value in expected.items():
                if key == "trust/weight_z":  # of roundings
                    continue
                near = value
                if isinstance(value, int | float):
                    near = pytest.approx(value, rel=2e-4, abs=2e-5)
                assert row[key] == near, (name, row["step"], key)
    key = "loss/divergence"
    assert rounded[0][key] != first[0][key]
    assert rounded[0][key] == pytest.approx(first[0][key], rel=0.1)


@pytest.mark.long
@slow
def test_the_student_comes_closer_without_a_reward(files, tmp_path):
    summary = play(files, tmp_path / "run", "--num-steps=40", "--batch-size=32")
    assert summary["divergence_last"] < 0.5 * summary["divergence_first"]
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert "loss/policy" not in rows[0]
    assert rows[0]["objective/kl_coef"] == 1.0


def test_a_teacher_of_other_tokens_is_refused_by_its_small_files(tmp_path):
    """Refused in one line, from config.json and tokenizer alone, without weights."""

    def folder(name, *, words=toy_files.WORDS, vocab_size=24, positions=16):
        described = transformers.GPT2Config(
            vocab_size=vocab_size, n_embd=16, n_layer=1, n_head=2, n_positions=positions
        )
        described.architectures = ["GPT2LMHeadModel"]
        described.save_pretrained(tmp_path / name)
        toy_files.tokenizer(words).save_pretrained(tmp_path / name)
        return str(tmp_path / name)

    student = folder("student")
    for teacher, message in {
        folder("ids", words=toy_files.WORDS[::-1]): "teacher .*: expected the policy's",
        folder("small", vocab_size=23, words=toy_files.WORDS[:-1]): (
            "teacher .*: expected a model that reads .*, got vocab_size 23 for 24"
        ),
        folder("short", positions=8): "teacher .*, got max_positions 8 for 16",
    }.items():
        with pytest.raises(InputError, match=message) as error:
            frozen_models.check_teacher(teacher, student=student, tokenizer=None)
        assert "\n" not in str(error.value)
    # Rows beyond the tokenizer's ids, and the student's tokenizer from elsewhere.
    larger = folder("larger", vocab_size=30, positions=32)
    frozen_models.check_teacher(larger, student=student, tokenizer=None)
    other = str(tmp_path / "ids")
    frozen_models.check_teacher(other, student=student, tokenizer=other)


@slow
def test_it_is_refused_before_anything_is_loaded(files, tmp_path, capsys, monkeypatch):
    other = toy_files.checkpoint(
        tmp_path / "other", model=TEACHER, words=toy_files.WORDS[::-1], seed=3
    )
    monkeypatch.setattr(trainer, "load_start", None)
    with pytest.raises(SystemExit) as exit_:
        play(files, tmp_path / "run", "--reference", other)
    assert exit_.value.code == 2
    assert "expected the policy's tokenizer" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@slow
def test_a_teacher_that_becomes_the_student_has_its_head(files, tmp_path):
    toy_files.checkpoint(files / "other", seed=5)
    options = (f"--reference={files / 'other'}", "--num-steps=2")
    play(files, tmp_path / "run", "--lifecycle.move=reset,every=1", *options)
    first, second = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert first["loss/divergence"] > 1e-3
    assert second["loss/divergence"] == pytest.approx(0, abs=1e-5)


@slow
def test_a_student_teaches_itself_by_a_demonstration(files, tmp_path):
    """Its KL to itself is 0 where the prompts agree, and not 0 where they differ."""
    prompts = ("the cat", "a dog was", "we ran")
    rows = [
        {"prompt": prompt, "shown": f"we ran {prompt}", "same": prompt}
        for prompt in prompts
    ]
    toy_files.jsonl(files / "demonstrated.jsonl", *rows)
    kls = {}
    for field in ("shown", "same"):
        out = tmp_path / field
        distill.command(
            [
                *("--preset=sdft", f"--out={out}", f"--model={files / 'student'}"),
                *(f"--prompts={files / 'demonstrated.jsonl'}", *BASICS),
                *(f"--teacher-field={field}", "--num-steps=2", "--kl-coef=1"),
                *(f"--held-out={files / 'demonstrated.jsonl'}",),
            ]
        )
        kls[field] = metrics.read(out / "metrics.jsonl")[0]["loss/divergence"]
    assert kls["same"] == pytest.approx(0, abs=1e-5)
    assert kls["shown"] > 1e-3


COUNTING = """
import signal
calls, stop = 0, None

def score(prompts, responses, rows):
    global calls
    calls += 1
    if calls == stop:
        signal.raise_signal(signal.SIGTERM)
    return [float(len(response.split()) % 2) for response in responses]
"""
PASSING = """
def score(prompts, responses, rows):
    return [float(len(response.split()) % 2) for response in responses]
"""


@slow
def test_a_student_learns_from_the_successes_of_its_group(files, tmp_path, capsys):
    """It is its own teacher, and uses its reward only to choose demonstrations."""
    (files / "passing.py").write_text(PASSING)
    rows = {}
    for name, score in (("some", 1), ("none", 2)):
        distill.command(
            [
                *("--preset=sdpo", f"--out={tmp_path / name}"),
                *(f"--model={files / 'wide'}", "--reward=passing:score"),
                *(f"--prompts={files / 'prompts.jsonl'}", *BASICS),
                *("--num-steps=2", "--kl-coef=1", "--group-size=4", "--top-k=5"),
                f"--success-score={score}",
            ]
        )
        rows[name] = metrics.read(tmp_path / name / "metrics.jsonl")
        (shown,) = (x for x in capsys.readouterr().out.splitlines() if "taught" in x)
        first, last = (float(x) for x in re.findall(r"│ +([\d.]+)", shown))
        taught = [row["response/taught"] for row in rows[name]]
        np.testing.assert_allclose([first, last], taught, rtol=1e-3)
    for row in rows["some"]:
        assert 0 < row["response/taught"] <= 1
        assert 0 < row["objective/scores"] < 1  # of all responses
        assert row["loss/divergence"] > 1e-6
        assert row["policy/grad_norm"] > 0
        assert "loss/policy" not in row
    for row in rows["none"]:
        assert row["response/taught"] == 0
        assert row["policy/grad_norm"] == 0


@slow
@pytest.mark.parametrize("ahead", [(), ("--max-staleness=2",)])
def test_a_stopped_student_of_its_group_goes_on_to_the_last_bit(
    files, tmp_path, monkeypatch, ahead
):
    """Snapshots contain the rollouts sampled ahead, with their scores."""
    (files / "counting.py").write_text(COUNTING)
    counting = importlib.import_module("counting")
    options = (
        *("--preset=sdpo", f"--model={files / 'wide'}", "--reference=start"),
        *("--reward=counting:score", "--kl-coef=1", "--group-size=4", "--top-k=5"),
        *ahead,
    )
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    monkeypatch.setattr(counting, "calls", 0)
    monkeypatch.setattr(counting, "stop", 3)
    with pytest.raises(SystemExit) as exit_:
        play(files, parts, *options)
    assert exit_.value.code == 128 + signal.SIGTERM
    monkeypatch.setattr(counting, "stop", None)
    play(files, parts, *options, "--resume")
    play(files, whole, *options)
    assert result(parts) == result(whole)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (
            "--reference=start",
            "--reference: expected the checkpoint of a teacher, got start; name one, "
            "or let --model teach itself by --teacher-field or --success-score, and "
            "--reference start",
        ),
        (
            "--success-score=1 --group-size=2",
            "--success-score: expected a reward with it",
        ),
        (
            "--success-score=1",
            "--success-score: expected a group to take a demonstration from",
        ),
        (
            "--success-score=1 --group-size=2 --reward=m:f --teacher-field=a",
            "--success-score cannot be combined with --teacher-field",
        ),
        (
            "--success-score=1 --group-size=2 --penalty.placement=reward",
            "--success-score: expected a divergence in the loss alone",
        ),
        (
            "--aggregation=prompt_mean",
            "aggregation: expected another than prompt_mean in distillation",
        ),
        ("--kl-coef=0", "--kl-coef: expected a finite number above 0, got 0"),
        (
            "--ptx-coef=1",
            "--ptx-coef: expected --ptx with it, got none; give both",
        ),
        ("--num-shown=-1", "--num-shown: expected a finite number, 0 or more"),
        ("--max-grad-norm=0", "--max-grad-norm: expected a finite number above 0"),
        (
            "--sampler-correction=recompute --sampler=here,dtype=int8",
            "a --sampler that rounds cannot be combined with --sampler-correction "
            "recompute, because recompute does not correct",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(argv, message, tmp_path, capsys):
    words = ["--out", tmp_path / "run", "--model=a", "--reference=b", "--prompts=c"]
    with pytest.raises(SystemExit) as exit_:
        distill.command([*map(str, words), *argv.split()])
    assert exit_.value.code == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
