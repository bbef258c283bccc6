"""Rewards: reward models, functions of text, verifiers.

Names are loaded on first use: verification processes load `verifiers` without JAX.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlhf_jax.roles.rewards.ensembles import combine, ensemble
    from rlhf_jax.roles.rewards.model import (
        from_base,
        from_model,
        init,
        sequence_scores,
    )
    from rlhf_jax.roles.rewards.scores import (
        Combine,
        Reward,
        RunningMoments,
        Scores,
        no_moments,
        normalise,
        part_stats,
        scores_of,
        update_moments,
        weighted,
    )
    from rlhf_jax.roles.rewards.text import Responses, TextFunction, TextReward, Texts

__all__ = [
    "Combine",
    "Responses",
    "Reward",
    "RunningMoments",
    "Scores",
    "TextFunction",
    "TextReward",
    "Texts",
    "combine",
    "ensemble",
    "from_base",
    "from_model",
    "init",
    "no_moments",
    "normalise",
    "part_stats",
    "scores_of",
    "sequence_scores",
    "update_moments",
    "weighted",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"rlhf_jax.roles.rewards has no name {name!r}")
    # A run loads the kinds of rewards that it has.
    if name in ("from_base", "from_model", "init", "sequence_scores"):
        from rlhf_jax.roles.rewards import model as module
    elif name in ("Responses", "TextFunction", "TextReward", "Texts"):
        from rlhf_jax.roles.rewards import text as module
    elif name in ("combine", "ensemble"):
        from rlhf_jax.roles.rewards import ensembles as module
    else:
        from rlhf_jax.roles.rewards import scores as module
    return getattr(module, name)
