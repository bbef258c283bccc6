"""Planned jobs: their arrays, programs and options."""

import itertools

import jax
import planned
import pytest
from planned import parsed, target_of, work_of
from tiers import one_in

from rlhf_jax.planning import chips, measured, model_flops, tables
from rlhf_jax.runs.profile.profiler import Text
from rlhf_jax.train.plan import advice, job, plan

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


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", one_in(5, JOBS))
@pytest.mark.parametrize("lora", one_in(2, ["None", "2"]))
def test_every_program_of_every_job_traces(algorithm, lora):
    """Arguments fit, batches have their rows first, and states are returned."""
    work = work_of(algorithm, f"--lora={lora}", "--micro-batch-size=8")
    assert [program.name for program in work.programs] == JOBS[algorithm]
    for program in work.programs:
        assert program.stage == STAGES[program.name]
        assert set(program.reads) <= set(work.parts)
        output = jax.eval_shape(program.function, *program.args)
        for at in program.batch:
            rows = {leaf.shape[0] for leaf in jax.tree.leaves(program.args[at])}
            assert rows == {16} or (not rows and at != program.batch[0])
        for at in program.donate:
            assert jax.tree.map(_kind, output[0]) == jax.tree.map(
                _kind, program.args[at]
            )
    # What no program reads would be held for nothing.
    read = set(itertools.chain.from_iterable(one.reads for one in work.programs))
    assert read == set(work.parts)
    assert ("base" in work.parts) == (lora == "2")


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
    adapters = list(work_of("dpo", "--lora=2").parts)
    assert sorted(adapters) == sorted(["base", *policy])
    assert list(work_of("dpo", "--reference=none").parts) == policy
    scored = work_of("grpo", f"--reward-model={planned.model()}")
    assert "reward model" in scored.parts


@pytest.mark.slow
def test_the_model_flops_of_every_job():
    """f is a forward pass, h one with a head; a gradient costs two more."""
    config, options = parsed("ppo")
    model = job.Job(options, target_of(config, options)).start_of(config).model
    texts = [Text(6, 4)] * 16
    f = model_flops.forward(model, texts, head=False)
    h = model_flops.forward(model, texts, head=True)
    grouped = model_flops.forward(model, texts, head=True, group_size=4)
    flops = {
        name: [one.model_flops for one in work_of(name, *words).programs]
        for name, words in {
            "ppo": ("--num-epochs=2",),
            "grpo": ("--group-size=4", "--num-epochs=1"),
            "sft": (),
            "reward-model": (),
            "dpo": (),
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
        assert flops[name] == pytest.approx(expected[name]), name


@pytest.mark.slow
def test_tokens_of_a_step():
    rows = 16 * 10
    tokens = {name: work_of(name).tokens for name in JOBS}
    assert tokens == {
        **dict.fromkeys(("ppo", "grpo", "sft"), rows),
        **dict.fromkeys(("reward-model", "dpo"), 2 * rows),
    }


def test_advice_of_a_job_without_a_critic():
    config, _ = parsed("sft")
    resident = {"policy": 4 * 2**30, "policy's optimizer": 8 * 2**30}
    alive = [measured.Alive("learning", 0, 0, 6 * 2**30, 0, 0, 18 * 2**30)]
    lines = advice.advice(config, resident=resident, alive=alive)
    assert "--lora 16: about 8.00 GiB per chip less" in lines
    assert "--remat full: about 3.00 GiB per chip less" in lines


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", JOBS)
def test_a_plan_of_every_job(algorithm, capsys, tmp_path):
    """Compiled on this machine for 8 virtual devices, as the tables say."""
    lengths = tmp_path / "lengths.txt"
    lengths.write_text("1\n2\n4\n4\n")
    words = ("--placement.policy=fsdp=8", f"--lengths={lengths}")
    result = plan.plan(*parsed(algorithm, *words, chip="h100"))
    tables.show(result)
    text = capsys.readouterr().out
    # Samplers are on a mesh of their own, unless they are told otherwise.
    brought = ["resharding for sampling"] if "sampling" in JOBS[algorithm] else []
    names = [one["name"] for one in result["programs"]]
    assert names == [*brought, *JOBS[algorithm]]
    assert result["algorithm"] == algorithm
    assert result["fits"]
    assert sum(result["shares"].values()) == pytest.approx(1)
    seconds = sum(one["seconds"]["bound"] for one in result["programs"])
    peak = 8 * chips.CHIPS["h100"].flops
    assert result["mfu"] == pytest.approx(result["model_flops"] / (seconds * peak))
    for one in result["programs"][len(brought) :]:
        # No program computes less than its model needs, but for masked pairs.
        assert 0 < one["model_flops"] <= 8 * one["flops"] * 1.01
    assert "MFU at the bound: " in text
    assert "Responses: 4 lengths, 3 tokens on average, 4 the longest" in text
