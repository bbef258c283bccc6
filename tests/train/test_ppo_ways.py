"""PPO from a checkpoint, with every treatment of reference and KL coefficient.

Each case runs whole, and again stopped by a signal and resumed, with equal bits.
"""

import dataclasses
import itertools
import json
import signal
import sys

import jax.numpy as jnp
import numpy as np
import pytest
import toy_files
import toys
from safetensors.numpy import load_file, save_file

from rlhf_jax import fingerprint, frozen, hf, lora
from rlhf_jax.checkpoints import peft
from rlhf_jax.functional.checks import InputError
from rlhf_jax.reports import reading
from rlhf_jax.runs import metrics
from rlhf_jax.runs.alarms import verdicts
from rlhf_jax.runs.snapshots import proof
from rlhf_jax.train import main, trainer
from rlhf_jax.train.methods import ppo

pytestmark = [pytest.mark.usefixtures("quick_compilation"), pytest.mark.slow]
STEPS = 6
WIDE = dataclasses.replace(
    toy_files.MODEL, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=4
)
REWARD = r"""
import signal
from rlhf_jax import verifiers
calls = 0
says_good = verifiers.each(verifiers.Matches(r"\bgood\b"))

def score(prompts, responses, rows):
    return [float(len(set(response.split()))) for response in responses]

def stopping(prompts, responses, rows):
    global calls
    calls += 1
    if calls == 3:  # in step 2: the rehearsal's call is step 0's
        signal.raise_signal(signal.SIGTERM)
    return score(prompts, responses, rows)

def judge(prompts, responses, rows):
    return [-float(len(response)) for response in responses]

def is_lost(responses):
    return len("".join(responses)) % 2 == 1

def flaky(prompts, responses, rows):
    if is_lost(responses):
        raise RuntimeError("no such service")
    return judge(prompts, responses, rows)
"""
BASICS = (
    *("--batch-size=4", "--max-new-tokens=4", "--num-minibatches=1", "--num-epochs=1"),
    *(f"--num-steps={STEPS}", "--snapshot-every=4", "--sample-every=2"),
    *("--learning-rate=1e-2", "--critic.learning-rate=1e-2", "--kl-coef=0.1"),
)
LORA = ("--lora=2,modules=attention/query+mlp/*",)
WAYS = {
    "on the CPU, a schedule": (
        *("--placement.reference=cpu", "--drift-every=3"),
        "--kl-control=linear,end=0.4",
    ),
    "int8 on the host, mixed, every third KL": (
        *("--reference-storage.dtype=int8", "--reference-storage.embeddings=bfloat16"),
        "--placement.reference=pinned_host",
        "--lifecycle.move=mix,every=2,rate=0.5",
        *("--lifecycle.kl-every=3", "--lifecycle.scale-kl-coef"),
    ),
    "adapters": LORA,
    "adapters over int8": (*LORA, "--reference-storage.dtype=int8"),
    "adapters, reset": (*LORA, "--lifecycle.move=reset,every=2"),
    "none": ("--reference=none", "--kl-coef=0"),
    "packed, cut by tokens": ("--packing=auto,max_tokens_per_device=8",),
    "three references": (
        *("--reference=FOLDER/other", "--references", "wide=FOLDER/wide,weight=0.5"),
        "watched=FOLDER/model,weight=0,dtype=int8,place=cpu",
        "--critic.start=FOLDER/wide",
    ),
    "exact KL held by PI": (
        *("--penalty.value-estimator=exact", "--penalty.placement=both"),
        "--kl-control=pi,target=0.05,unit=token",
        *("--scores.normalise", "--shared-trunk"),
    ),
    "k2 in the loss, a Lagrangian and texts": (
        *("--penalty.grad-estimator=k2", "--penalty.placement=loss"),
        "--kl-control=lagrangian,target=0.1,unit=response,learning_rate=0.5",
        *("--ptx=TEXTS", "--ptx-coef=0.5", "--ptx-batch-size=2", "--ptx-max-length=8"),
        "--critic-warmup=2",
    ),
}


