"""Policy gradients over episodes of two turns, compared with the gradient of J.

    measured  probability-weighted sum, over every minibatch, of the gradient of its
              loss, through `score` and the algorithm's `experience` and
              `minibatch_loss`
    expected  ∇J, or share·∇E[r] - β·∇KL, by autodiff of a sum over all episodes; with
              γ < 1 the gradient of rewards to go, discounted per sampled token

A minibatch is one episode or a group of two. Losses are sums over the sampled tokens of
an episode (aggregation "constant" with a divisor of 1). The critic's values are noise.
With γ = 1 the expectation does not change if a reward comes after its turn, so only the
claim with γ < 1 checks where rewards are placed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from worlds import conversations, enumerable
from worlds.conversations import Episodes

from certificates.cases import OPTIMIZER, flat
from certificates.measured.turn_claims import BETA, CLAIMS, TEMPERATURE, Claim, Recipe
from certificates.penalty_claims import TOLERANCE
from rlhf_jax import critic, frozen, grpo, ppo
from rlhf_jax.algorithms.batch import PolicyExperience, Scored
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.reinforce import REINFORCE
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference.frozen import Frozen, FrozenModels

Array = jax.Array
Params = Any
LEAST_ERROR = 1e-2  # smallest error that shows a claimed bias


class Finding(NamedTuple):
    """The measurement of a claim."""

    claim: Claim
    error: float  # max|measured - expected| / max|∇J|

    @property
    def holds(self) -> bool:
        """Whether the error is small or, for a claimed bias, large."""
        if self.claim.share is None:
            return self.error > LEAST_ERROR
        return self.error <= TOLERANCE


class Case(NamedTuple):
    """A policy, a reference and a critic in the world of `conversations`."""

    policy: Params
    critic: Params  # its values are noise
    reference: Frozen
    model: ModelConfig
    episodes: Episodes
    totals: Array  # f32[N], reward units
    of_turns: Array  # f32[N, S], reward units, the part of the totals given at turns


def draw(seed: int, *, hidden_size: int = 16) -> Case:
    """Draws random decoders, observation probabilities and rewards."""
    model = conversations.model(hidden_size=hidden_size)
    keys = jax.random.split(jax.random.key(seed), 4)
    init = jax.jit(functools.partial(enumerable.init, model=model))
    now, trunk, start = (init(key) for key in keys[:3])
    values = critic.from_policy(trunk, model=model)
    kernel = jax.random.normal(keys[3], values["score"]["kernel"].shape)
    values["score"] = values["score"] | {"kernel": kernel}
    episodes = conversations.every_episode(seed=seed)
    totals, of_turns = conversations.rewards(episodes, seed=seed)
    reference = frozen.freeze(start)
    return Case(now, values, reference, model, episodes, totals, of_turns)


def certify(case: Case, *, claims: Iterable[Claim] = CLAIMS) -> Iterator[Finding]:
    """Certifies every claim for one policy, reference, environment and rewards."""
    of_reward, of_objective = (expected(case, beta=beta) for beta in (0.0, BETA))
    of_penalty = of_reward - of_objective
    for claim in claims:
        ascent = measured(case, claim)
        share = 1.0 if claim.share is None else claim.share
        of_kl = share if claim.recipe.penalty.placement == "reward" else 1.0
        if isinstance(claim.recipe, ppo.Recipe) and claim.recipe.gamma < 1:
            named = expected_to_go(case, gamma=claim.recipe.gamma)
        else:
            named = share * of_reward - of_kl * of_penalty
        error = np.abs(ascent - named).max() / np.abs(of_objective).max()
        yield Finding(claim, float(error))


def expected(case: Case, *, beta: float) -> enumerable.Float64:
    """∇J at one β, from logits alone."""
    gradient = jax.jit(
        jax.grad(conversations.objective),
        static_argnames=("beta", "model", "temperature"),
    )(
        case.policy,
        frozen.read(case.reference),
        case.episodes,
        totals=case.totals,
        beta=beta,
        model=case.model,
        temperature=TEMPERATURE,
    )
    return flat(gradient)


def expected_to_go(case: Case, *, gamma: float) -> enumerable.Float64:
    """E[Σ_t ∇log π(a_t)·(discounted rewards from t on)], from logits alone."""
    gradient = jax.jit(
        jax.grad(conversations.discounted),
        static_argnames=("beta", "gamma", "model", "temperature"),
    )(
        case.policy,
        frozen.read(case.reference),
        case.episodes,
        totals=case.totals,
        of_turns=case.of_turns,
        beta=BETA,
        gamma=gamma,
        model=case.model,
        temperature=TEMPERATURE,
    )
    return flat(gradient)


def chance_of_all(case: Case) -> float:
    """The sum of the probabilities of all episodes."""
    rollout = conversations.rollout(
        case.policy, case.episodes, model=case.model, temperature=TEMPERATURE
    )
    own = np.asarray(rollout.old_logprobs, np.float64).sum(axis=1)
    return float(np.asarray(case.episodes.chance, np.float64) @ np.exp(own))


def algorithm_of(recipe: Recipe, *, case: Case) -> PolicyGradient:
    """The algorithm of a recipe in this world."""
    shape: dict[str, Any] = {
        **vars(recipe),
        "model": case.model,
        "policy_optimizer": OPTIMIZER,
        "max_new_tokens": conversations.LENGTH,
        "stop_ids": (conversations.STOP,),
    }
    if isinstance(recipe, ppo.Recipe):
        return ppo.PPO(**shape, critic_model=case.model, critic_optimizer=OPTIMIZER)
    if isinstance(recipe, grpo.GroupRecipe):
        return grpo.GRPO(**shape)
    return REINFORCE(**shape)


def scored_of(case: Case, claim: Claim) -> Scored:
    """Every episode once, scored as in `make_experience`."""
    recipe, episodes = claim.recipe, case.episodes
    if claim.observed:
        began = jnp.cumsum(episodes.response_mask, axis=1) > 0
        episodes = episodes._replace(response_mask=episodes.mask & began)
    rollout = conversations.rollout(
        case.policy, episodes, model=case.model, temperature=TEMPERATURE
    )
    values = None
    if isinstance(recipe, ppo.Recipe):
        values = score.response_values(
            case.critic,
            rollout=rollout,
            model=case.model,
            max_new_tokens=conversations.LENGTH,
            after_stop=recipe.value_after_stop,
        )
    return score.score(
        rollout,
        scores=case.totals,
        turn_rewards=case.of_turns if claim.turns else None,
        reference=case.reference,
        model=case.model,
        values=values,
        max_new_tokens=conversations.LENGTH,
        temperature=TEMPERATURE,
        penalty=recipe.penalty,
        policy=case.policy,
    )


def measured(case: Case, claim: Claim) -> enumerable.Float64:
    """The expected ascent direction of a run's loss, one number per parameter."""
    algorithm = algorithm_of(claim.recipe, case=case)
    group = algorithm.rows_per_prompt
    rows = jnp.arange(len(case.totals))

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def gradients(params: Params) -> Params:
        scored = scored_of(case, claim)
        sampled = jnp.where(case.episodes.response_mask, scored.rollout.old_logprobs, 0)
        chance = case.episodes.chance * jnp.exp(sampled.sum(axis=1))

        def of_minibatches(members: Array) -> Params:
            """The gradient over [M, G] episodes, weighted by probability."""
            bare = dataclasses.replace(scored, kl_stats={})
            chosen = jax.tree.map(lambda leaf: leaf[members.reshape(-1)], bare)
            made, _ = algorithm.experience(chosen, kl_coef=jnp.float32(BETA))
            minibatches = jax.tree.map(
                lambda leaf: leaf.reshape(*members.shape, *leaf.shape[1:]), made
            )

            def loss(params: Params, minibatch: PolicyExperience) -> Array:
                minibatch, of_part = algorithm.minibatch_loss(
                    minibatch,
                    kl_coef=jnp.float32(BETA),
                    frozen=FrozenModels(reference=case.reference),
                )
                return of_part((params, case.critic), minibatch)[0]

            def mean(params: Params) -> Array:
                losses = jax.vmap(loss, in_axes=(None, 0))(params, minibatches)
                return chance[members].prod(axis=1) @ losses

            return jax.grad(mean)(params)

        if group == 1:
            return jax.tree.map(lambda leaf: leaf[None], of_minibatches(rows[:, None]))
        return jax.lax.map(
            lambda first: of_minibatches(
                jnp.stack([jnp.full_like(rows, first), rows], axis=1)
            ),
            rows,
        )

    parts = gradients(case.policy)
    return -flat(jax.tree.map(lambda leaf: np.asarray(leaf, np.float64).sum(0), parts))
