"""Claims about losses over episodes of two turns, for `certify_turns`."""

from __future__ import annotations

from typing import Any, NamedTuple

from rlhf_jax import grpo, ppo
from rlhf_jax.algorithms.policy_gradient.recipe import CISPO, Clip
from rlhf_jax.algorithms.reinforce import ReinforceRecipe
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty

Recipe = ppo.Recipe | grpo.GroupRecipe | ReinforceRecipe

BETA = 0.3  # reward units per nat
TEMPERATURE = 0.7
GROUP = 2
GAMMA = 0.8  # per sampled token


class Claim(NamedTuple):
    """An estimator and its expectation, share·∇E[r] - β·∇KL (share·β in the reward)."""

    name: str
    recipe: Recipe
    share: float | None = 1.0  # None: not the gradient of J, for the reason in `bias`
    turns: bool = True  # turns are rewarded at their ends, not all at the end
    observed: bool = False  # observed tokens are treated as sampled, on purpose
    bias: str = ""


COMMON: dict[str, Any] = {
    "temperature": TEMPERATURE,
    "aggregation": "constant",
    "loss_scale_factor": 1.0,
}
WHOLE = {"gamma": 1.0, "lam": 1.0, "whiten_advantages": None}
OTHERS = {"group_size": GROUP, "baseline": "leave_one_out", "normalise": None}
MEAN = {"group_size": GROUP, "baseline": "group", "normalise": None}
OWN_SHARE = (GROUP - 1) / GROUP  # because the mean includes the episode itself
EXACT = Penalty("exact", placement="both")
RESPONSE_K2 = Penalty("k2", placement="loss", per="response")
CLAIMS = (
    Claim("PPO, KL in the reward", ppo.Recipe(penalty=IN_REWARD, **WHOLE, **COMMON)),
    Claim(
        "PPO, all of the reward at the end",
        ppo.Recipe(penalty=IN_REWARD, **WHOLE, **COMMON),
        turns=False,
    ),
    Claim(
        "PPO, a value after the last turn",
        ppo.Recipe(penalty=IN_REWARD, value_after_stop=True, **WHOLE, **COMMON),
    ),
    Claim(
        "PPO, discounted per sampled token",
        ppo.Recipe(penalty=IN_REWARD, **(WHOLE | {"gamma": GAMMA}), **COMMON),
    ),
    Claim(
        "PPO, exact KL in reward and loss",
        ppo.Recipe(penalty=EXACT, **WHOLE, **COMMON),
    ),
    Claim(
        "REINFORCE, KL in the reward",
        ReinforceRecipe(penalty=IN_REWARD, whiten_advantages=False, **COMMON),
    ),
    Claim(
        "RLOO, KL in the reward",
        grpo.GroupRecipe(penalty=IN_REWARD, **OTHERS, **COMMON),
    ),
    Claim(
        "RLOO by the ratio of the episode (GSPO)",
        grpo.GroupRecipe(
            penalty=IN_REWARD,
            surrogate=Clip(ratio_level="sequence"),
            **OTHERS,
            **COMMON,
        ),
    ),
    Claim(
        "RLOO, CISPO",
        grpo.GroupRecipe(penalty=IN_REWARD, surrogate=CISPO(), **OTHERS, **COMMON),
    ),
    Claim(
        "GRPO, k2 of episodes in the loss",
        grpo.GroupRecipe(penalty=RESPONSE_K2, **MEAN, **COMMON),
        OWN_SHARE,
    ),
    Claim(
        "PPO, observed tokens trained on",
        ppo.Recipe(penalty=IN_REWARD, **WHOLE, **COMMON),
        None,
        turns=False,
        observed=True,
        bias="a gradient through the chances of tokens that the policy did not draw",
    ),
    Claim(
        "GRPO, observed tokens trained on",
        grpo.GroupRecipe(penalty=RESPONSE_K2, **MEAN, **COMMON),
        None,
        turns=False,
        observed=True,
        bias="a gradient through the chances of tokens that the policy did not draw",
    ),
)
