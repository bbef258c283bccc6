"""The task of three digits, its verifier, and a policy on it at toy size."""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toys
from studies.policies import arithmetic as program
from studies.policies.sums import scores, training
from worlds import arithmetic

from rlhf_jax import batch
from rlhf_jax import policy as roles_policy
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line, metrics, run

pytestmark = pytest.mark.usefixtures("quick_compilation")


def test_every_triple_stands_once_with_its_sum():
    rows = arithmetic.every_triple(3)
    assert len({row["prompt"] for row in rows}) == 1000
    for row in rows:
        digits = [int(digit) for digit in row["prompt"] if digit.isdigit()]
        assert len(row["prompt"]) == arithmetic.PROMPT_TOKENS
        assert sum(digits) == int(row["answer"])
    assert rows != arithmetic.every_triple(4)
    text = "<3+4+5>12."
    assert arithmetic.decode_text(arithmetic.encode(text)) == text


@pytest.mark.parametrize(
    ("response", "right"),
    [("12.", 1), ("12", 1), ("1", 0), ("21.", 0), (".", 0), ("<12", 1), ("9>3", 0)],
)
def test_the_verifier_reads_the_last_integer(response, right):
    row = {"prompt": "<3+4+5>", "answer": "12"}
    tokens = arithmetic.encode(row["prompt"] + response)
    mask = np.arange(len(tokens)) >= len(row["prompt"])
    answered = batch.Rollout(
        tokens=jnp.asarray([tokens], jnp.int32),
        mask=jnp.ones((1, len(tokens)), bool),
        response_mask=jnp.asarray(mask[None]),
        old_logprobs=jnp.zeros((1, len(tokens))),
        entropy=jnp.zeros((1, len(tokens))),
        index=jnp.zeros(1, jnp.int32),
        sample=jnp.zeros(1, jnp.int32),
    )
    assert arithmetic.verifier([row])(answered).tolist() == [right]


@pytest.mark.slow
def test_the_share_and_the_kl_of_samples(tmp_path):
    """Computed by hand from both models' log-probs of the sampled tokens."""
    options = training.Config(
        out=tmp_path, hidden_size=16, num_layers=1, temperature=0.7, batch_size=16
    )
    algorithm = training.programs_of(options.of_programs()).algorithm
    policy, other = (toys.params(algorithm.model, seed=seed) for seed in (0, 1))
    rows = arithmetic.every_triple(0)[:40]
    key = jax.random.key(2)
    scored = scores.sampled(
        policy, toys.freeze(other), rows, algorithm=algorithm, key=key
    )
    answered = scores._respond(policy, rows, algorithm=algorithm, key=key, greedy=False)
    log_ratio = np.subtract(
        *(
            roles_policy.logprobs(
                params,
                model=algorithm.model,
                tokens=answered.tokens,
                mask=answered.mask,
                temperature=0.7,
            )
            for params in (policy, other)
        )
    )
    by_row = np.where(answered.response_mask, log_ratio, 0.0).sum(axis=1)
    assert abs(by_row.mean()) > 1e-3
    assert scored["kl"] == pytest.approx(by_row.mean(), abs=1e-4)
    assert scored["gold"] == arithmetic.verifier(rows)(answered).mean()


def play(out, *argv):
    words = [
        *("--out", str(out), "--no-progress", "--sft-steps", "30", "--num-steps", "6"),
        *("--batch-size", "32", "--hidden-size", "16", "--num-layers", "1"),
        *("--sft-batch-size", "32", "--snapshot-every", "2"),
    ]
    command_line.main(
        program.main,
        training.Config,
        description="",
        argv=[*words, *argv],
    )
    return json.loads((out / "summary.json").read_text())


@pytest.mark.slow
@pytest.mark.cases(slow=1)
@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_a_toy_run_leaves_its_figures(tmp_path, algorithm):
    out = tmp_path / "run"
    summary = play(out, "--algorithm", algorithm, "--sample-every", "3")
    for name in ("reference", "policy"):
        shares = [summary[name][of] for of in ("gold", "greedy", "train")]
        assert all(0 <= share <= 1 for share in shares)
    assert abs(summary["reference"]["kl"]) < 1e-5 < abs(summary["policy"]["kl"])
    assert summary["reference_verified"] is True
    learned = metrics.read(out / "metrics.jsonl")
    assert [row["step"] for row in learned] == list(range(6))
    assert learned[0]["objective/kl_k3"] < 1e-6 < learned[-1]["objective/kl_k3"]
    assert all(0 <= row["objective/scores"] <= 1 for row in learned)
    assert ("group/std" in learned[0]) == (algorithm == "grpo")
    assert ("loss/value" in learned[0]) == (algorithm == "ppo")
    rows = metrics.read(out / "samples.jsonl")
    points = [row for row in rows if "tokens" not in row]
    assert [row["step"] for row in points] == [0, 3]
    assert points[0]["gold"] == summary["reference"]["gold"]
    for row in rows:
        if "tokens" in row:
            digits = map(int, filter(str.isdigit, row["prompt"]))
            assert row["judge"] == (row["response"] == f"{sum(digits)}.")
            assert "".join(row["tokens"]) == row["response"]


@pytest.mark.long
def test_stopped_in_both_stages_a_run_is_the_same_to_the_last_bit(
    tmp_path, monkeypatch
):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = play(whole)
    steps, end_step = [], run.Stage.end_step

    def stopping(stage, step, *args):
        steps.append(step)
        if len(steps) in (11, 33):  # the stages have 30 steps and 6
            signal.raise_signal(signal.SIGTERM)
        return end_step(stage, step, *args)

    monkeypatch.setattr(run.Stage, "end_step", stopping)
    for resume in ((), ("--resume",)):
        with pytest.raises(SystemExit) as exit_:
            play(parts, *resume)
        assert exit_.value.code == 128 + signal.SIGTERM
    summary = play(parts, "--resume")
    assert steps == [*range(30), *range(6)]
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (parts / name).read_bytes() == (whole / name).read_bytes()
    assert summary | {"seconds": None} == expected | {"seconds": None}


def test_programs_are_shared_where_runs_differ_in_numbers_alone(tmp_path):
    def programs(folder="a", **changes):
        options = training.Config(out=tmp_path / folder, **changes)
        return options.of_programs()

    first = programs()
    assert first == programs("b", seed=3, kl_coef=0.0, prepared=tmp_path)
    assert training.programs_of(first) is training.programs_of(programs("b", seed=4))
    recipe = training.programs_of(
        programs(baseline="leave_one_out", aggregation="constant")
    ).algorithm
    assert (recipe.baseline, recipe.aggregation) == ("leave_one_out", "constant")
    assert first != programs(baseline="leave_one_out")
    assert first != programs(algorithm="ppo")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 0}, "--held-out"),
        ({"held_out": 1000}, "leave some to train on"),
        ({"group_size": 7}, "divide the"),
        ({"group_size": 0}, "group_size"),
        ({"group_size": 1}, "group_size"),
        ({"kl_coef": -1.0}, "kl_coef"),
        ({"num_steps": 0}, "num_steps"),
        ({"learning_rate": -1.0}, "learning_rate"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        training.Config(out=tmp_path, **options)
