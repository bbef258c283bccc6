"""Claims about the expected gradient of each policy gradient over groups."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from rlhf_jax import grpo
from rlhf_jax.algorithms.reinforce import ReinforceRecipe
from rlhf_jax.functional.kl.gradients import FIXED_FORWARD, FIXED_REVERSE, FULL_REVERSE
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty

GROUP = 2  # responses in a minibatch and in a group; all pairs are enumerated
LOSS = functools.partial(Penalty, placement="loss")
Recipe = grpo.GroupRecipe | ReinforceRecipe


class Claim(NamedTuple):
    """An estimator and its expectation, share·∇(E[r] - β·KL in the reward) - β·∇KL."""

    name: str
    recipe: Recipe
    share: float | None  # None: not a multiple, for the reason in `bias`
    # The gradient of the KL that is in the loss or added to the advantage.
    in_loss: str | None = None
    bias: str = ""
    critic: bool = False  # PPO: GAE at lam = 1 with noise as values, instead of groups


def _recipe(penalty: Penalty, **choices: Any) -> Recipe:
    options = {"aggregation": "constant", "temperature": 1.0, **choices}
    if "group_size" in options:
        return grpo.GroupRecipe(penalty=penalty, **options)
    return ReinforceRecipe(penalty=penalty, **options)


RESPONSE_K2 = LOSS(value_estimator="k2", per="response")
ALONE = {"whiten_advantages": False}
OTHERS = {"group_size": GROUP, "baseline": "leave_one_out"}
MEAN = {"group_size": GROUP, "baseline": "group"}
OWN_SHARE = (GROUP - 1) / GROUP  # because the mean includes the response itself
CLAIMS = (
    Claim("PPO, KL in the reward", _recipe(IN_REWARD, **ALONE), 1.0, critic=True),
    Claim("REINFORCE, KL in the reward", _recipe(IN_REWARD, **ALONE), 1.0),
    Claim("RLOO, KL in the reward", _recipe(IN_REWARD, **OTHERS), 1.0),
    Claim(
        "RLOO, k2 of responses in the loss",
        _recipe(RESPONSE_K2, **OTHERS),
        1.0,
        FULL_REVERSE,
    ),
    Claim(
        "RLOO, k2 of tokens in the loss",
        _recipe(LOSS(value_estimator="k2"), **OTHERS),
        1.0,
        FIXED_REVERSE,
    ),
    Claim("GRPO, KL in the reward", _recipe(IN_REWARD, **MEAN), OWN_SHARE),
    Claim(
        "GRPO, k2 of responses in the loss",
        _recipe(RESPONSE_K2, **MEAN),
        OWN_SHARE,
        FULL_REVERSE,
    ),
    Claim(
        "GRPO, k2 of tokens in the loss",
        _recipe(LOSS(value_estimator="k2"), **MEAN),
        OWN_SHARE,
        FIXED_REVERSE,
    ),
    Claim(
        "GRPO, k3 in the loss",
        _recipe(LOSS(value_estimator="k3"), **MEAN),
        OWN_SHARE,
        FIXED_FORWARD,
    ),
    Claim(
        "GRPO, the KL to go beside the mean",
        _recipe(IN_REWARD, kl_to_go=True, **MEAN),
        OWN_SHARE,
        FULL_REVERSE,
    ),
    Claim(
        "FRPO: by the std, the KL to go beside it",
        _recipe(IN_REWARD, kl_to_go=True, normalise="group", **MEAN),
        None,
        FULL_REVERSE,
        "the std: groups pull alike, however little their rewards differ",
    ),
    Claim(
        "GRPO as published: by the std, k3 in the loss",
        _recipe(LOSS(value_estimator="k3"), normalise="group", **MEAN),
        None,
        FIXED_FORWARD,
        "the std: groups pull alike, however little their rewards differ",
    ),
)
"""Claims about losses that are sums over a response."""
_DIVIDED = {
    "token_mean": "the number of tokens of its minibatch, which rewards go with",
    "sequence_mean": "the length of each response, which its reward goes with",
}
_ESTIMATORS = (
    ("PPO", ALONE, 1.0, True),
    ("REINFORCE", ALONE, 1.0, False),
    ("RLOO", OTHERS, 1.0, False),
    ("GRPO", MEAN, OWN_SHARE, False),
)


def means(*, stops: bool) -> tuple[Claim, ...]:
    """Claims about token_mean and sequence_mean, with the KL in the reward.

    Without a stop token all responses have one length, and the means have the gradient
    of the sums. With a stop token its direction differs.
    """
    return tuple(
        Claim(
            f"{name}, KL in the reward, {aggregation}",
            _recipe(IN_REWARD, aggregation=aggregation, **choices),
            None if stops else share,
            None,
            divided if stops else "",
            critic,
        )
        for name, choices, share, critic in _ESTIMATORS
        for aggregation, divided in _DIVIDED.items()
    )