LONG = ("adapters", "adapters over int8", "adapters, reset")
LONG += (
    "packed, cut by tokens",
    "int8 on the host, mixed, every third KL",
    "on the CPU, a schedule",
    "k2 in the loss, a Lagrangian and texts",
    "three references",
    "exact KL held by PI",
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "distinct_words.py").write_text(REWARD)
    toy_files.checkpoint(folder / "model")
    toy_files.checkpoint(folder / "other", seed=5)
    toy_files.checkpoint(folder / "wide", model=WIDE, seed=7)
    rows = [{"prompt": prompt} for prompt in ("the cat", "a dog was")]
    toy_files.jsonl(folder / "prompts.jsonl", *rows)
    (folder / "held_out.txt").write_text("the cat sat on a dog . " * 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [*sys.path, str(folder)])
        yield folder


def play(files, out, *argv, reward="score"):
    words = [
        *("--out", out, "--no-progress", "--model", files / "model"),
        *("--prompts", files / "prompts.jsonl", "--reward", f"distinct_words:{reward}"),
        *(*BASICS, *argv),
    ]
    words = [str(word).replace("TEXTS", str(files / "held_out.txt")) for word in words]
    words = [word.replace("FOLDER", str(files)) for word in words]
    ppo.command(list(map(str, words)))
    return json.loads((out / "summary.json").read_text())


def result(out):
    """The outputs that must not depend on a stop: metrics, samples and the model."""
    names = ("metrics.jsonl", "samples.jsonl", "positions.jsonl")
    record = {name: (out / name).read_bytes() for name in names}
    for file in sorted(out.glob("*/*.safetensors")):  # metadata has no order
        for key, tensor in load_file(file).items():
            record[f"{file.parent.name} {key}"] = tensor.tobytes()
    return record


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in WAYS],
)
def test_a_stopped_run_goes_on_to_the_last_bit(name, files, tmp_path, capsys):
    options, whole, parts = WAYS[name], tmp_path / "whole", tmp_path / "parts"
    # The reward's name is recorded, so both have the one that may stop; its count of
    # calls is beyond 4 in the second run.
    module = sys.modules.get("distinct_words")
    if module is not None:
        module.calls = 0
    with pytest.raises(SystemExit) as exit_:
        play(files, parts, *options, reward="stopping")
    assert exit_.value.code == 128 + signal.SIGTERM
    assert len(metrics.read(parts / "metrics.jsonl")) < STEPS
    play(files, parts, *options, "--resume", reward="stopping")
    summary = play(files, whole, *options, reward="stopping")
    assert result(parts) == result(whole)
    rows = metrics.read(whole / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS))
    CHECKS[name](summary, rows, whole, files)
    if name != "none":
        capsys.readouterr()
        main.main(["verify", str(parts)])
        assert "none moved" in capsys.readouterr().out


WATCHED = ("--judge=distinct_words:flaky", "--eval-every=1", "--sample-every=1")


def test_cut_responses_are_looked_for_before_there_is_a_run_folder(
    files, tmp_path, monkeypatch
):
    def looked(config, rollout, *, stop_ids):
        raise InputError(f"{rollout.tokens.shape[0]} rows, {len(stop_ids)} stop ids")

    monkeypatch.setattr(trainer, "tell_cut", looked)
    with pytest.raises(SystemExit) as ended:
        play(files, tmp_path / "run")
    assert ended.value.code == 2
    assert not (tmp_path / "run" / "config.json").exists()


def test_a_judge_that_fails_is_told_and_may_be_outlived(files, tmp_path, capsys):
    """The judge's texts are in samples.jsonl; steps without a judgement are counted."""
    whole = tmp_path / "whole"
    summary = play(files, whole, *WATCHED, "--judge-failure=warn")
    printed = capsys.readouterr()
    errors, verdict = printed.err, summary["verdict"]
    assert f"verdict: {verdict['title']}; {verdict['why']}\n" in printed.out
    ((run,), _) = reading.read_all([whole])
    assert verdicts.verdict(run.rows, alarms=run.alarms)._asdict() == verdict
    module = sys.modules["distinct_words"]
    responses_of: dict[int, list[str]] = {}
    for row in metrics.read(whole / "samples.jsonl"):
        responses_of.setdefault(row["step"], []).append(row["response"])
    lost = {step: module.is_lost(responses) for step, responses in responses_of.items()}
    assert 0 < sum(lost.values()) < len(lost) == STEPS
    for row in metrics.read(whole / "metrics.jsonl"):
        responses = responses_of[row["step"]]
        score = -float(np.mean([len(response) for response in responses]))
        failed = lost[row["step"]]
        assert row["judge/score"] == (None if failed else pytest.approx(score))
        assert row["judge/failed"] == float(failed)
    assert summary["judge_failures"] == sum(lost.values())
    assert (
        errors.count("--judge distinct_words:flaky raised RuntimeError: no such") == 1
    )
    assert f"the judge failed at {sum(lost.values())} of the {STEPS} steps" in errors
    with pytest.raises(SystemExit) as exit_:  # without the option it stops the run
        play(files, tmp_path / "stop", *WATCHED)
    assert exit_.value.code == 2
    message = capsys.readouterr().err
    assert "--judge distinct_words:flaky raised RuntimeError: no such" in message
    assert "Traceback" not in message


