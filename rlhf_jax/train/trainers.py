"""The trainers by the names of their commands."""

from __future__ import annotations

from typing import Any

TRAINERS = {
    "sft": "Supervised fine-tuning on your own texts.",
    "reward-model": "A reward model from your own preference pairs.",
    "ppo": "PPO on your own model, prompts and reward.",
    "grpo": "GRPO or RLOO on your own model, with a verifier.",
    "reinforce": "REINFORCE++ on your own model, with a verifier.",
    "dpo": "DPO from your own preference pairs, without a reward model.",
    "distill": "A student learns a teacher's distributions on its own samples.",
    "online-dpo": "DPO on pairs of the model's own samples, with a verifier.",
    "nash-md": "Nash-MD against a mixture with the reference, with a verifier.",
}


def trainer(name: str) -> Any:
    """The module of a trainer, with its `Config` and `command`; no other is loaded."""
    match name:
        case "sft":
            from rlhf_jax.train import sft

            return sft
        case "reward-model":
            from rlhf_jax.train import reward_model

            return reward_model
        case "ppo":
            from rlhf_jax.train import ppo

            return ppo
        case "grpo":
            from rlhf_jax.train import grpo

            return grpo
        case "reinforce":
            from rlhf_jax.train import reinforce

            return reinforce
        case "dpo":
            from rlhf_jax.train import dpo

            return dpo
        case "distill":
            from rlhf_jax.train import distill

            return distill
        case "online-dpo":
            from rlhf_jax.train import online_dpo

            return online_dpo
        case "nash-md":
            from rlhf_jax.train import nash_md

            return nash_md
    raise AssertionError(name)  # of TRAINERS
