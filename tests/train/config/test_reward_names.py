"""Reward models in tables have the names that the command line gave them."""

import pytest

from rlhf_jax.runs import command_line
from rlhf_jax.train.methods import ppo


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ("--reward-model a", ["reward"]),
        ("--reward-model a+b", ["reward 0", "reward 1"]),
        (
            "--rewards proxy=model:a judge=model:b,weight=0",
            ["reward proxy", "reward judge"],
        ),
        ("--rewards f=length proxy=model:a+b", ["reward proxy 0", "reward proxy 1"]),
        ("--reward m:f", []),
    ],
)
def test_reward_models_have_their_names(options, names):
    argv = ["--model=m", "--prompts=p", "--out=o", *options.split()]
    config = command_line.parse(ppo.Config, description="", argv=argv)
    assert [*config.rewards.model_names] == names
    assert len(config.rewards.models) == len(names)
