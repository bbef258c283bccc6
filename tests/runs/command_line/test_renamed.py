"""Options of version 0.1 are refused by the names that they have today."""

import dataclasses

import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line, run_config
from rlhf_jax.train.dpo.options import Config as DPO
from rlhf_jax.train.grpo.options import Config as GRPO
from rlhf_jax.train.ppo.options import Config as PPO
from rlhf_jax.train.sft import Config as SFT

REQUIRED = ("--model", "m", "--prompts", "p", "--reward", "a:b", "--out", "run")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes(run_config.RunConfig):
    slots: int = 1
    mesh: int = 1


def parse(config_class, *argv):
    return command_line.parse(config_class, description="A test.", argv=list(argv))


@pytest.mark.parametrize(
    ("config_class", "argv", "now"),
    [
        (PPO, ["--mesh", "data=2"], "--placement.policy AXIS=SIZE,..."),
        (SFT, ["--mesh=data=2"], "--placement.policy AXIS=SIZE,..."),
        (PPO, ["--sampling_mesh=data=2"], "--placement.sampler last:AXIS=SIZE,..."),
        (PPO, ["--critic-mesh", "data=2"], "--placement.critic last:AXIS=SIZE,..."),
        (
            PPO,
            ["--reference-storage.mesh", "tensor=8"],
            "--placement.reference AXIS=SIZE,...",
        ),
        (
            DPO,
            ["--reference-storage.own-devices"],
            "--placement.reference last:AXIS=SIZE,...",
        ),
        (
            PPO,
            ["--reward-storage.no-own-devices"],
            "--placement.reward last:AXIS=SIZE,...",
        ),
        (
            PPO,
            ["--reward-storage.memory", "cpu"],
            "--placement.reward policy, cpu or pinned_host",
        ),
        (GRPO, ["--slots", "4"], "--continuous-batching"),
        (PPO, ["--no-reprice"], "--recompute-logprobs"),
    ],
)
def test_an_option_of_0_1_is_refused_by_its_new_name(config_class, argv, now):
    with pytest.raises(InputError) as error:
        parse(config_class, *REQUIRED, *argv)
    name = argv[0].partition("=")[0].replace("_", "-")
    assert str(error.value) == (
        f"{name}: expected an option of this version, got one of 0.1; give {now} in "
        f"its place"
    )


def test_an_option_that_a_trainer_never_had_is_unknown(capsys):
    """SFT samples nothing: continuous batching is none of its options."""
    with pytest.raises(SystemExit):
        parse(SFT, "--slots", "4")
    assert "--slots" in capsys.readouterr().err


def test_an_experiment_may_have_an_option_of_that_name():
    config = parse(Sizes, "--out", "run", "--slots", "3", "--mesh=2")
    assert (config.slots, config.mesh) == (3, 2)
