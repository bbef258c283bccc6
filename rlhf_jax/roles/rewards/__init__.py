"""What a response is worth: reward models, functions of text, verifiers."""

from rlhf_jax.roles.rewards.model import (
    Reward,
    RunningMoments,
    Scores,
    from_base,
    from_model,
    init,
    no_moments,
    normalise,
    part_stats,
    scores_of,
    sequence_scores,
    update_moments,
    weighted,
)
from rlhf_jax.roles.rewards.text import Responses, TextFunction, TextReward, Texts

__all__ = [
    "Responses",
    "Reward",
    "RunningMoments",
    "Scores",
    "TextFunction",
    "TextReward",
    "Texts",
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
