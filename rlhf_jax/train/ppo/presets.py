"""--preset NAME: what the published runs set, where it differs from the defaults."""

from __future__ import annotations

from typing import Any

from rlhf_jax.algorithms.ppo.recipe import N_PLUS, OPENAI_2019
from rlhf_jax.functional.kl.control import Control

PRESETS: dict[str, dict[str, Any]] = {
    "openai-2019": {
        "ppo": OPENAI_2019,
        "kl_coef": 0.15,
        "kl_control": Control(
            kind="adaptive", target=6.0, unit="response", horizon=10_000
        ),
        "adam": "tf",
        "num_steps": 1954,
        "max_new_tokens": 24,
        "batch_size": 512,
        "policy_learning_rate": 1e-5,
        "critic_learning_rate": 1e-5,
        "max_grad_norm": None,
    },
    "n-plus": {
        "ppo": N_PLUS,
        "kl_coef": 0.05,
        "critic_from": "reward_model",
        "num_steps": 1953,
        "max_new_tokens": 53,
        "batch_size": 512,
        "policy_learning_rate": 3e-6,
        "critic_learning_rate": 3e-6,
        "max_grad_norm": None,
    },
}
