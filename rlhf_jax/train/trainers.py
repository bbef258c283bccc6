"""The trainers by the names of their commands: one row each."""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any, NamedTuple

ENTRY_POINTS = "rlhf_jax.commands"


class Trainer(NamedTuple):
    """A command that trains."""

    module: str  # with `command`, of a command line
    says: str  # on one line


TRAINERS = {
    "sft": Trainer(
        "rlhf_jax.train.supervised.sft", "Supervised fine-tuning on your own texts."
    ),
    "reward-model": Trainer(
        "rlhf_jax.train.supervised.reward_model",
        "A reward model from your own preference pairs.",
    ),
    "ppo": Trainer("rlhf_jax.train.methods.ppo", "PPO: a critic, and a clipped loss."),
    "grpo": Trainer(
        "rlhf_jax.train.methods.grpo", "GRPO and RLOO: groups, and no critic."
    ),
    "reinforce": Trainer(
        "rlhf_jax.train.methods.reinforce", "REINFORCE++: rewards to go, whitened."
    ),
    "dpo": Trainer(
        "rlhf_jax.train.supervised.dpo",
        "DPO from preference pairs, without a reward model.",
    ),
    "distill": Trainer(
        "rlhf_jax.train.methods.distill",
        "A student learns a teacher on its own samples.",
    ),
    "online-dpo": Trainer(
        "rlhf_jax.train.methods.online_dpo", "DPO on pairs of the policy's own samples."
    ),
    "nash-md": Trainer(
        "rlhf_jax.train.methods.nash_md",
        "Nash-MD against a mixture with the reference.",
    ),
}


def outside() -> dict[str, metadata.EntryPoint]:
    """Commands of other packages: entry points of the group `rlhf_jax.commands`.

    Each names a function of a command line, as `my_package.my_method:command`.
    """
    return {point.name: point for point in metadata.entry_points(group=ENTRY_POINTS)}


def trainer(name: str) -> Any:
    """The module of a trainer, with its `command`; no other is loaded."""
    return importlib.import_module(TRAINERS[name].module)
