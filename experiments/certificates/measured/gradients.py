"""What each KL penalty does to the policy, against what its name says it does.

    measured  Σ_y π(y)·∇ppo_loss(y), every response y of the world of `enumerable` once
    expected  the gradient of a KL, by autodiff of a sum over the same responses

The first goes through the code of a run: `score`, `experience` (lam = 1, no whitening,
score 0, β = 0.3) and `ppo_loss`, a row at a time, before anything is clipped. Its sum
over a response is aggregation "constant" with a loss_scale_factor of 1. The critic's
values are noise, as a baseline must not matter. The second reads logits alone
(`expected_gradients`). The claims are in `penalty_claims`, and hold with and without a
stop token.
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

BETA = 0.3  # β of the penalty: neither 0 nor 1, so that it cannot be forgotten


def certify(
    case: Case, claims: Iterable[Claim], *, temperature: float
) -> Iterator[Finding]:
    """Every claim at one temperature, in order; each is a program of its own.

    Several are compiled at once.
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
        warnings.simplefilter("ignore")  # `Finding.holds` reads what they would say
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
        # The rest is to the policy that sampled, which the policy has left.
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
            value_error = math.inf  # nothing took it, though something should have
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
    """Every response, scored; by the older policy there are no values.

    Ratios are clipped where there are advantages, so with them there are none.
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
    # A program runs once, so that its time is its compiler's.
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
    """The expected gradient of the loss of a run, and the mean of its estimates.

    Args:
      params: of the policy now.
      sampler: of the policy that sampled.
      scored: every response of the sampler once, with its values and the reference's
        log-probs; its KL is computed again, as `algorithm` has it.
      algorithm: static.
      further: references beside the first, by name.

    Returns:
      The gradient by `params` of β·penalty, whichever way it comes, and f32[],
      E of the value estimator, nats per response, NaN if nothing takes it.
    """
    scored = score.score(
        scored.rollout,
        scores=scored.scores,
        reference=reference,
        model=algorithm.model,
        values=scored.values,  # they are there, and
        max_new_tokens=algorithm.max_new_tokens,
        temperature=algorithm.temperature,
        penalty=algorithm.penalty,
        policy=sampler,
        ref_logprobs=scored.ref_logprobs,  # so are these: less to compile
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
            num_tokens=one,  # not read: losses are sums over a response
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
