"""The presets of `rlhf-jax grpo`."""

from __future__ import annotations

import dataclasses
from typing import Any

from rlhf_jax.algorithms import grpo

WITHOUT_KL = {"reference": "none"}

PRESETS: dict[str, dict[str, Any]] = {
    "deepseekmath": {
        "grpo": grpo.PUBLISHED,
        "kl_coef": 0.04,
        "batch_size": 1024,
        "max_new_tokens": 1024,
        "learning_rate": 1e-6,
    },
    "rloo": {"grpo": dataclasses.replace(grpo.RLOO, temperature=1.0)},
    "rloo-masked": {"grpo": grpo.RLOO_MASKED},
    "gspo": {"grpo": grpo.GSPO, **WITHOUT_KL},
    "cispo": {"grpo": grpo.CISPO, "batch_size": 8192, **WITHOUT_KL},
    "sapo": {"grpo": grpo.SAPO, **WITHOUT_KL},
    "dapo": {
        "grpo": grpo.DAPO,
        "batch_size": 8192,
        "max_new_tokens": 20_480,
        "learning_rate": 1e-6,
        "max_redraws": 10,
        **WITHOUT_KL,
    },
    "dr-grpo": {
        "grpo": grpo.DR_GRPO,
        "batch_size": 1024,
        "max_new_tokens": 3000,
        "learning_rate": 1e-6,
        **WITHOUT_KL,
    },
    "reinforce++-baseline": {"grpo": grpo.REINFORCE_BASELINE},
}
"""--preset NAME: what was published, where it differs from the defaults."""
