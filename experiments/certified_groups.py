"""Policy gradients over groups, against the gradient they are said to have.

    found     Σ over every group of G responses, each by its probability, of the loss's
              gradient, through `group_experience` and `policy_terms`
    expected  a·∇E[r] - β·∇KL, by autodiff of sums over all 256 responses

The loss of an unmoved policy is linear in the advantages. So the advantages of every
group are taken first, by the code of a run, then their mean for each response over
those that may stand beside it, and then one gradient over the 256 responses.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import certified_gradients
import enumerable
import expected_gradients
import jax
import jax.numpy as jnp
import numpy as np
from certified_gradients import TOLERANCE, Case
from enumerable import Float64

from rlhf_jax import grpo, score
from rlhf_jax.functional.kl_gradients import (
    FIXED_FORWARD,
    FIXED_REVERSE,
    FULL_REVERSE,
)
from rlhf_jax.functional.kl_penalty import IN_REWARD, Penalty
from rlhf_jax.roles import frozen
from rlhf_jax.stages.batch import PolicyExperience, Scored
from rlhf_jax.stages.policy_terms import policy_terms

Array = jax.Array
Params = Any

BETA = 0.3  # reward units per nat
GROUP = 2  # so that every group can be enumerated
LOSS = functools.partial(Penalty, placement="loss")


class Claim(NamedTuple):
    """An estimator and its expectation, share·∇(E[r] - β·KL in the reward) - β·∇KL."""

    name: str
    recipe: grpo.GroupRecipe
    share: float | None  # None: no multiple of it, for the reason in `bias`
    in_loss: str | None = None  # the gradient of the KL in the loss
    bias: str = ""


def _recipe(penalty: Penalty, **choices: Any) -> grpo.GroupRecipe:
    return grpo.GroupRecipe(penalty=penalty, temperature=1.0, **choices)


RESPONSE_K2 = LOSS(value_estimator="k2", per="response")
OTHERS = {"group_size": GROUP, "baseline": "leave_one_out"}
MEAN = {"group_size": GROUP, "baseline": "group"}
OWN_SHARE = (GROUP - 1) / GROUP  # a mean that holds the response itself
CLAIMS = (
    Claim(
        "REINFORCE, KL in the reward",
        _recipe(IN_REWARD, group_size=1, baseline=None),
        1.0,
    ),
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
        "GRPO as published: by the std, k3 in the loss",
        _recipe(LOSS(value_estimator="k3"), normalise="group", **MEAN),
        None,
        FIXED_FORWARD,
        "the std: groups pull alike, however little their rewards differ",
    ),
)


class Finding(NamedTuple):
    """What became of a claim."""

    claim: Claim
    error: float  # largest entry of found - expected, of the largest of ∇E[r]
    cosine: float  # between found and ∇(E[r] - β·KL)

    @property
    def holds(self) -> bool:
        """The error of what is claimed is small, that of a known bias is not."""
        if self.claim.share is None:
            return self.error > 1e-2
        return self.error <= TOLERANCE


def certify(case: Case, rewards: Float64) -> Iterator[Finding]:
    """Every claim, for one policy, reference and table of rewards f64[256]."""
    reference = frozen.read(case.reference)
    table = jnp.asarray(rewards, jnp.float32)
    options = {"model": case.model, "temperature": 1.0}
    kls = expected_gradients.gradients(case.policy, reference, **options)

    @jax.jit
    def expected_reward(params: Params) -> Array:
        return jnp.exp(enumerable.log_probabilities(params, **options)) @ table

    of_reward = flat(jax.grad(expected_reward)(case.policy))
    scored = jax.jit(_price, static_argnames=("model",))(
        case.policy, case.reference, table, model=case.model
    )
    for claim in CLAIMS:
        found = -flat(_found(claim, case, scored))
        in_reward = claim.recipe.penalty.in_reward
        of_kl = flat(kls[FULL_REVERSE, False])
        share = 1.0 if claim.share is None else claim.share
        expected = share * (of_reward - BETA * of_kl * in_reward)
        if claim.in_loss is not None:
            whole = claim.recipe.penalty.per == "response"
            expected = expected - BETA * flat(kls[claim.in_loss, whole])
        goal = of_reward - BETA * of_kl
        if claim.share is None:  # whatever the scale, it is not this direction
            found_of_reward = found + BETA * flat(kls[claim.in_loss, False])
            scale = found_of_reward @ of_reward / (of_reward @ of_reward)
            expected = expected + (scale - share) * of_reward
        error = np.abs(found - expected).max() / np.abs(of_reward).max()
        cosine = found @ goal / (np.linalg.norm(found) * np.linalg.norm(goal))
        yield Finding(claim, float(error), float(cosine))


def _price(params: Params, reference: Any, table: Array, *, model: Any) -> Scored:
    """Every response once, with k1 of each token, which the reward may take."""
    rollout = enumerable.every_response(params, model=model, temperature=1.0)
    return score.score(
        rollout,
        scores=table,
        reference=reference,
        model=model,
        critic=None,
        critic_model=None,
        max_new_tokens=enumerable.LENGTH,
        temperature=1.0,
    )


def mean_advantages(claim: Claim, scored: Scored) -> PolicyExperience:
    """Every response with its advantage, a mean over the groups that it may be in."""
    recipe = claim.recipe
    if not recipe.penalty.in_reward:
        scored = dataclasses.replace(scored, kl=None)
    form = functools.partial(
        grpo.group_experience,
        kl_coef=BETA,
        group_size=recipe.group_size,
        baseline=recipe.baseline,
        normalise=recipe.normalise,
    )
    alone = jnp.arange(enumerable.NUM_RESPONSES)
    if recipe.group_size == 1:
        found, _ = form(scored)
        return found
    # Groups (i, j) in the order of i, then of j: two rows each.
    pairs = jnp.stack(jnp.meshgrid(alone, alone, indexing="ij"), axis=-1)
    rows = pairs.reshape(-1)
    grouped, _ = form(take(scored, rows))
    advantages = grouped.advantages.reshape(*pairs.shape, -1)  # [256, 256, 2, S]
    chance = jnp.exp(scored.rollout.old_logprobs.sum(axis=1))
    first = jnp.einsum("ijt,j->it", advantages[:, :, 0], chance)
    second = jnp.einsum("jit,j->it", advantages[:, :, 1], chance)
    single, _ = grpo.group_experience(
        scored, kl_coef=BETA, group_size=1, baseline=None, normalise=None
    )
    return dataclasses.replace(single, advantages=0.5 * (first + second))


def take(scored: Scored, rows: Array) -> Scored:
    """These rows of every array."""
    stats = scored.kl_stats
    bare = dataclasses.replace(scored, kl_stats={})
    picked = jax.tree.map(lambda leaf: leaf[rows], bare)
    return dataclasses.replace(picked, kl_stats=stats)


def _found(claim: Claim, case: Case, scored: Scored) -> Params:
    algorithm = grpo.GRPO(
        **vars(claim.recipe),
        model=case.model,
        policy_optimizer=certified_gradients.OPTIMIZER,
        max_new_tokens=enumerable.LENGTH,
        stop_ids=(),
    )
    one = jnp.ones((), jnp.float32)

    @jax.jit
    def gradient(params: Params, scored: Scored) -> Params:
        seen = mean_advantages(claim, scored)
        chance = jnp.exp(scored.rollout.old_logprobs.sum(axis=1))

        def of_row(params: Params, row: PolicyExperience) -> Array:
            return policy_terms(
                params,
                experience=jax.tree.map(lambda leaf: leaf[None], row),
                kl_coef=BETA,
                num_tokens=one,  # so that losses are sums over the response
                num_responses=one,
                algorithm=algorithm,
            ).loss

        def mean(params: Params) -> Array:
            return chance @ jax.vmap(of_row, in_axes=(None, 0))(params, seen)

        return jax.grad(mean)(params)

    return gradient(case.policy, scored)


def flat(gradient: Params) -> Float64:
    leaves = [
        np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradient)
    ]
    return np.concatenate(leaves)
