"""Claims about corrections: each follows the gradient of a named objective.

μ is the sampler, π the current policy, s a prefix and a the next token. b is the mean
reward under μ, Q(s, a) the expected reward of μ after s and a, and d(s) the probability
that μ visits s:

    of responses   Σ_y μ(y)·h(π(y)/μ(y))·(r(y) - b)
    of tokens      Σ_s d(s) Σ_a μ(a|s)·h(π(a|s)/μ(a|s))·(Q(s, a) - b)

h is the ratio, clipped to the bounds for a mask (slope 0 beyond them), or continued as
C + C·log(ρ/C) beyond the cap C for a truncation (slope C/ρ). Score centring replaces b
by V(s), the mean of Q at s. The formulas call no function of the library.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax import grpo
from rlhf_jax.algorithms.policy_gradient.corrections import (
    Mask,
    Ratio,
    Recompute,
    Reject,
    SamplerCorrection,
    Truncate,
)
from rlhf_jax.algorithms.policy_gradient.options import Centred
from rlhf_jax.algorithms.policy_gradient.recipe import CLIP, Surrogate
from rlhf_jax.functional.kl.penalty import IN_REWARD, UNBIASED_K3, Penalty

Array = jax.Array
Cut = Callable[[Array], Array]  # h, on positive ratios


class Known(NamedTuple):
    """Exact quantities of the sampler, one row per response."""

    logprobs: Array  # f32[N, 4], log μ, nats
    mask: Array  # bool[N, 4]
    rewards: Array  # f32[N]
    ref_logprobs: Array  # f32[N, 4], nats
    met: Array  # f32[N, 4], d(s): the probability of the tokens before
    earned: Array  # f32[N, 4], Q(s, a): mean reward of responses that begin with s, a
    same: Array  # f32[N, 4], number of responses that begin with s, a
    ahead: Array  # f32[N, 4], V(s): mean reward of responses that begin with s
    top: Array  # bool[N, 4], a is among the `TOP` likeliest tokens of μ at s
    # f32[4N, 4N], 1/`same` for tokens after the same s, else 0
    beside: Array


Objective = Callable[[Array, Known], Array]  # a function of log π f32[N, 4]


def itself(ratio: Array) -> Array:
    return ratio


def truncated(ratio: Array, *, cap: float) -> Array:
    below = jnp.minimum(ratio, cap)  # so that log is taken only above the cap
    return below + cap * jnp.log(jnp.maximum(ratio, cap) / cap)


def masked(ratio: Array, *, cap: float, floor: float) -> Array:
    return jnp.minimum(jnp.maximum(ratio, floor), cap)


def expected_reward(logprobs: Array, known: Known) -> Array:
    return _chance(logprobs, known) @ known.rewards


def of_responses(logprobs: Array, known: Known, *, h: Cut) -> Array:
    drawn = _chance(known.logprobs, known)
    ratio = _chance(logprobs, known) / drawn
    return (drawn * h(ratio)) @ (known.rewards - drawn @ known.rewards)


def of_tokens(logprobs: Array, known: Known, *, h: Cut) -> Array:
    mean = _chance(known.logprobs, known) @ known.rewards
    drawn = jnp.exp(known.logprobs)
    worth = drawn * h(jnp.exp(logprobs) / drawn) * (known.earned - mean)
    return _each_prefix(worth, known)


def centred(logprobs: Array, known: Known, *, h: Cut) -> Array:
    """`of_tokens` with V(s) instead of b: the covariance of Q and the score."""
    drawn = jnp.exp(known.logprobs)
    worth = drawn * h(jnp.exp(logprobs) / drawn) * (known.earned - known.ahead)
    return _each_prefix(worth, known)


def centred_at_the_top(logprobs: Array, known: Known) -> Array:
    """`centred` of log π, plus the error of approximating μ by ρ·π outside the top."""
    mean = _chance(known.logprobs, known) @ known.rewards
    drawn, now = jnp.exp(known.logprobs), jax.lax.stop_gradient(jnp.exp(logprobs))
    tail, old_tail = (
        known.beside @ jnp.where(known.top, 0.0, x).reshape(-1) for x in (now, drawn)
    )
    rho = (old_tail / jnp.where(tail > 0, tail, 1.0)).reshape(drawn.shape)
    left = jnp.where(known.top, 0.0, drawn - rho * now)
    covariance = drawn * (known.earned - known.ahead)
    return _each_prefix((covariance + (known.ahead - mean) * left) * logprobs, known)


def likelihood(logprobs: Array, known: Known) -> Array:
    """E_μ[(r - b)·log π]: the samples are treated as on-policy."""
    drawn = _chance(known.logprobs, known)
    worth = drawn * (known.rewards - drawn @ known.rewards)
    return worth @ jnp.sum(logprobs, axis=1, where=known.mask)


def kept_likelihood(
    logprobs: Array, known: Known, *, cap: float, floor: float, mean: bool
) -> Array:
    """`likelihood` over kept responses of pairs, divided by the kept share."""
    drawn = _chance(known.logprobs, known)
    total = jnp.sum(logprobs, axis=1, where=known.mask)
    gap = total - jnp.log(drawn)
    if mean:
        gap = gap / known.mask.sum(axis=1)
    accepted = (jnp.exp(gap) <= cap) & (jnp.exp(gap) >= floor)
    accepted = jax.lax.stop_gradient(accepted.astype(jnp.float32))
    share = 2 / (1 + accepted)[None, :]  # 1 if the other is kept too, else 2
    pairs = share * (known.rewards[:, None] - known.rewards[None, :])
    return (drawn * accepted * total) @ pairs @ drawn


def reverse_kl(logprobs: Array, known: Known) -> Array:
    """-Σ_s d(s)·KL(π(·|s) ‖ π_ref(·|s))."""
    x = logprobs - known.ref_logprobs
    return -_each_prefix(jnp.exp(logprobs) * x, known)


def full_reverse_kl(logprobs: Array, known: Known) -> Array:
    """-KL(π ‖ π_ref) of whole responses under the current policy."""
    return -_chance(logprobs, known) @ _whole_log_ratio(logprobs, known)


def drawn_k2(logprobs: Array, known: Known) -> Array:
    """-E_μ[½(log π/π_ref)²] of whole responses, without the weight π/μ."""
    squares = _whole_log_ratio(logprobs, known) ** 2
    return -_chance(known.logprobs, known) @ squares / 2


def _whole_log_ratio(logprobs: Array, known: Known) -> Array:
    return jnp.sum(logprobs - known.ref_logprobs, axis=1, where=known.mask)


def drawn_k3(logprobs: Array, known: Known) -> Array:
    """-Σ_s d(s) Σ_a μ(a|s)·k3, without the weight π/μ."""
    x = logprobs - known.ref_logprobs
    return -_each_prefix(jnp.exp(known.logprobs) * (jnp.exp(-x) - 1 + x), known)


def _chance(logprobs: Array, known: Known) -> Array:
    return jnp.exp(jnp.sum(logprobs, axis=1, where=known.mask))


def _each_prefix(of_tokens: Array, known: Known) -> Array:
    """Σ_s d(s) Σ_a, counting every prefix and token once."""
    return jnp.sum(known.met * of_tokens / known.same, where=known.mask)


class Claim(NamedTuple):
    """A correction, the objective that it follows, and the intended objective."""

    name: str
    recipe: grpo.GroupRecipe
    target: str  # the objective in words
    objective: Objective
    goal: Objective = expected_reward
    bias: str = ""  # why the objective is not the goal; empty if it is
    bounded: bool = True  # whether a token is beyond a bound after 4 updates


def _recipe(
    correction: SamplerCorrection | None = None,
    *,
    penalty: Penalty = IN_REWARD,
    surrogate: Surrogate = CLIP,
) -> grpo.GroupRecipe:
    return grpo.GroupRecipe(
        aggregation="constant",
        temperature=1.0,
        group_size=2,
        baseline="leave_one_out",
        penalty=penalty,
        surrogate=surrogate,
        sampler_correction=correction,
    )


TOP = 2  # tokens of four that a sampler records
NO_KL = Penalty(placement=None)
WIDE = 1e6  # a cap that no weight reaches
TOKENS: dict[str, Any] = {"cap": 1.1, "floor": 0.9}
RESPONSES: dict[str, Any] = {"cap": 1.5, "floor": 0.7}
MEANS: dict[str, Any] = {"cap": 1.15, "floor": 0.9}
WEIGHTED_K2 = Penalty(
    "k2", placement="loss", per="response", importance_weights="prefix"
)
BEYOND = "what is beyond the bounds"
PREFIXES = "prefixes and continuations of the sampler"
CLAIMS = (
    Claim(
        "none: log-probs recomputed alone",
        _recipe(Recompute()),
        "E_μ[(r − b)·log π]",
        likelihood,
        bias="samples of the sampler",
        bounded=False,
    ),
    Claim(
        "token ratio without a bound",
        _recipe(Truncate(WIDE)),
        "Σ_s d_μ(s) Σ_a π(a|s)·Q_μ(s, a)",
        functools.partial(of_tokens, h=itself),
        bias=PREFIXES,
        bounded=False,
    ),
    Claim(
        "token_truncate, 1.1 (TIS)",
        _recipe(Truncate(TOKENS["cap"])),
        "the same of ρ, C + C·log(ρ/C) beyond C",
        functools.partial(of_tokens, h=functools.partial(truncated, cap=TOKENS["cap"])),
        bias=f"{PREFIXES}, and {BEYOND}",
    ),
    Claim(
        "token_mask, 0.9 to 1.1 (IcePop)",
        _recipe(Mask(**TOKENS)),
        "the same of clip(ρ)",
        functools.partial(of_tokens, h=functools.partial(masked, **TOKENS)),
        bias=f"{PREFIXES}, and {BEYOND}",
    ),
    Claim(
        "sequence ratio without a bound",
        _recipe(Truncate(WIDE, level="sequence")),
        "E_π[r]",
        expected_reward,
        bounded=False,
    ),
    Claim(
        "sequence_truncate, 1.5",
        _recipe(Truncate(RESPONSES["cap"], level="sequence")),
        "E_μ[R·(r − b)], C + C·log(R/C) beyond C",
        functools.partial(
            of_responses, h=functools.partial(truncated, cap=RESPONSES["cap"])
        ),
        bias=BEYOND,
    ),
    Claim(
        "sequence_mask, 0.7 to 1.5",
        _recipe(Mask(**RESPONSES, level="sequence")),
        "E_μ[clip(R)·(r − b)]",
        functools.partial(of_responses, h=functools.partial(masked, **RESPONSES)),
        bias=BEYOND,
    ),
    Claim(
        "sequence_reject, 0.7 to 1.5",
        _recipe(Reject(**RESPONSES)),
        "E_μ[(r − r')·log π | kept]",
        functools.partial(kept_likelihood, **RESPONSES, mean=False),
        bias="samples of the sampler, and a baseline that holds what is left out",
    ),
    Claim(
        "geometric_reject, 0.9 to 1.15",
        _recipe(Reject(**MEANS, level="geometric")),
        "the same by R^(1/length)",
        functools.partial(kept_likelihood, **MEANS, mean=True),
        bias="samples of the sampler, and a baseline that holds what is left out",
    ),
    Claim(
        "score centring",
        _recipe(penalty=NO_KL, surrogate=Centred(top_k=4)),
        "Σ_s d_μ(s) Cov_μ(Q_μ, log π)",
        functools.partial(centred, h=jnp.log),
        bias=f"the sampler's covariance, and {PREFIXES}",
        bounded=False,
    ),
    Claim(
        "score centring, ratios up to 1.1",
        _recipe(penalty=NO_KL, surrogate=Centred(top_k=4, cap=TOKENS["cap"])),
        "Σ_s d_μ(s) Cov_μ(Q_μ, h), h of token_truncate",
        functools.partial(centred, h=functools.partial(truncated, cap=TOKENS["cap"])),
        bias=f"{PREFIXES}, and {BEYOND}",
        bounded=False,  # the surrogate has the bound, not the weight of an advantage
    ),
    Claim(
        f"score centring, top {TOP} of 4",
        _recipe(penalty=NO_KL, surrogate=Centred(top_k=TOP)),
        "the covariance, and (V_μ − b)·E[∇log π] of μ − ρπ outside the top",
        centred_at_the_top,
        bias=f"the sampler's covariance and tail, and {PREFIXES}",
        bounded=False,
    ),
    Claim(
        "unbiased k3 in the loss (DeepSeek-V3.2)",
        _recipe(Truncate(WIDE), penalty=UNBIASED_K3),
        "−Σ_s d_μ(s)·KL(π ‖ π_ref)",
        reverse_kl,
        goal=reverse_kl,
        bounded=False,
    ),
    Claim(
        "k3 in the loss without its weight",
        _recipe(Truncate(WIDE), penalty=Penalty("k3", placement="loss")),
        "−Σ_s d_μ(s) Σ_a μ(a|s)·k3",
        drawn_k3,
        goal=reverse_kl,
        bias="a gradient that is a forward KL's on the sampler's policy",
        bounded=False,
    ),
    Claim(
        "k2 of responses in the loss, weighted by π/μ of the response",
        _recipe(Ratio(), penalty=WEIGHTED_K2),
        "−KL(π ‖ π_ref) of responses",
        full_reverse_kl,
        goal=full_reverse_kl,
        bounded=False,
    ),
    Claim(
        "k2 of responses in the loss without its weight",
        _recipe(
            Ratio(), penalty=dataclasses.replace(WEIGHTED_K2, importance_weights=None)
        ),
        "−E_μ[k2] of responses",
        drawn_k2,
        goal=full_reverse_kl,
        bias="samples of the sampler",
        bounded=False,
    ),
)
