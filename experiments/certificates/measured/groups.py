"""The expected gradient of policy gradients over groups, compared with its claim.

    measured  probability-weighted sum, over every minibatch of two responses, of the
              loss's gradient, through `group_experience` or `experience`, and
              `policy_terms`
    expected  a·∇E[r] - β·∇KL, by autodiff of sums over all responses

The measured gradient is multiplied by 4, the tokens of the longest response, because
aggregation "constant" divides by it, as the means do if every response has 4 tokens.
With a stop token the means have other divisors and are claimed to be biased; the share
of ∇E[r] at each column is measured too. The depth of a column is the number of response
tokens before it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from worlds import enumerable
from worlds.enumerable import Float64

from certificates.cases import OPTIMIZER, Case, flat
from certificates.group_claims import CLAIMS, Claim, Recipe
from certificates.measured import expected_gradients
from certificates.penalty_claims import TOLERANCE
from rlhf_jax import frozen, grpo
from rlhf_jax.algorithms.batch import PolicyExperience, Scored
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.policy_gradient.loss import policy_terms
from rlhf_jax.algorithms.policy_gradient.token_choice import choose
from rlhf_jax.algorithms.ppo import gae_experience
from rlhf_jax.algorithms.reinforce import REINFORCE, ReinforceRecipe
from rlhf_jax.functional.kl.gradients import FULL_REVERSE

Array = jax.Array
Params = Any

BETA = 0.3  # reward units per nat
COLUMNS = range(enumerable.PROMPT, enumerable.PROMPT + enumerable.LENGTH)


ALGORITHMS = {grpo.GroupRecipe: grpo.GRPO, ReinforceRecipe: REINFORCE}


class Finding(NamedTuple):
    """The measurements of a claim."""

    claim: Claim
    stops: bool  # whether a token ends responses, so that they differ in length
    error: float  # max|measured - expected| / max|∇E[r]|
    cosine: float  # of measured and ∇(E[r] - β·KL)
    # Measured share of ∇E[r] at each column, with β = 0; () if lengths are equal.
    depths: tuple[float, ...]

    @property
    def lengths(self) -> str:
        """Lengths of the responses, tokens."""
        return "1 to 4" if self.stops else "4"

    @property
    def holds(self) -> bool:
        """Whether the error is small or, for a claimed bias, large."""
        if self.claim.share is None:
            return self.error > 1e-2
        return self.error <= TOLERANCE


def certify(
    case: Case, rewards: Float64, *, claims: Iterable[Claim] = CLAIMS
) -> Iterator[Finding]:
    """Certifies every claim for one policy, reference and rewards f64[N]."""
    reference = frozen.read(case.reference)
    table = jnp.asarray(rewards, jnp.float32)
    kls = expected_gradients.of_penalties(
        case.policy, reference, temperature=1.0, **case.options
    )
    of_kl = flat(kls[FULL_REVERSE, "token"])

    @jax.jit
    def expected_reward(params: Params) -> Array:
        log_policy = enumerable.log_probabilities(
            params, temperature=1.0, **case.options
        )
        return jnp.exp(log_policy) @ table

    of_reward = flat(jax.grad(expected_reward)(case.policy))
    columns = COLUMNS if case.stop_ids else ()
    of_columns = {column: _of_column(case, table, column) for column in columns}
    goal = of_reward - BETA * of_kl
    scored = jax.jit(functools.partial(scored_table, case))(table)
    for claim in claims:
        measure = finder(claim.recipe, case=case, scored=scored, critic=claim.critic)
        measured = measure(beta=BETA, columns=COLUMNS)
        in_loss = np.zeros_like(measured)
        if claim.in_loss is not None:
            in_loss = BETA * flat(kls[claim.in_loss, claim.recipe.penalty.per])
        # A KL to go that is added to the advantage is not part of the reward.
        with_score = claim.recipe.penalty.in_reward and claim.in_loss is None
        by_reward = of_reward - BETA * of_kl * with_score
        share = claim.share
        if share is None:  # a bias: no scale of this direction fits
            share = (measured + in_loss) @ by_reward / (by_reward @ by_reward)
        expected = share * by_reward - in_loss
        error = np.abs(measured - expected).max() / np.abs(of_reward).max()
        cosine = measured @ goal / (np.linalg.norm(measured) * np.linalg.norm(goal))
        depths = tuple(
            float(measure(beta=0.0, columns=(column,)) @ true / (true @ true))
            for column, true in of_columns.items()
        )
        yield Finding(claim, bool(case.stop_ids), float(error), float(cosine), depths)


def _of_column(case: Case, table: Array, column: int) -> Float64:
    """The part of ∇E[r] from the tokens of one column: Σ_y π(y)·r(y)·∇log π(y_t)."""

    @jax.jit
    def surrogate(params: Params) -> Array:
        logprobs = enumerable.every_response(
            params, temperature=1.0, **case.options
        ).old_logprobs
        fixed = jax.lax.stop_gradient(jnp.exp(logprobs.sum(axis=1)))
        return (fixed * table) @ logprobs[:, column]

    return flat(jax.grad(surrogate)(case.policy))


def scored_table(case: Case, table: Array) -> Scored:
    """Every response once, scored, with k1 of each token."""
    rollout = enumerable.every_response(case.policy, temperature=1.0, **case.options)
    return score.score(
        rollout,
        scores=table,
        reference=case.reference,
        model=case.model,
        values=score.response_values(
            case.critic,
            rollout=rollout,
            model=case.model,
            max_new_tokens=enumerable.LENGTH,
            after_stop=False,
        ),
        max_new_tokens=enumerable.LENGTH,
        temperature=1.0,
    )


def finder(
    recipe: Recipe, *, case: Case, scored: Scored, critic: bool = False
) -> Callable[..., Float64]:
    """Returns `find(beta=, ...)`, the expected ascent direction of a loss.

    Args:
      recipe: the recipe whose experience and loss are measured.
      case: its policy is the sampler, and the default of the `params` that learn.
      scored: every response once, from `scored_table`; `find` may replace its scores.
      critic: use PPO's experience instead of the recipe's.
    """
    if not recipe.penalty.in_reward:
        scored = dataclasses.replace(scored, kl=None)
    algorithm = ALGORITHMS[type(recipe)](
        **vars(recipe),
        model=case.model,
        policy_optimizer=OPTIMIZER,
        max_new_tokens=enumerable.LENGTH,
        stop_ids=case.stop_ids,
    )
    chance = jnp.exp(scored.rollout.old_logprobs.sum(axis=1))
    alone = jnp.arange(len(chance))

    def learned(pair: Scored, beta: Array) -> PolicyExperience:
        if critic:
            return gae_experience(
                pair,
                kl_coef=beta,
                gamma=1.0,
                lam=1.0,
                whiten_advantages=None,
            )
        return algorithm.experience(pair, kl_coef=beta)[0]

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def gradients(params: Params, beta: Array, within: Array, scores: Array) -> Params:
        rescored = dataclasses.replace(scored, scores=scores)

        def of_pair(rows: Array) -> PolicyExperience:
            """The experience of one minibatch, as if it were the whole rollout."""
            pair = take(rescored, rows)
            experience = learned(pair, beta)
            if algorithm.token_choice is not None:
                experience, _ = choose(
                    experience,
                    rollout=pair.rollout,
                    key=jax.random.key(0),  # Clip-Cov of share 1 draws all
                    choice=algorithm.token_choice,
                )
            advantages = jnp.where(within[None, :], experience.advantages, 0.0)
            return dataclasses.replace(experience, advantages=advantages)

        def beside(first: Array) -> Params:
            """The gradient over the minibatches (first, j), weighted by probability."""
            pairs = jnp.stack([jnp.full_like(alone, first), alone], axis=1)
            minibatches = jax.vmap(of_pair)(pairs)

            def loss(params: Params, minibatch: PolicyExperience) -> Array:
                mask = minibatch.response_mask
                return policy_terms(
                    params,
                    experience=minibatch,
                    kl_coef=beta,
                    num_tokens=mask.sum(dtype=jnp.float32),
                    num_responses=mask.any(axis=1).sum(dtype=jnp.float32),
                    recipe=algorithm,
                ).loss

            def mean(params: Params) -> Array:
                losses = jax.vmap(loss, in_axes=(None, 0))(params, minibatches)
                return chance[first] * (chance @ losses)

            return jax.grad(mean)(params)

        return jax.lax.map(beside, alone)

    def find(
        *,
        beta: float,
        columns: Iterable[int] = COLUMNS,
        params: Params = case.policy,
        scores: Array = scored.scores,
    ) -> Float64:
        within = np.isin(np.arange(scored.rollout.tokens.shape[1]), list(columns))
        parts = gradients(params, jnp.float32(beta), jnp.asarray(within), scores)
        total = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64).sum(0), parts)
        return -enumerable.LENGTH * flat(total)

    return find


def take(scored: Scored, rows: Array) -> Scored:
    """Selects rows of every array."""
    stats = scored.kl_stats
    bare = dataclasses.replace(scored, kl_stats={})
    picked = jax.tree.map(lambda leaf: leaf[rows], bare)
    return dataclasses.replace(picked, kl_stats=stats)
