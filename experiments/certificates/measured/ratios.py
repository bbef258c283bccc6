"""Ratios and surrogates, on the sampler's policy and after further updates.

    measured  probability-weighted sum, over every minibatch of two responses of the
              sampler, of the loss's gradient at the policy, by `groups.finder` and so
              by the experience and loss of a run
    named     autodiff of the paper's formula, summed over the same pairs
    true      ∇E[r] of the current policy

The policy starts as the sampler and ascends its own measured gradient while the samples
stay the sampler's, so after k steps they are k updates old.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from worlds import enumerable
from worlds.enumerable import Float64

from certificates.cases import Case, flat
from certificates.measured import groups
from certificates.penalty_claims import TOLERANCE
from certificates.ratio_claims import CLAIMS, ENDED, WEIGHTS, Batch, Claim, two_rewards
from rlhf_jax import grpo
from rlhf_jax.algorithms.batch import Scored
from rlhf_jax.algorithms.policy_gradient.gradient_penalty import penalised
from rlhf_jax.algorithms.policy_gradient.options import DAR, GradientPenalty
from rlhf_jax.functional.kl.penalty import Penalty

Array = jax.Array
Params = Any

STALE = (0, 1, 2, 4)  # updates since the samples were drawn
STEP = 0.05  # norm of the first step, which sets each method's learning rate
LEAST_BIAS = 1e-3  # smallest `outside` that shows a claimed bias
BETA = 0.3
REGRESSION = grpo.GroupRecipe(
    surrogate=DAR(beta=1.5, share=0.3, cap=1e30),
    penalty=Penalty(placement=None),
    baseline="leave_one_out",
    aggregation="constant",
    temperature=1.0,
    group_size=2,
)
DIFFERENCE = 5e-4  # step of the gradient penalty's finite difference
SLACK = 0.02  # its tolerance, relative to the largest entry


class Stale(NamedTuple):
    """A gradient, some updates after its samples were drawn."""

    updates: int
    error: float  # max|measured - named| / max|true|
    cosine: float  # of measured and true
    outside: float  # share of the norm of measured that is orthogonal to true
    ratio: float  # largest probability ratio of a token, or its inverse


class Finding(NamedTuple):
    """The measurements of a claim."""

    claim: Claim
    stale: tuple[Stale, ...]  # after the updates of `STALE`
    # With rewards that make the policy π* of E[r] - β·KL, the KL in the reward: largest
    # entry of the gradient, relative to the largest without the KL. NaN with a std,
    # where it would be rounding over rounding, and if `Claim.optimum` is False.
    at_optimum: float
    on_policy: (
        float  # error against share·target, as `Stale.error`; if biased, `outside`
    )

    @property
    def holds(self) -> bool:
        """Whether the gradient is as claimed, on-policy and after further updates."""
        small = all(stale.error <= TOLERANCE for stale in self.stale)
        small &= math.isnan(self.at_optimum) or self.at_optimum <= TOLERANCE
        if self.claim.share is None:
            return small and self.on_policy > LEAST_BIAS
        return small and self.on_policy <= TOLERANCE


def certify(
    case: Case, rewards: Float64, *, claims: Iterable[Claim] = CLAIMS
) -> Iterator[Finding]:
    """Certifies every claim for one sampler and rewards f64[N], some above 0."""
    assert case.stop_ids, "where no token ends a response little of this differs"
    tables = {
        True: jnp.asarray(rewards > 0, jnp.float32),
        False: jnp.asarray(rewards, jnp.float32),
    }
    for claim in claims:
        yield _finding(claim, case, tables[claim.binary])


def _finding(claim: Claim, case: Case, table: Array) -> Finding:
    scored = jax.jit(functools.partial(groups.scored_table, case))(table)
    if claim.recipe.normalise == "each":
        both = {"rewards": two_rewards(table), "weights": WEIGHTS}
        scored = dataclasses.replace(scored, **both)
    measure = groups.finder(claim.recipe, case=case, scored=scored)
    old_logprobs = scored.rollout.old_logprobs
    ended = _ended(case)
    params, stale, on_policy, learning_rate = case.policy, [], math.nan, math.nan
    for updates in range(max(STALE) + 1):
        measured = measure(beta=0.0, params=params)
        true = flat(_true(params, table=table, case=case))
        largest = np.abs(true).max()
        if updates in STALE:
            named = flat(_named(params, scored, table, ended, claim=claim, case=case))
            stale.append(
                Stale(
                    updates,
                    float(np.abs(measured - named).max() / largest),
                    float(
                        measured @ true / np.sqrt(measured @ measured * (true @ true))
                    ),
                    outside(measured, true),
                    float(_largest_ratio(params, old_logprobs, case=case)),
                )
            )
        if updates == 0:
            learning_rate = STEP / float(np.linalg.norm(measured))
            target, share = true, claim.share
            if claim.target == ENDED:
                chance, target = _ending(params, table, ended, case=case)
                target = flat(target)
                share = float(chance) ** 2
            on_policy = stale[0].outside
            if share is not None:
                on_policy = float(np.abs(measured - share * target).max() / largest)
        params = _moved(params, learning_rate * measured)
    at_optimum = math.nan
    if claim.recipe.normalise is None and claim.optimum:
        ref_logprobs = scored.ref_logprobs
        assert ref_logprobs is not None
        best = BETA * (old_logprobs - ref_logprobs).sum(axis=1)
        still = measure(beta=BETA, scores=best)
        moving = measure(beta=0.0, scores=best)
        at_optimum = float(np.abs(still).max() / np.abs(moving).max())
    return Finding(claim, tuple(stale), at_optimum, on_policy)


def outside(measured: Float64, true: Float64) -> float:
    """Share of the norm of `measured` that is orthogonal to `true`."""
    along = (measured @ true) / (true @ true) * true
    return float(np.linalg.norm(measured - along) / np.linalg.norm(measured))


def bias_of_mixed_groups(case: Case, rewards: Float64) -> float:
    """The bias of dynamic sampling on a KL in the loss.

    Returns:
      `outside` of the KL's part of the gradient over mixed groups, relative to its part
      over all groups.
    """
    table = jnp.asarray(rewards > 0, jnp.float32)
    scored = jax.jit(functools.partial(groups.scored_table, case))(table)
    parts = {}
    for equal in ("keep", "leave_out"):
        recipe = grpo.GroupRecipe(
            penalty=Penalty("k2", placement="loss"),
            aggregation="constant",
            temperature=1.0,
            group_size=2,
            equal_groups=equal,
        )
        measure = groups.finder(recipe, case=case, scored=scored)
        parts[equal] = measure(beta=BETA) - measure(beta=0.0)
    return outside(parts["leave_out"], parts["keep"])


def of_gradient_penalty(case: Case, rewards: Float64) -> tuple[float, float]:
    """Checks the term that gradient regularisation adds to the mean gradient.

    Returns:
      The largest error of the added term, over γ, against ½∇‖∇V‖², relative to its
      largest entry; V is the mean surrogate (RLOO, no clip) by its formula. And
      `outside` of ½∇‖∇V‖² relative to ½∇‖∇E[r]‖²: on the sampler's policy V has the
      gradient of E[r], but other second derivatives.
    """
    table = jnp.asarray(rewards, jnp.float32)
    scored = jax.jit(functools.partial(groups.scored_table, case))(table)
    claim = CLAIMS[0]
    measure = groups.finder(claim.recipe, case=case, scored=scored)

    nowhere = jax.tree.map(jnp.zeros_like, case.policy)

    def gradient(params: Params) -> Params:
        return _moved(nowhere, -measure(beta=0.0, params=params))

    chosen = GradientPenalty(strength=1.0, step=DIFFERENCE, max_norm=None)
    first = gradient(case.policy)
    output = penalised(gradient, case.policy, first, penalty=chosen)
    added = flat(output) - flat(first)

    def half_square(value: Any) -> Float64:
        @jax.jit
        def of(params: Params) -> Array:
            slope = jax.grad(value)(params)
            return 0.5 * optax.tree.norm(slope, squared=True)

        return flat(jax.grad(of)(case.policy))

    def expected_reward(params: Params) -> Array:
        log_policy = enumerable.log_probabilities(
            params, temperature=1.0, **case.options
        )
        return jnp.exp(log_policy) @ table

    named = half_square(_surrogate(_drawn(scored), table, _ended(case), claim, case))
    error = float(np.abs(added - named).max() / np.abs(named).max())
    return error, outside(named, half_square(expected_reward))


def of_regression(case: Case, rewards: Float64) -> tuple[float, float]:
    """Checks the direction and the fixed point of DAR, with weights without a cap.

    Returns:
      The largest error of the gradient against a multiple of that of
      Σ_y π'(y)·log π(y), π' ∝ π_ref^α·π^(1 - α)·exp(r/β), and the largest entry of the
      gradient at π ∝ π_ref·exp(r/(αβ)); both relative to its largest entry.
    """
    table = jnp.asarray(rewards, jnp.float32)
    scored = jax.jit(functools.partial(groups.scored_table, case))(table)
    measure = groups.finder(REGRESSION, case=case, scored=scored)
    chosen = REGRESSION.surrogate
    assert isinstance(chosen, DAR)
    old, ref = (logprobs.sum(axis=1) for logprobs in _drawn(scored))

    @jax.jit
    def likelihood(params: Params) -> Array:
        tilted = chosen.share * ref + (1 - chosen.share) * old + table / chosen.beta
        log_policy = enumerable.log_probabilities(
            params, temperature=1.0, **case.options
        )
        return jax.nn.softmax(tilted) @ log_policy

    measured = measure(beta=0.0)
    named = flat(jax.grad(likelihood)(case.policy))
    scale = (measured @ named) / (named @ named)
    error = float(np.abs(measured - scale * named).max() / np.abs(measured).max())
    still = measure(beta=0.0, scores=chosen.share * chosen.beta * (old - ref))
    return error, float(np.abs(still).max() / np.abs(measured).max())


def _moved(params: Params, step: Float64) -> Params:
    """Adds a flat step to the parameters."""
    leaves, structure = jax.tree.flatten(params)
    ends = np.cumsum([leaf.size for leaf in leaves])[:-1]
    steps = np.split(step, ends)
    return jax.tree.unflatten(
        structure,
        [
            leaf + jnp.asarray(part.reshape(leaf.shape), leaf.dtype)
            for leaf, part in zip(leaves, steps, strict=True)
        ],
    )


def _ended(case: Case) -> Array:
    """bool[N]: whether the response contains the stop token."""
    tokens = enumerable.every_tokens(case.stop_ids)[:, enumerable.PROMPT :]
    return (tokens == case.stop_ids[0]).any(axis=1)


def _logprobs(params: Params, case: Case) -> Array:
    """f32[N, 4], nats; differentiable in `params`."""
    rollout = enumerable.every_response(params, temperature=1.0, **case.options)
    return rollout.old_logprobs[:, enumerable.PROMPT :]


@functools.partial(jax.jit, static_argnames=("claim", "model", "stop_ids"))
def _named_gradient(
    params: Params,
    drawn: tuple[Array, Array],
    table: Array,
    ended: Array,
    *,
    claim,
    model,
    stop_ids,
) -> Params:
    case = Case(params, params, params, None, model, stop_ids)  # type: ignore[arg-type]
    return jax.grad(_surrogate(drawn, table, ended, claim, case))(params)


def _surrogate(
    drawn: tuple[Array, Array], table: Array, ended: Array, claim: Claim, case: Case
) -> Callable[[Params], Array]:
    """The mean over all pairs of a claim's surrogate, by its formula."""
    old_logprobs, ref_logprobs = drawn
    old = old_logprobs[:, enumerable.PROMPT :]
    mask = enumerable.every_mask(case.stop_ids)[:, enumerable.PROMPT :]
    lengths = mask.sum(axis=1, dtype=jnp.float32)
    chance = jnp.exp(old.sum(axis=1))
    advantage = claim.advantage(table, ended)
    tokens = enumerable.every_tokens(case.stop_ids)[:, enumerable.PROMPT :]
    weight = claim.weight(lengths, ended)

    def value(params: Params) -> Array:
        logprobs = _logprobs(params, case)
        x = jnp.where(mask, logprobs - old, 0.0)
        worth = claim.surrogate(
            x[:, None, :], logprobs[:, None, :], advantage[:, :, None], lengths
        )
        if claim.chosen is not None:
            batch = Batch(
                *(jnp.where(mask, old, 0.0), tokens, mask, advantage),
                jnp.where(mask, ref_logprobs[:, enumerable.PROMPT :], 0.0),
            )
            worth = claim.chosen(worth, x[:, None, :], batch)
        of_pairs = jnp.where(mask[:, None, :], worth, 0.0).sum(axis=2) * weight
        return chance @ of_pairs @ chance

    return value


