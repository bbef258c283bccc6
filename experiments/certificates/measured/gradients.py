"""The expected gradient of each KL penalty, compared with its claim.

    measured  Σ_y π(y)·∇ppo_loss(y), over every response y of the world of `enumerable`
    expected  the gradient of a KL, by autodiff of a sum over the same responses

The measured gradient uses the code of a run: `score`, `experience` (lam = 1, no
whitening, score 0, β = 0.3) and `ppo_loss`, one row at a time, before any clipping.
Aggregation "constant" with a loss_scale_factor of 1 makes the loss a sum over a
response. The critic's values are noise, since a baseline must not matter. The expected
gradient uses logits alone (`expected_gradients`). The claims in `penalty_claims` hold
with and without a stop token.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from worlds import enumerable

from certificates.cases import OPTIMIZER, Case, flat
from certificates.measured import expected_gradients
from certificates.penalty_claims import KLS, ZERO, Claim, Finding
from rlhf_jax import frozen, ppo
from rlhf_jax.algorithms import flow
from rlhf_jax.algorithms.batch import Experience, Scored
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.ppo import gae_experience
from rlhf_jax.algorithms.ppo.loss import ppo_loss
from rlhf_jax.functional.kl.gradients import FULL_REVERSE
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.roles.reference.frozen import Frozen, FrozenModels, Further, References

Array = jax.Array
Params = Any
Flat = npt.NDArray[np.float64]

BETA = 0.3  # β of the penalty; neither 0 nor 1, so that a missing factor is detected


def certify(
    case: Case, claims: Iterable[Claim], *, temperature: float
) -> Iterator[Finding]:
    """Certifies every claim at one temperature, in order.

    Each claim is its own program; several are compiled at once.
    """
    reference = frozen.read(case.reference)
    known = expected_gradients.of_penalties(
        case.policy, reference, temperature=temperature, **case.options
    )
    values = expected_gradients.means(
        case.policy, reference, temperature=temperature, **case.options
    )
    claims = tuple(claims)
    to_older = {}
    if any(c.older and c.penalty.reference_share is not None for c in claims):
        to_older = expected_gradients.of_penalties(
            case.policy, case.older, temperature=temperature, **case.options
        )
    samples = {
        older: sample(case, older=older, temperature=temperature)
        for older in {claim.older for claim in claims}
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `Finding.holds` checks `Penalty.warning`
        algorithms = [
            algorithm_of(claim.penalty, case=case, temperature=temperature)
            for claim in claims
        ]

    def finding(claim: Claim, algorithm: ppo.PPO) -> Finding:
        gradient, value = measure(
            case.policy,
            sampler=case.older if claim.older else case.policy,
            critic=case.critic,
            reference=case.reference,
            scored=samples[claim.older],
            algorithm=algorithm,
        )
        return _finding(
            claim,
            measured=flat(gradient),
            value=float(value),
            temperature=temperature,
            stops=bool(case.stop_ids),
            known=known,
            to_older=to_older,
            values=values,
        )

    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(finding, claims, algorithms)


def _finding(
    claim: Claim,
    *,
    measured: Flat,
    value: float,
    temperature: float,
    stops: bool,
    known: dict[expected_gradients.Key, Params],
    to_older: dict[expected_gradients.Key, Params],
    values: dict[str, float],
) -> Finding:
    chosen = claim.penalty
    nothing = np.zeros_like(measured)

    def expected(name: str, per: expected_gradients.Per) -> Flat:
        return BETA * flat(known[name, per])

    whole: expected_gradients.Per = "response" if chosen.per == "response" else "token"
    gradients_of_kls = {ZERO: nothing} | {name: expected(name, whole) for name in KLS}

    smallest_scale = np.abs(gradients_of_kls[FULL_REVERSE]).max()

    def error_of(expected: Flat) -> float:
        scale = max(np.abs(expected).max(), smallest_scale)
        return float(np.abs(measured - expected).max() / scale)

    terms = {} if chosen.placement is None else chosen.terms
    parts = [times * expected(name, chosen.per) for name, times in terms.items()]
    share = chosen.reference_share
    if claim.older and share is not None:
        # The rest of the mixture is the sampler, from which the policy has moved.
        parts += [
            times / share * (1 - share) * BETA * flat(to_older[name, chosen.per])
            for name, times in terms.items()
        ]
    errors = [error_of(sum(parts, start=nothing))]
    if claim.gradient in gradients_of_kls:
        errors.append(error_of(gradients_of_kls[claim.gradient]))
    bias = value_error = math.nan
    bucket = chosen.top_k is not None and chosen.tail == "bucket"
    if chosen.direction == "reverse" and not bucket and share is None:
        name = "kl"
        if chosen.value_estimator == "k2":
            name = "k2 of responses" if chosen.per == "response" else "k2"
        bias, value_error = value - values["kl"], abs(value - values[name])
        if chosen.placement is not None and math.isnan(value):
            value_error = math.inf  # the penalty is on, but no value was computed
    return Finding(
        claim=claim,
        temperature=temperature,
        stops=stops,
        error=max(errors),
        nearest=min(error_of(other) for other in gradients_of_kls.values()),
        value=value,
        bias=bias,
        value_error=value_error / values["kl"],
    )


def sample(case: Case, *, older: bool, temperature: float) -> Scored:
    """Scores every response of the policy, or of the older one.

    The older policy's values are set to 0: with advantages its ratios would be clipped.
    """
    rollout = jax.jit(
        enumerable.every_response, static_argnames=("model", "temperature", "stop_ids")
    )(case.older if older else case.policy, temperature=temperature, **case.options)
    shape = {"model": case.model, "max_new_tokens": enumerable.LENGTH}
    static = ("model", "max_new_tokens")
    values = jnp.zeros_like(rollout.old_logprobs)
    if not older:
        values = jax.jit(
            functools.partial(score.response_values, after_stop=False),
            static_argnames=static,
        )(case.critic, rollout=rollout, **shape)
    return jax.jit(score.score, static_argnames=(*static, "temperature"))(
        rollout,
        scores=jnp.zeros(len(rollout.tokens), jnp.float32),
        reference=case.reference,
        values=values,
        temperature=temperature,
        **shape,
    )


def algorithm_of(penalty: Penalty, *, case: Case, temperature: float) -> ppo.PPO:
    return ppo.PPO(
        model=case.model,
        critic_model=case.model,
        policy_optimizer=OPTIMIZER,
        critic_optimizer=OPTIMIZER,
        max_new_tokens=enumerable.LENGTH,
        stop_ids=case.stop_ids,
        temperature=temperature,
        penalty=penalty,
        aggregation="constant",
        loss_scale_factor=1.0,
    )


@functools.partial(
    jax.jit,
    static_argnames=("algorithm",),
    # Each program runs once, so compilation dominates.
    compiler_options={"xla_backend_optimization_level": 0},
)
def measure(
    params: Params,
    *,
    sampler: Params,
    critic: Params,
    reference: Frozen,
    scored: Scored,
    algorithm: ppo.PPO,
    further: References | None = None,
) -> tuple[Params, Array]:
    """The expected gradient of a run's loss, and the mean of the KL estimates.

    Args:
      params: parameters of the current policy.
      sampler: parameters of the policy that sampled.
      scored: every response of the sampler once, with values and reference log-probs;
        the KL is recomputed with the penalty of `algorithm`.
      algorithm: static.
      further: references other than the first, by name.

    Returns:
      The gradient of β·penalty with respect to `params`, for any placement, and f32[],
      the mean of the value estimator, nats per response, NaN if it is unused.
    """
    scored = score.score(
        scored.rollout,
        scores=scored.scores,
        reference=reference,
        model=algorithm.model,
        # Values and reference log-probs are given: less to compile.
        values=scored.values,
        max_new_tokens=algorithm.max_new_tokens,
        temperature=algorithm.temperature,
        penalty=algorithm.penalty,
        policy=sampler,
        ref_logprobs=scored.ref_logprobs,
    )
    beside: dict[str, Further] = {}
    if further:
        scored, beside = flow.objective.add_further(
            scored,
            further=further,
            model=algorithm.model,
            max_new_tokens=algorithm.max_new_tokens,
            temperature=algorithm.temperature,
            penalty=algorithm.penalty,
            policy=sampler,
        )
    batch = gae_experience(
        scored, kl_coef=BETA, gamma=1.0, lam=1.0, whiten_advantages=None
    )
    batch = dataclasses.replace(batch, further=beside)
    probabilities = jnp.exp(scored.rollout.old_logprobs.sum(axis=1))
    one = jnp.ones((), jnp.float32)

    def of_row(params: Params, row: Experience) -> tuple[Array, Array]:
        loss, stats = ppo_loss(
            params,
            critic,
            experience=jax.tree.map(lambda leaf: leaf[None], row),
            kl_coef=BETA,
            num_tokens=one,  # unused: losses are sums over a response
            num_values=one,
            num_responses=one,
            recipe=algorithm,
            frozen=FrozenModels(reference=reference, further=further or {}),
        )
        value, _ = stats.get("loss/kl", (jnp.float32(jnp.nan), one))
        return loss, value

    def mean(params: Params) -> tuple[Array, Array]:
        losses, values = jax.vmap(of_row, in_axes=(None, 0))(params, batch)
        return probabilities @ losses, probabilities @ values

    gradient, value = jax.grad(mean, has_aux=True)(params)
    if scored.kl is not None:
        of_rows = scored.kl.sum(axis=1)
        if algorithm.penalty.per == "length":
            of_rows = of_rows * scored.rollout.response_mask.sum(axis=1)
        value = probabilities @ of_rows
    return gradient, value
