"""The commands that train, one row each, and those of other packages."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any, NamedTuple

ENTRY_POINTS = "rlhf_jax.commands"


class Command(NamedTuple):
    """A row of the table of commands."""

    module: str  # with `command`, of a command line
    summary: str  # one line

    def load(self) -> Any:
        """The module, with its `command`; no other command is loaded."""
        return importlib.import_module(self.module)


TRAINERS = {
    "sft": Command(
        "rlhf_jax.train.supervised.sft", "Supervised fine-tuning on your own texts."
    ),
    "reward-model": Command(
        "rlhf_jax.train.supervised.reward_model",
        "A reward model from your own preference pairs.",
    ),
    "ppo": Command("rlhf_jax.train.methods.ppo", "PPO: a critic, and a clipped loss."),
    "grpo": Command(
        "rlhf_jax.train.methods.grpo", "GRPO and RLOO: groups, and no critic."
    ),
    "reinforce": Command(
        "rlhf_jax.train.methods.reinforce", "REINFORCE++: rewards to go, whitened."
    ),
    "dpo": Command(
        "rlhf_jax.train.supervised.dpo",
        "DPO from preference pairs, without a reward model.",
    ),
    "distill": Command(
        "rlhf_jax.train.methods.distill",
        "A student learns a teacher on its own samples.",
    ),
    "online-dpo": Command(
        "rlhf_jax.train.methods.online_dpo", "DPO on pairs of the policy's own samples."
    ),
    "nash-md": Command(
        "rlhf_jax.train.methods.nash_md",
        "Nash-MD against a mixture with the reference.",
    ),
}


def outside() -> dict[str, metadata.EntryPoint]:
    """Commands of other packages: entry points of the group `rlhf_jax.commands`.

    Each names a function of a command line, as `my_package.my_method:command`.
    """
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}