@pytest.mark.long
def test_a_judge_that_fails_is_no_part_of_what_is_learned(files, tmp_path):
    options = (*WATCHED, "--judge-failure=warn")
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    summary = play(files, whole, *options)
    sys.modules["distinct_words"].calls = 0
    with pytest.raises(SystemExit) as exit_:
        play(files, parts, *options, reward="stopping")
    assert exit_.value.code == 128 + signal.SIGTERM
    resumed = play(files, parts, *options, "--resume", reward="stopping")
    assert result(parts) == result(whole)
    assert summary["judge_failures"] == resumed["judge_failures"] > 0
    plain = play(files, tmp_path / "plain", "--sample-every=1")
    assert plain["score_last"] == summary["score_last"]


def test_a_verifier_for_the_reward_and_no_reference_are_an_option_each(files, tmp_path):
    options = ("--num-steps=2", "--sample-every=1", "--num-shown=4", *WAYS["none"])
    summary = play(files, tmp_path / "run", *options, reward="says_good")
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    samples = metrics.read(tmp_path / "run" / "samples.jsonl")
    right = [float("good" in row["response"].split()) for row in samples]
    assert [row["score"] for row in samples] == right
    assert [row["objective/scores"] for row in rows] == [
        pytest.approx(np.mean(right[:4])),
        pytest.approx(np.mean(right[4:])),
    ]
    assert 0 < sum(right) < len(right)
    assert summary["kl_last"] is None


def check_scheduled_copy(summary, rows, out, files):
    np.testing.assert_allclose(
        coefficients(rows), np.linspace(0.1, 0.4, STEPS), rtol=1e-6
    )
    assert abs(rows[0]["objective/kl"]) < 0.05  # rounding of the storage alone
    assert rows[-1]["objective/kl_k3"] > 0.01
    assert summary["reference_verified"] is True
    assert summary["drift_relative"] > 0


def check_reset(summary, rows, out, files):
    """Right after a reset, policy and reference are equal."""
    kl = [row["objective/kl_k3"] for row in rows]
    after = [abs(kl[step]) for step in (0, 2, 4)]
    assert max(after) < 1e-9 < 1e-6 < min(kl[1], kl[3], kl[5])
    drift = [row["drift/relative"] for row in rows]
    assert drift[2] < drift[1]


def check_packed(summary, rows, out, files):
    """Every batch is packed, as padded ones exceed the device's limit."""
    used = summary["packing"]["used"]
    assert {name.split()[0] for name in used} == {"batch", "minibatch"}
    assert rows[0]["objective/kl_k3"] < 1e-9 < 1e-5 < rows[-1]["objective/kl_k3"]


def check_mixed(summary, rows, out, files):
    measured = [row["step"] for row in rows if "objective/kl" in row]
    assert measured == [0, 3]
    for row in rows:  # scaled by kl_every, so that it weighs the same in the end
        assert row["objective/kl_coef"] == pytest.approx(0.3)
    assert summary["drift_relative"] > 0


def check_adapters(summary, rows, out, files):
    kl = [row["objective/kl_k3"] for row in rows]
    assert kl[0] < 1e-9 < 1e-5 < kl[-1]
    model, base = hf.load(files / "model")
    base_model = frozen.freeze(base)
    made, adapters = peft.load(out / "adapter", model=model, base=base_model)
    _, saved = hf.load(out / "model")
    tokens = jnp.asarray(np.arange(8)[None, :] % model.vocab_size, jnp.int32)
    mask = jnp.ones_like(tokens, bool)
    attached = lora.attach(base, adapters, lora=made)
    np.testing.assert_allclose(
        toys.logits(saved, model=model, tokens=tokens, mask=mask),
        toys.logits(attached, model=model, tokens=tokens, mask=mask),
        atol=1e-4,
    )
    root = fingerprint.fingerprint(base).root
    assert summary["reference_fingerprint"] == root


