"""--max-staleness: its default correction, and refused input."""

import pytest

from rlhf_jax.algorithms.policy_gradient.corrections import Mask, Ratio, Truncate
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.train.methods import grpo, nash_md, online_dpo, ppo, reinforce

WORDS = "--model=x --prompts=x --reward=x:y --kl-coef=0.1"


def config_of(trainer, *argv):
    words = ["--out=none", *WORDS.split(), *argv]
    return command_line.parse(trainer.Config, description="", argv=words)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("trainer", [ppo, grpo, reinforce])
def test_samples_of_an_older_policy_are_weighted_unless_asked_otherwise(trainer):
    def corrected(*argv):
        config = config_of(trainer, *argv)
        return config.staleness, config.recipe.sampler_correction

    assert corrected() == (0, None)
    assert corrected("--max-staleness=0") == (0, None)
    stale = "--max-staleness=2"
    assert corrected(stale) == (2, Truncate(cap=2.0, level="token"))
    assert corrected(stale, "--sampler-correction=truncate,cap=5")[1] == Truncate(5.0)
    assert corrected(stale, "--sampler-correction=ratio") == (2, Ratio())
    assert corrected(stale, "--sampler-correction=mask,cap=3") == (2, Mask(3.0))


def test_a_sampler_of_its_own_devices_is_one_step_behind_as_before():
    config = config_of(ppo, "--placement.sampler=last:data=1")
    assert config.staleness == 1
    assert config.recipe == config.method
    last = ("--placement.sampler=last:data=1", "--max-staleness=0")
    assert config_of(ppo, *last).staleness == 0


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(
    ("trainer", "argv", "message"),
    [
        (ppo, "--max-staleness=-1", "--max-staleness: expected a finite number"),
        (
            ppo,
            "--max-staleness=5 --num-steps=5",
            "--max-staleness: expected a number of at most 4, got 5; no policy is",
        ),
        (
            ppo,
            "--max-staleness=1 --buckets 8",
            "with --buckets, because all of its batches",
        ),
        (
            ppo,
            "--max-staleness=1 --sampler-correction=recompute",
            "with --sampler-correction recompute, because recompute",
        ),
        (
            ppo,
            "--max-staleness=1 --sampler-correction=truncate,cap=0.5",
            "cap: expected a number of at least 1, got 0.5",
        ),
        (
            grpo,
            "--max-staleness=1 --max-redraws=2",
            "--max-redraws cannot be combined with a stale sampler (--max-staleness,",
        ),
        (nash_md, "--max-staleness=1", "its mixture or greedy responses are drawn"),
    ],
)
def test_what_does_not_go_with_an_older_sampler(trainer, argv, message, capsys):
    with pytest.raises((SystemExit, InputError)) as refused:
        config_of(trainer, *argv.split())
    errors = f"{refused.value} {capsys.readouterr().err}"
    assert message in " ".join(errors.replace("│", " ").split())


def test_online_dpo_has_no_ratio_to_correct():
    config = config_of(online_dpo, "--max-staleness=2")
    assert config.staleness == 2
    assert config.recipe == config.method
