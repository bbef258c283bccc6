"""Corrections on samples of an older policy, through the experience and loss of a run.

    measured  probability-weighted sum, over every minibatch of two responses of the
              sampler, of the loss's gradient at the policy; log-probs are recomputed
              and advantages corrected as in `make_experience`
    target    autodiff of the claim's objective
    goal      autodiff of E[r] of the current policy

The policy starts as the sampler and takes steps along the exact ∇E[r], so all claims
are measured at the same policies, 0, 1, 2 and 4 updates after sampling.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from worlds import enumerable
from worlds.enumerable import Float64

from certificates.cases import OPTIMIZER, Case, flat
from certificates.corrections.claims import CLAIMS, TOP, Claim, Known, expected_reward
from certificates.measured import groups
from certificates.measured.ratios import BETA, LEAST_BIAS, STALE, STEP, outside
from certificates.penalty_claims import TOLERANCE
from rlhf_jax import frozen, grpo, masked, policy
from rlhf_jax.algorithms.batch import PolicyExperience, Rollout
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.flow.rollout import recompute_logprobs
from rlhf_jax.algorithms.policy_gradient.corrections import corrected
from rlhf_jax.algorithms.policy_gradient.loss import policy_terms
from rlhf_jax.models.generation.sampling import TopK

Array = jax.Array
Params = Any
CUT = "policy/sampler_weight_capped"
COLUMNS = slice(enumerable.PROMPT, None)


class Stale(NamedTuple):
    """A gradient, some updates after its samples were drawn."""

    updates: int
    error: float  # max|measured - target| / max|goal|
    cosine: float  # of measured and goal
    outside: float  # share of the norm of measured that is orthogonal to goal


class Finding(NamedTuple):
    """The measurements of a claim."""

    claim: Claim
    stale: tuple[Stale, ...]  # after the updates of `STALE`
    # With rewards that make the last policy π* of E[r] - β·KL, the KL in the reward:
    # largest entry of the gradient, relative to the largest without the KL.
    at_optimum: float
    cut: float  # share of all tokens beyond a bound after the last update

    @property
    def holds(self) -> bool:
        """Whether the gradient is the target's and any claimed bias is detected."""
        small = all(stale.error <= TOLERANCE for stale in self.stale)
        small &= self.at_optimum <= TOLERANCE
        small &= (self.cut > 0) == self.claim.bounded
        return small and (self.stale[-1].outside > LEAST_BIAS) == bool(self.claim.bias)


def certify(
    case: Case, rewards: Float64, *, claims: Iterable[Claim] = CLAIMS
) -> Iterator[Finding]:
    """Certifies every claim for one sampler and rewards f64[N]."""
    known = know(case, jnp.asarray(rewards, jnp.float32))
    policies = trajectory(case, known)
    for claim in claims:
        yield _finding(claim, case, known, policies)


def know(case: Case, rewards: Array) -> Known:
    """Computes what the objectives read from the enumerated responses alone."""
    tokens = np.asarray(enumerable.every_tokens(case.stop_ids))[:, COLUMNS]
    mask = np.asarray(enumerable.every_mask(case.stop_ids))[:, COLUMNS]
    logprobs = np.asarray(_logprobs(case.policy, case=case), np.float64)
    chance = np.exp(np.where(mask, logprobs, 0).sum(axis=1))
    met, earned, same, ahead = (np.ones(mask.shape) for _ in range(4))
    top, beside = np.ones(mask.shape, bool), np.zeros((mask.size, *mask.shape))
    for row, column in np.argwhere(mask):
        before = (tokens[:, :column] == tokens[row, :column]).all(axis=1)
        before &= mask[:, column]
        alike = before & (tokens[:, column] == tokens[row, column])
        met[row, column] = chance[before].sum()
        earned[row, column] = chance[alike] @ np.asarray(rewards)[alike]
        earned[row, column] /= chance[alike].sum()
        same[row, column] = alike.sum()
        ahead[row, column] = chance[before] @ np.asarray(rewards)[before]
        ahead[row, column] /= chance[before].sum()
        at = {
            int(tokens[i, column]): logprobs[i, column] for i in np.flatnonzero(before)
        }
        likeliest = sorted(at, key=at.__getitem__)[-TOP:]
        top[row, column] = tokens[row, column] in likeliest
        beside[row * mask.shape[1] + column, before, column] = 1
    ref_logprobs = _logprobs(frozen.read(case.reference), case=case)
    return Known(
        jnp.asarray(logprobs, jnp.float32),
        jnp.asarray(mask),
        rewards,
        ref_logprobs,
        *(jnp.asarray(array, jnp.float32) for array in (met, earned, same, ahead)),
        top=jnp.asarray(top),
        beside=jnp.asarray((beside / same).reshape(mask.size, -1), jnp.float32),
    )


def trajectory(case: Case, known: Known) -> dict[int, Params]:
    """{number of updates: parameters}; after 0 they are the sampler's."""
    start, unravel = ravel_pytree(case.policy)
    policies, learning_rate = {}, 0.0
    for updates in range(max(STALE) + 1):
        policies[updates] = unravel(start)
        up, _ = ravel_pytree(_climb(expected_reward, policies[updates], case, known))
        if updates == 0:
            learning_rate = STEP / float(jnp.linalg.norm(up))
        start = start + learning_rate * up
    return policies