def check_adapters_over_int8(summary, rows, out, files):
    kl = [row["objective/kl_k3"] for row in rows]
    assert kl[0] < 1e-9 < 1e-5 < kl[-1]  # both read the same rounded base
    assert summary["reference_verified"] is True


def check_none(summary, rows, out, files):
    assert not any(name.startswith("drift") for row in rows for name in row)
    assert not any("objective/kl" in row for row in rows)
    assert "reference_fingerprint" not in summary
    assert summary["kl_last"] is None


def coefficients(rows):
    return [row["objective/kl_coef"] for row in rows]


def check_pi(summary, rows, out, files):
    """The coefficient rises while the KL is above its target, and falls below it."""
    moves = np.sign(np.diff(np.log(coefficients(rows))))
    assert len(set(coefficients(rows))) == STEPS
    per_token = [row["objective/kl"] / row["response/length"] for row in rows]
    assert per_token[0] < 1e-4  # far below 0.05, so that the first move is down
    assert moves[0] == -1
    assert all("loss/kl" in row for row in rows)
    assert rows[-1]["loss/kl"] > 0


def check_lagrangian(summary, rows, out, files):
    for now, then in itertools.pairwise(rows):
        moved = now["objective/kl_coef"] + 0.5 * (now["objective/kl"] - 0.1)
        assert then["objective/kl_coef"] == pytest.approx(max(moved, 0.0), abs=1e-6)
    # The policy stands still in two steps, and its KL is noted in the next one.
    assert [row["objective/kl_k3"] > 1e-9 for row in rows[:4]] == [False] * 3 + [True]
    assert all(row["loss/ptx"] > 0 for row in rows)


def check_several(summary, rows, out, files):
    """Each KL is by its own model; the reward has the weighted sum."""
    for row in rows:
        kl = row["objective/kl"] + 0.5 * row["objective/kl_wide"]
        assert row["objective/non_score_reward"] == pytest.approx(-0.1 * kl, abs=1e-6)
    assert abs(rows[0]["objective/kl_watched"]) < 0.05  # rounding of int8 alone
    assert abs(rows[0]["objective/kl_wide"] - rows[0]["objective/kl"]) > 1e-3
    roots = summary["reference_fingerprints"]
    stored = frozen.freeze(hf.load(files / "model")[1], dtype="int8")
    assert roots["watched"] == frozen.fingerprint_of(stored).root
    _, wide = hf.load(files / "wide")
    assert roots["wide"] == fingerprint.fingerprint(wide).root


@pytest.mark.long
def test_another_second_reference_is_refused_by_its_name(files, tmp_path, capsys):
    """The checkpoint has changed since, or its weight is another."""
    out, options = tmp_path / "run", ("--num-steps=2", *WAYS["three references"])
    play(files, out, *options)
    weights = files / "wide" / "model.safetensors"
    content = weights.read_bytes()
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    tensors[name] = tensors[name] + np.float32(1e-3)
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(SystemExit) as exit_:
        play(files, out, *options, "--resume")
    assert exit_.value.code == 2
    errors = capsys.readouterr().err
    assert "of ppo: references/wide, as source: expected fingerprint" in errors
    weights.write_bytes(content)
    heavier = [word.replace("weight=0.5", "weight=0.7") for word in options]
    with pytest.raises(SystemExit) as exit_:
        play(files, out, *heavier, "--resume")
    assert exit_.value.code == 2
    assert "references: recorded" in capsys.readouterr().err
    models = {model_of_run.model for model_of_run in proof.check_run(out)}
    assert {"reference", "references/wide", "references/watched"} <= models


CHECKS = {
    "three references": check_several,
    "packed, cut by tokens": check_packed,
    "exact KL held by PI": check_pi,
    "k2 in the loss, a Lagrangian and texts": check_lagrangian,
    "on the CPU, a schedule": check_scheduled_copy,
    "int8 on the host, mixed, every third KL": check_mixed,
    "adapters": check_adapters,
    "adapters over int8": check_adapters_over_int8,
    "adapters, reset": check_reset,
    "none": check_none,
}
