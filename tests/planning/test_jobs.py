"""The jobs that are planned: what they hold, what they run, and their options."""

import dataclasses
import itertools

import jax
import pytest
from tiers import one_in

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import (
    advice,
    chips,
    measured,
    model_flops,
    plan,
    run_shape,
    tables,
)
from rlhf_jax.planning.jobs import job
from rlhf_jax.planning.model_flops import Texts
from rlhf_jax.planning.plan_options import Options

TINY = {"vocab_size": 128, "hidden_size": 16, "num_layers": 2, "num_heads": 4}
TINY |= {"prompt_length": 6, "max_new_tokens": 4, "batch_size": 8}
JOBS = {
    "ppo": ["sampling", "the reward model", "the reference", "scoring and learning"],
    "grpo": ["sampling", "the reference", "learning"],
    "sft": ["learning"],
    "reward-model": ["learning"],
    "dpo": ["the reference", "learning"],
}
STAGES = {
    "sampling": "rollout",
    "the reward model": "score",
    "the reference": "score",
    "scoring and learning": "update",
    "learning": "update",
}


def work_of(algorithm, **changed):
    return job.workload_of(
        Options(**TINY, algorithm=algorithm, **changed), lengths=None
    )


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", one_in(5, JOBS))
@pytest.mark.parametrize("policy", one_in(2, ["full", "lora"]))
def test_every_program_of_every_job_traces(algorithm, policy):
    """Arguments fit, rows stand first in what is named a batch, states return."""
    work = work_of(algorithm, policy=policy, micro_batch_size=4)
    assert [program.name for program in work.programs] == JOBS[algorithm]
    for program in work.programs:
        assert program.stage == STAGES[program.name]
        assert set(program.reads) <= set(work.parts)
        output = jax.eval_shape(program.function, *program.args)
        for at in program.batch:
            assert {leaf.shape[0] for leaf in jax.tree.leaves(program.args[at])} == {8}
        for at in program.donate:
            assert jax.tree.map(_kind, output[0]) == jax.tree.map(
                _kind, program.args[at]
            )
    # What no program reads would be held for nothing.
    read = set(itertools.chain.from_iterable(one.reads for one in work.programs))
    assert read == set(work.parts)
    assert ("base of the adapters" in work.parts) == (policy == "lora")


def _kind(leaf):
    return leaf.shape, leaf.dtype


@pytest.mark.slow
def test_what_each_job_holds():
    parts = {name: list(work_of(name).parts) for name in JOBS}
    policy = ["policy", "policy's optimizer"]
    critic = ["critic", "critic's optimizer"]
    assert parts == {
        "ppo": [*policy, *critic, "reference", "reward model"],
        "grpo": [*policy, "reference"],
        "sft": policy,
        "reward-model": ["reward model", "reward model's optimizer"],
        "dpo": [*policy, "reference"],
    }
    over_base = {"policy": "lora", "reference": "base"}
    adapters = list(work_of("dpo", **over_base).parts)
    assert adapters == ["base of the adapters", *policy]
    assert list(work_of("dpo", reference="none").parts) == policy
    assert "reward model" in work_of("grpo", reward="bf16").parts


@pytest.mark.slow
def test_the_model_flops_of_every_job():
    """Forward passes, f, or h with a head; a gradient is two more."""
    model = run_shape.model_of(Options(**TINY))
    texts = Texts(6, (4,) * 8)
    f = model_flops.forward(model, texts, head=False)
    h = model_flops.forward(model, texts, head=True)
    grouped = model_flops.forward(model, texts, head=True, group_size=4)
    found = {
        name: [one.model_flops for one in work_of(name, **changed).programs]
        for name, changed in {
            "ppo": {"num_epochs": 2},
            "grpo": {"group_size": 4},
            "sft": {},
            "reward-model": {},
            "dpo": {},
        }.items()
    }
    expected = {
        "ppo": [h, f, h, 2 * (3 * h + 3 * f) + f],
        "grpo": [grouped, h, 3 * h],
        "sft": [3 * h],
        "reward-model": [3 * 2 * f],
        "dpo": [2 * h, 3 * 2 * h],
    }
    for name in JOBS:
        assert found[name] == pytest.approx(expected[name]), name


@pytest.mark.slow
def test_tokens_of_a_step():
    rows = 8 * 10
    tokens = {name: work_of(name).tokens for name in JOBS}
    assert tokens == {
        **dict.fromkeys(("ppo", "grpo", "sft"), rows),
        **dict.fromkeys(("reward-model", "dpo"), 2 * rows),
    }


@pytest.mark.parametrize(
    ("algorithm", "changed", "message"),
    [
        ("ppo", {"group_size": 4}, r"--group-size: expected none with --algorithm ppo"),
        (
            "sft",
            {"reference": "bf16"},
            r"--reference: expected none .* got bf16; leave",
        ),
        ("sft", {"num_epochs": 2}, r"--num-epochs: expected none with --algorithm sft"),
        ("dpo", {"reward": "copy"}, r"--reward: expected none with --algorithm dpo"),
        ("reward-model", {"num_minibatches": 2}, r"--num-minibatches: expected none"),
        ("grpo", {"group_size": 3}, r"8 rows.*3|3.*8"),
    ],
)
def test_options_that_a_job_does_not_read(algorithm, changed, message):
    with pytest.raises(InputError, match=message):
        Options(**TINY, algorithm=algorithm, **changed)


def test_advice_of_a_job_without_a_critic():
    options = Options(**TINY, algorithm="sft")
    resident = {"policy": 4 * 2**30, "policy's optimizer": 8 * 2**30}
    alive = [measured.Alive("learning", 0, 0, 6 * 2**30, 0, 0, 18 * 2**30)]
    found = advice.advice(options, resident=resident, alive=alive)
    assert "--policy lora: about 8.00 GiB a chip less" in found
    assert "--remat full: about 3.00 GiB a chip less" in found


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", JOBS)
def test_a_plan_of_every_job(algorithm, capsys, tmp_path):
    """By this machine's compiler, on 8 virtual devices; the tables say what it is."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1\n2\n4\n4\n")
    options = Options(
        **{**TINY, "batch_size": 16, "hidden_size": 64, "num_heads": 8},
        algorithm=algorithm,
        chip="h100",
        mesh=MeshShape(fsdp=8),
        lengths=lengths,
    )
    result = plan.plan(options)
    tables.show(result)
    text = capsys.readouterr().out
    assert [one["name"] for one in result["programs"]] == JOBS[algorithm]
    assert result["algorithm"] == algorithm
    assert result["fits"]
    assert sum(result["shares"].values()) == pytest.approx(1)
    seconds = sum(one["seconds"]["bound"] for one in result["programs"])
    peak = 8 * chips.CHIPS["h100"].flops
    assert result["mfu"] == pytest.approx(result["model_flops"] / (seconds * peak))
    for one in result["programs"]:
        # No program computes less than its model needs, but for masked pairs.
        assert 0 < one["model_flops"] <= 8 * one["flops"] * 1.01
    assert "MFU at the bound: " in text
    assert "Responses: 4 lengths, 3 tokens on average, 4 the longest" in text
    assert dataclasses.asdict(options)["lengths"] == lengths