def _finding(
    claim: Claim, case: Case, known: Known, policies: dict[int, Params]
) -> Finding:
    measure = finder(claim, case=case)
    of_kl = claim.recipe.penalty.in_loss
    beta = 1.0 if of_kl else 0.0
    scores = jnp.zeros_like(known.rewards) if of_kl else known.rewards
    stale, cut = [], 0.0
    for updates in STALE:
        params = policies[updates]
        measured, cut = measure(params, scores=scores, beta=beta)
        target, goal = (
            flat(_climb(objective, params, case, known))
            for objective in (claim.objective, claim.goal)
        )
        stale.append(
            Stale(
                updates,
                float(np.abs(measured - target).max() / np.abs(goal).max()),
                float(measured @ goal / np.sqrt(measured @ measured * (goal @ goal))),
                outside(measured, goal),
            )
        )
    at_optimum = 0.0
    if claim.recipe.penalty.in_reward:
        last = policies[max(STALE)]
        x = _logprobs(last, case=case) - known.ref_logprobs
        best = BETA * jnp.sum(x, axis=1, where=known.mask)
        still, _ = measure(last, scores=best, beta=BETA)
        moving, _ = measure(last, scores=best, beta=0.0)
        at_optimum = float(np.abs(still).max() / np.abs(moving).max())
    return Finding(claim, tuple(stale), at_optimum, cut)


def finder(claim: Claim, *, case: Case) -> Callable[..., tuple[Float64, float]]:
    """Returns `find(params, ...)`, the expected ascent direction of a corrected loss.

    The direction is multiplied by the 4 tokens that aggregation "constant" divides by.
    """
    algorithm = grpo.GRPO(
        **vars(claim.recipe),
        model=case.model,
        policy_optimizer=OPTIMIZER,
        max_new_tokens=enumerable.LENGTH,
        stop_ids=case.stop_ids,
    )
    shape = {"model": case.model, "temperature": 1.0}

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def gradients(
        params: Params, sampler: Params, scores: Array, beta: Array
    ) -> tuple[Params, Array]:
        drawn = enumerable.every_response(sampler, stop_ids=case.stop_ids, **shape)
        rollout = drawn
        if algorithm.recorded_top_k is not None:
            rollout = _recorded(
                drawn, sampler, count=algorithm.recorded_top_k, case=case
            )
        if algorithm.recomputes_logprobs:
            rollout = recompute_logprobs(
                rollout, params, max_new_tokens=enumerable.LENGTH, **shape
            )
        scored = score.score(
            rollout,
            scores=scores,
            reference=case.reference,
            max_new_tokens=enumerable.LENGTH,
            penalty=algorithm.penalty,
            **shape,
        )
        chance = jnp.exp(drawn.old_logprobs.sum(axis=1))
        alone = jnp.arange(len(chance))

        def beside(first: Array) -> tuple[Params, Array]:
            """The gradient over the minibatches (first, j), weighted by probability."""
            pairs = jnp.stack([jnp.full_like(alone, first), alone], axis=1)
            drawn = groups.take(scored, pairs.reshape(-1))
            experience, _ = algorithm.experience(drawn, kl_coef=beta)
            experience = dataclasses.replace(experience, top_k=drawn.rollout.top_k)
            stats: masked.Stats = {}
            if algorithm.recomputes_logprobs:
                experience, stats = corrected(
                    experience,
                    rollout=drawn.rollout,
                    step=jnp.int32(0),
                    recipe=algorithm,
                )
            minibatches = jax.tree.map(
                lambda leaf: leaf.reshape(*pairs.shape, *leaf.shape[1:]), experience
            )

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

            cut = masked.mean_stats(stats).get(CUT, jnp.zeros(()))
            return jax.grad(mean)(params), cut

        return jax.lax.map(beside, alone)

    def find(params: Params, *, scores: Array, beta: float) -> tuple[Float64, float]:
        parts, cut = gradients(params, case.policy, scores, jnp.float32(beta))
        total = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64).sum(0), parts)
        return -enumerable.LENGTH * flat(total), float(np.asarray(cut).mean())

    return find


def _recorded(rollout: Rollout, params: Params, *, count: int, case: Case) -> Rollout:
    """The rollout with its sampler's likeliest tokens, as a decoder records them."""
    texts = {"tokens": rollout.tokens, "mask": rollout.mask}
    logits = policy.logits(params, model=case.model, **texts)
    likely = jnp.pad(jax.nn.log_softmax(logits[:, :-1]), ((0, 0), (1, 0), (0, 0)))
    values, words = jax.lax.top_k(likely, count)
    return dataclasses.replace(rollout, top_k=TopK(words, values))


def _logprobs(params: Params, *, case: Case) -> Array:
    """f32[N, 4], nats; differentiable in `params`."""
    rollout = enumerable.every_response(params, temperature=1.0, **case.options)
    return rollout.old_logprobs[:, COLUMNS]


@functools.partial(jax.jit, static_argnames=("objective", "model", "stop_ids"))
def _gradient(
    params: Params, known: Known, *, objective: Any, model: Any, stop_ids: Any
) -> Params:
    case = Case(params, params, params, None, model, stop_ids)  # type: ignore[arg-type]
    return jax.grad(lambda params: objective(_logprobs(params, case=case), known))(
        params
    )


def _climb(objective: Any, params: Params, case: Case, known: Known) -> Params:
    return _gradient(params, known, objective=objective, **case.options)
