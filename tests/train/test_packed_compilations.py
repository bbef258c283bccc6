"""Runs of uneven lengths compile few shapes: --packing auto over 200 steps."""

import collections

import jax
import jax.numpy as jnp
import pytest
import toy_files
from test_trainers import play

import rlhf_jax.train.methods.grpo
import rlhf_jax.train.methods.ppo
from rlhf_jax import config, hf, rewards
from rlhf_jax.devices import program_cache
from rlhf_jax.runs import metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")
MODEL = config.gpt2(
    vocab_size=len(toy_files.WORDS) + 2,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    max_positions=64,
)
STEPS = 200
MOST = 6  # shapes of a program
PROGRAMS = {"sample", "spans", "reference_logprobs", "learn"}


def test_a_compilation_counts_by_its_function_and_a_second_call_does_not():
    def doubled(x):
        return 2 * x

    double, before = jax.jit(doubled), program_cache.compiled_so_far()
    for size in (3, 4, 3):
        double(jnp.zeros(size))
    assert (program_cache.compiled_so_far() - before)["doubled"] == 2


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    toy_files.checkpoint(folder / "model", model=MODEL)
    scorer = rewards.init(jax.random.key(1), toy_files.params(MODEL), model=MODEL)
    hf.save_reward(folder / "scorer", MODEL, scorer, tokenizer=toy_files.tokenizer())
    questions = ["the cat sat", "a dog", "we ran by the dog and it was good ."]
    toy_files.jsonl(
        folder / "train.jsonl",
        *({"question": text, "answer": "#### 2"} for text in questions),
    )
    toy_files.jsonl(folder / "prompts.jsonl", *({"prompt": text} for text in questions))
    return folder


def check(out, summary):
    """Checks that lengths were uneven and each program was compiled a few times."""
    rows = metrics.read(out / "timings.jsonl")
    in_steps = collections.Counter()
    for row in rows:
        in_steps.update(row.get("compiled", {}))
    assert len(rows) == STEPS
    assert max(in_steps.values()) <= MOST
    assert "learn" not in rows[0].get("compiled", {})  # the rehearsal has compiled it
    # The first of each comes before the steps; the rest of what a run compiles
    # before them are operations on parameters, one for each of their shapes.
    compiled = summary["compiled"]
    assert compiled.keys() >= PROGRAMS
    assert all(compiled[name] <= MOST for name in PROGRAMS)
    used = summary["packing"]["used"]
    assert len(used) > 4
    assert sum(n for name, n in used.items() if "batch" in name) > STEPS


@pytest.mark.long
@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param("grpo", marks=pytest.mark.slow),
        pytest.param("ppo", marks=pytest.mark.long),
    ],
)
def test_200_uneven_steps_compile_few_shapes(trainer, files, tmp_path):
    out = tmp_path / "run"
    argv = (
        *("--model", files / "model", "--max-new-tokens=48", "--batch-size=16"),
        *(f"--num-steps={STEPS}", "--packing=auto"),
        "--snapshot-every=100",
    )
    if trainer == "grpo":
        held_out = ("--held-out", files / "train.jsonl", "--num-workers=1")
        rewards = ("--prompt-field=question", "--verifier=gsm8k,unmarked=last_number")
        data = ("--prompts", files / "train.jsonl", *held_out, "--group-size=4")
        data += ("--learning-rate=1e-3", *rewards)
        summary = play(rlhf_jax.train.methods.grpo, out, *argv, *data)
    else:
        data = ("--prompts", files / "prompts.jsonl", "--num-epochs=1")
        rates = ("--learning-rate=1e-4", "--num-minibatches=2")
        scorer = ("--reward-model", files / "scorer")
        summary = play(rlhf_jax.train.methods.ppo, out, *argv, *data, *rates, *scorer)
    check(out, summary)