def _named(
    params: Params,
    scored: Scored,
    table: Array,
    ended: Array,
    *,
    claim: Claim,
    case: Case,
) -> Params:
    return _named_gradient(
        params, _drawn(scored), table, ended, claim=claim, **case.options
    )


def _drawn(scored: Scored) -> tuple[Array, Array]:
    """Log-probs of the sampler and of the reference, f32[N, S], nats."""
    assert scored.ref_logprobs is not None
    return scored.rollout.old_logprobs, scored.ref_logprobs


@functools.partial(jax.jit, static_argnames=("model", "stop_ids"))
def _true_gradient(
    params: Params, table: Array, *, model: Any, stop_ids: Any
) -> Params:
    def value(params: Params) -> Array:
        log_policy = enumerable.log_probabilities(
            params, temperature=1.0, model=model, stop_ids=stop_ids
        )
        return jnp.exp(log_policy) @ table

    return jax.grad(value)(params)


def _true(params: Params, *, table: Array, case: Case) -> Params:
    return _true_gradient(params, table, **case.options)


def _ending(
    params: Params, table: Array, ended: Array, *, case: Case
) -> tuple[Array, Params]:
    """P(a response ends) and ∇E[r | it ends]."""

    @jax.jit
    def value(params: Params) -> tuple[Array, Array]:
        log_policy = enumerable.log_probabilities(
            params, temperature=1.0, **case.options
        )
        chance = jnp.where(ended, jnp.exp(log_policy), 0.0)
        return chance @ table / chance.sum(), chance.sum()

    gradient, chance = jax.grad(value, has_aux=True)(params)
    return chance, gradient


def _largest_ratio(params: Params, old_logprobs: Array, *, case: Case) -> Array:
    mask = enumerable.every_mask(case.stop_ids)[:, enumerable.PROMPT :]
    x = _logprobs(params, case) - old_logprobs[:, enumerable.PROMPT :]
    return jnp.exp(jnp.max(jnp.abs(x), where=mask, initial=0.0))
