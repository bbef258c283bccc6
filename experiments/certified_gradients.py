"""What each KL penalty does to the policy, against what its name says it does.

    found     Σ_y π(y)·∇ppo_loss(y), every response y of the world of `enumerable` once
    expected  the gradient of a KL, by autodiff of a sum over the same responses

The first goes through the code of a run: `score`, `experience` (lam = 1, no whitening,
score 0, β = 1) and `ppo_loss`, a row at a time, before anything is clipped. The
critic's values are noise, as a baseline must not matter. The second reads logits alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import warnings
from collections.abc import Iterable, Iterator
from concurrent import futures
from typing import Any, NamedTuple

import enumerable
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from rlhf_jax import critic, experience, frozen, policy, ppo, ppo_loss, score
from rlhf_jax.functional.kl_penalty import (
    FIXED_FORWARD,
    FIXED_REVERSE,
    FULL_FORWARD,
    FULL_REVERSE,
    Penalty,
)
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.frozen import Frozen
from rlhf_jax.stages.batch import Experience, Scored

Array = jax.Array
Params = Any
Key = tuple[str, bool]  # name of a gradient, True where it is of whole responses
Gradients = dict[Key, Any]
Flat = npt.NDArray[np.float64]

# Of the largest entry of the expected gradient, or of the full reverse KL's where that
# is larger (some are 0, some what is left of a difference); for a mean, of the KL.
TOLERANCE = 1e-5
APART = 1e-2  # of the same: how far from every KL's a gradient of none of them keeps
ZERO = "zero"
NONE = "none of these"
KLS = (FULL_REVERSE, FULL_FORWARD, FIXED_REVERSE, FIXED_FORWARD)
TOP_K = 2  # of the 4 words
OPTIMIZER = optax.sgd(1.0)  # a PPO has one; none is run here


class Claim(NamedTuple):
    """A penalty and the gradient it is said to have."""

    penalty: Penalty
    gradient: str | None = None  # one of KLS, ZERO or NONE; None: `Penalty.terms` alone
    older: bool = False  # the samples are an older policy's


def _reverse(estimator: Any, placement: Any, per: Any, gradient: str) -> Claim:
    chosen = Penalty(value_estimator=estimator, placement=placement, per=per)
    return Claim(chosen, gradient)


def _weighted(
    direction: Any, estimator: Any, per: Any, weights: Any, gradient: str
) -> Claim:
    chosen = Penalty(
        value_estimator=estimator,
        placement="loss",
        direction=direction,
        per=per,
        importance_weights=weights,
    )
    # A reverse KL has no weights but where the policy has moved on from its samples.
    return Claim(chosen, gradient, older=direction == "reverse")


TABLE = (
    _reverse("k1", "reward", "token", FULL_REVERSE),
    _reverse("k1", "reward", "response", FULL_REVERSE),
    _reverse("k1", "loss", "token", ZERO),
    _reverse("k1", "loss", "response", ZERO),
    _reverse("k1", "both", "token", FULL_REVERSE),
    _reverse("k1", "both", "response", FULL_REVERSE),
    _reverse("k2", "reward", "token", NONE),
    _reverse("k2", "reward", "response", NONE),
    _reverse("k2", "loss", "token", FIXED_REVERSE),
    _reverse("k2", "loss", "response", FULL_REVERSE),
    _reverse("k2", "both", "token", NONE),
    _reverse("k2", "both", "response", NONE),
    _reverse("k3", "reward", "token", NONE),
    _reverse("k3", "reward", "response", NONE),
    _reverse("k3", "loss", "token", FIXED_FORWARD),
    _reverse("k3", "loss", "response", FULL_FORWARD),
    _reverse("k3", "both", "token", FULL_REVERSE),
    _reverse("k3", "both", "response", FULL_REVERSE),
    _reverse("exact", "reward", "token", NONE),
    _reverse("exact", "reward", "response", NONE),
    _reverse("exact", "loss", "token", FIXED_REVERSE),
    _reverse("exact", "loss", "response", FIXED_REVERSE),
    _reverse("exact", "both", "token", FULL_REVERSE),
    _reverse("exact", "both", "response", FULL_REVERSE),
)
"""Every estimator, placement, and token or response, of a reverse KL on-policy.

In the reward alone and in the loss alone this is what the literature says. In both, the
two halves add up to the gradient of the estimator's mean, which is the KL itself where
the estimator has no bias."""

OTHERS = (
    # One estimator for the number, another for the gradient.
    Claim(
        Penalty(value_estimator="k1", grad_estimator="k2", placement="loss"),
        FIXED_REVERSE,
    ),
    Claim(
        Penalty(
            value_estimator="k3", grad_estimator="k2", placement="loss", per="response"
        ),
        FULL_REVERSE,
    ),
    Claim(Penalty(value_estimator="k1", grad_estimator="k2", placement="both"), NONE),
    # Nowhere, and each response's share divided by its length.
    Claim(Penalty(placement=None)),
    Claim(Penalty(per="length")),
    Claim(Penalty(value_estimator="k2", placement="loss", per="length")),
    # A forward KL, exact.
    Claim(Penalty(value_estimator="exact", direction="forward"), NONE),
    Claim(
        Penalty(value_estimator="exact", direction="forward", placement="loss"),
        FIXED_FORWARD,
    ),
    Claim(
        Penalty(value_estimator="exact", direction="forward", placement="both"), NONE
    ),
    # A forward KL from samples of the policy, weighted.
    _weighted("forward", "k1", "token", "token", FIXED_FORWARD),
    _weighted("forward", "k1", "token", "prefix", FULL_FORWARD),
    _weighted("forward", "k1", "response", "prefix", FULL_FORWARD),
    _weighted("forward", "k2", "token", "token", NONE),
    _weighted("forward", "k2", "token", "prefix", NONE),
    _weighted("forward", "k2", "response", "prefix", NONE),
    _weighted("forward", "k3", "token", "token", FIXED_FORWARD),
    _weighted("forward", "k3", "token", "prefix", FULL_FORWARD),
    _weighted("forward", "k3", "response", "prefix", FULL_FORWARD),
    # With weights the samples of an older policy give what its own would.
    _weighted("reverse", "k1", "response", "prefix", ZERO),
    _weighted("reverse", "k2", "token", "prefix", FIXED_REVERSE),
    _weighted("reverse", "k2", "response", "prefix", FULL_REVERSE),
    _weighted("reverse", "k3", "token", "prefix", FIXED_FORWARD),
    _weighted("reverse", "k3", "response", "prefix", FULL_FORWARD),
    _weighted("reverse", "exact", "token", "prefix", FIXED_REVERSE),
    # The likeliest words, and one bucket for the rest.
    Claim(Penalty(value_estimator="exact", placement="reward", top_k=TOP_K)),
    Claim(Penalty(value_estimator="exact", placement="loss", top_k=TOP_K)),
    Claim(Penalty(value_estimator="exact", placement="both", top_k=TOP_K)),
)
"""Claims beside the table; those without a name are held to `Penalty.terms`."""


class Finding(NamedTuple):
    """What became of a claim."""

    claim: Claim
    temperature: float
    error: float  # largest entry of found - expected, of the scale of `TOLERANCE`
    nearest: float  # the same to the nearest of KLS and ZERO
    value: float  # E of the value estimator, nats per response; NaN if it is not taken
    bias: float  # value - KL(π ‖ π_ref), nats; NaN where that is not what it measures
    value_error: float  # of value, over the KL; NaN as bias

    @property
    def holds(self) -> bool:
        """Whether gradient and value are what is claimed of them.

        A gradient that is no KL's keeps away from all of them, and the library says so.
        """
        named = self.claim.gradient
        warned = self.claim.penalty.warning is not None
        return (
            self.error <= TOLERANCE
            and not self.value_error > TOLERANCE
            and (named != NONE or self.nearest >= APART)
            and (named is None or warned == (named not in KLS))
        )

    @property
    def estimator(self) -> str:
        """What is estimated how, in words."""
        chosen = self.claim.penalty
        words = [chosen.value_estimator]
        if chosen.grad_estimator is not None:
            words.append(f"gradient {chosen.grad_estimator}")
        if chosen.top_k is not None:
            words.append(f"top {chosen.top_k}")
        if chosen.direction == "forward":
            words.append("forward")
        if chosen.importance_weights is not None:
            words.append(f"{chosen.importance_weights} weights")
        if self.claim.older:
            words.append("older samples")
        return ", ".join(words)

    @property
    def place(self) -> str:
        """Where it acts, and of what one estimate is."""
        return f"{self.claim.penalty.placement or 'neither'}, {self.claim.penalty.per}"


class Case(NamedTuple):
    """A policy, an older one and a reference over the same 256 responses."""

    policy: Params
    older: Params
    critic: Params  # its values are noise
    reference: Frozen
    model: ModelConfig


def draw(seed: int, *, hidden_size: int = 16) -> Case:
    """Random decoders, a nat or two from each other."""
    model = enumerable.model(hidden_size=hidden_size)
    keys = jax.random.split(jax.random.key(seed), 5)
    init = jax.jit(functools.partial(enumerable.init, model=model))
    now, older, trunk, start = (init(key) for key in keys[:4])
    values = critic.from_policy(trunk, model=model)
    kernel = jax.random.normal(keys[4], values["score"]["kernel"].shape)
    values["score"] = values["score"] | {"kernel": kernel}
    return Case(now, older, values, frozen.freeze(start), model)


def certify(
    case: Case, claims: Iterable[Claim], *, temperature: float
) -> Iterator[Finding]:
    """Every claim at one temperature, as they are found; each is a program of its own.

    Several are compiled at once.
    """
    known = expected_gradients(case, temperature=temperature)
    values = expected_values(case, temperature=temperature)
    claims = tuple(claims)
    samples = {
        older: _sample(case, older=older, temperature=temperature)
        for older in {claim.older for claim in claims}
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # `Finding.holds` reads what they would say
        algorithms = [
            _algorithm(claim.penalty, case=case, temperature=temperature)
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
            found=_flat(gradient),
            value=float(value),
            temperature=temperature,
            known=known,
            values=values,
        )

    with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        yield from pool.map(finding, claims, algorithms)


def _finding(
    claim: Claim,
    *,
    found: Flat,
    value: float,
    temperature: float,
    known: Gradients,
    values: dict[str, float],
) -> Finding:
    chosen = claim.penalty
    nothing = np.zeros_like(found)
    share = 1 / enumerable.LENGTH if chosen.per == "length" else 1.0

    def expected(name: str) -> Flat:
        return share * _flat(known[name, chosen.per == "response"])

    flat = {ZERO: nothing} | {name: expected(name) for name in KLS}

    smallest_scale = np.abs(flat[FULL_REVERSE]).max()

    def error_of(expected: Flat) -> float:
        scale = max(np.abs(expected).max(), smallest_scale)
        return float(np.abs(found - expected).max() / scale)

    terms = {} if chosen.placement is None else chosen.terms
    parts = [times * expected(name) for name, times in terms.items()]
    errors = [error_of(sum(parts, start=nothing))]
    if claim.gradient in flat:
        errors.append(error_of(flat[claim.gradient]))
    bias = value_error = math.nan
    if chosen.direction == "reverse" and chosen.top_k is None:
        name = "kl"
        if chosen.value_estimator == "k2":
            name = "k2 of responses" if chosen.per == "response" else "k2"
        bias, value_error = value - values["kl"], abs(value - values[name])
    return Finding(
        claim=claim,
        temperature=temperature,
        error=max(errors),
        nearest=min(error_of(each) for each in flat.values()),
        value=value,
        bias=bias,
        value_error=value_error / values["kl"],
    )


def _sample(case: Case, *, older: bool, temperature: float) -> Scored:
    """Every response, priced; by the older policy there are no values.

    Ratios are clipped where there are advantages, so with them there are none.
    """
    rollout = jax.jit(
        enumerable.every_response, static_argnames=("model", "temperature")
    )(case.older if older else case.policy, model=case.model, temperature=temperature)
    scored = jax.jit(
        score.score,
        static_argnames=("model", "critic_model", "max_new_tokens", "temperature"),
    )(
        rollout,
        scores=jnp.zeros(enumerable.NUM_RESPONSES, jnp.float32),
        reference=case.reference,
        model=case.model,
        critic=case.critic,
        critic_model=case.model,
        max_new_tokens=enumerable.LENGTH,
        temperature=temperature,
    )
    if older:
        scored = dataclasses.replace(scored, values=jnp.zeros_like(scored.values))
    return scored


def _algorithm(penalty: Penalty, *, case: Case, temperature: float) -> ppo.PPO:
    return ppo.PPO(
        model=case.model,
        critic_model=case.model,
        policy_optimizer=OPTIMIZER,
        critic_optimizer=OPTIMIZER,
        max_new_tokens=enumerable.LENGTH,
        stop_ids=(),
        temperature=temperature,
        penalty=penalty,
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
) -> tuple[Params, Array]:
    """The expected gradient of the loss of a run, and the mean of its estimates.

    Args:
      params: of the policy now.
      sampler: of the policy that sampled.
      scored: every response of the sampler once, with its values and the reference's
        log-probs; whatever is priced in it, `algorithm` is priced again.
      algorithm: static.

    Returns:
      The gradient by `params` of β·penalty at β = 1, whichever way it comes, and f32[],
      E of the value estimator, nats per response, NaN if nothing takes it.
    """
    values = scored.values
    scored = score.score(
        scored.rollout,
        scores=scored.scores,
        reference=reference,
        model=algorithm.model,
        critic=None,  # its values are there, and
        critic_model=None,
        max_new_tokens=algorithm.max_new_tokens,
        temperature=algorithm.temperature,
        penalty=algorithm.penalty,
        policy=sampler,
        ref_logprobs=scored.ref_logprobs,  # so are these: less to compile
    )
    scored = dataclasses.replace(scored, values=values)
    seen = experience.experience(
        scored, kl_coef=1.0, gamma=1.0, lam=1.0, whiten_advantages=None
    )
    probabilities = jnp.exp(scored.rollout.old_logprobs.sum(axis=1))
    one = jnp.ones((), jnp.float32)

    def of_row(params: Params, row: Experience) -> tuple[Array, Array]:
        loss, stats = ppo_loss.ppo_loss(
            params,
            critic,
            experience=jax.tree.map(lambda leaf: leaf[None], row),
            kl_coef=1.0,
            num_tokens=one,  # so that losses are sums over the response
            num_values=one,
            num_responses=one,
            ppo=algorithm,
            reference=reference,
        )
        value, _ = stats.get("loss/kl", (jnp.float32(jnp.nan), one))
        return loss, value

    def mean(params: Params) -> tuple[Array, Array]:
        losses, values = jax.vmap(of_row, in_axes=(None, 0))(params, seen)
        return probabilities @ losses, probabilities @ values

    gradient, value = jax.grad(mean, has_aux=True)(params)
    if scored.kl is not None:
        value = probabilities @ scored.kl.sum(axis=1)
        if algorithm.penalty.per == "length":
            value = value * enumerable.LENGTH
    return gradient, value


class _Tables(NamedTuple):
    """What the sums below are made of; y runs over responses, t and v over words."""

    words: Array  # f32[256, 4, 4], log π(v | what stands before t in y), nats
    ref_words: Array  # the same of the reference
    taken: Array  # f32[256, 4], of the word that is there
    ref_taken: Array


def expected_gradients(case: Case, *, temperature: float) -> Gradients:
    """The gradients that `Penalty.terms` names, each of a sum over all responses."""
    return _expected_gradients(
        case.policy,
        frozen.read(case.reference),
        model=case.model,
        temperature=temperature,
    )


@functools.partial(jax.jit, static_argnames=("model", "temperature"))
def _expected_gradients(
    params: Params, ref_params: Params, *, model: ModelConfig, temperature: float
) -> Gradients:
    def sums(params: Params) -> dict[Key, Array]:
        tables = _tables(params, ref_params, model=model, temperature=temperature)
        return {
            (name, whole): value
            for whole in (False, True)
            for name, value in _sums(tables, whole=whole).items()
        }

    values, pull = jax.vjp(sums, params)
    names = list(values)

    def of(one_hot: Array) -> Params:
        return pull(dict(zip(names, one_hot, strict=True)))[0]

    # One after the other: under `vmap` (and so in `jax.jacrev`) JAX 0.10.2 pulls such
    # a dict of one-hot cotangents back through a scan wrongly.
    found = jax.lax.map(of, jnp.eye(len(names)))
    return {
        name: jax.tree.map(lambda leaf, i=i: leaf[i], found)
        for i, name in enumerate(names)
    }


def _sums(tables: _Tables, *, whole: bool) -> dict[str, Array]:
    """{name: f32[], nats}, to be differentiated; `whole` matters to k2 alone."""
    words, ref_words, taken, ref_taken = tables
    own = jnp.exp(taken.sum(axis=1))  # π(y), which moves
    fixed = jax.lax.stop_gradient(own)
    reference = jnp.exp(ref_taken.sum(axis=1))
    x = taken - ref_taken
    log_ratio = x.sum(axis=1)
    squares = log_ratio**2 if whole else (x**2).sum(axis=1)
    reverse = (jnp.exp(words) * (words - ref_words)).sum(axis=(1, 2))
    forward = (jnp.exp(ref_words) * (ref_words - words)).sum(axis=(1, 2))
    square = (jnp.exp(ref_words) * 0.5 * (words - ref_words) ** 2).sum(axis=(1, 2))
    bucketed = _bucketed(words, ref_words).sum(axis=1)
    return {
        FULL_REVERSE: own @ log_ratio,
        FULL_FORWARD: -(reference @ log_ratio),
        FIXED_REVERSE: fixed @ reverse,
        FIXED_FORWARD: fixed @ forward,
        "mean k2": 0.5 * (own @ squares),
        "own-prefix forward": own @ forward,
        "reference's mean k2": 0.5 * (reference @ squares),
        "fixed-state k2": fixed @ square,
        f"top-k {FULL_REVERSE}": own @ bucketed,
        f"top-k {FIXED_REVERSE}": fixed @ bucketed,
    }


def _bucketed(words: Array, ref_words: Array) -> Array:
    """f32[256, 4]: reverse KL over the TOP_K likeliest words and one bucket."""
    order = jnp.argsort(-jax.lax.stop_gradient(words), axis=-1)
    p, q = (
        jnp.take_along_axis(jnp.exp(table), order, axis=-1)
        for table in (words, ref_words)
    )
    p, q = (
        jnp.concatenate(
            [each[..., :TOP_K], each[..., TOP_K:].sum(axis=-1, keepdims=True)], axis=-1
        )
        for each in (p, q)
    )
    return (p * jnp.log(p / q)).sum(axis=-1)


def _tables(
    params: Params, ref_params: Params, *, model: ModelConfig, temperature: float
) -> _Tables:
    tokens = enumerable.every_tokens()
    words, ref_words = (
        jax.nn.log_softmax(
            policy.logits(
                each, model=model, tokens=tokens, mask=jnp.ones(tokens.shape, bool)
            )[:, :-1]
            / temperature
        )
        for each in (params, ref_params)
    )
    chosen = tokens[:, enumerable.PROMPT :, None]
    taken, ref_taken = (
        jnp.take_along_axis(each, chosen, axis=-1)[..., 0]
        for each in (words, ref_words)
    )
    return _Tables(words, ref_words, taken, ref_taken)


def expected_values(case: Case, *, temperature: float) -> dict[str, float]:
    """Means under the policy, nats per response, as float64 sums."""
    tables = jax.jit(_tables, static_argnames=("model", "temperature"))(
        case.policy,
        frozen.read(case.reference),
        model=case.model,
        temperature=temperature,
    )
    taken, ref_taken = (
        np.asarray(each, np.float64) for each in (tables.taken, tables.ref_taken)
    )
    probabilities, x = np.exp(taken.sum(axis=1)), taken - ref_taken
    return {
        "kl": float(probabilities @ x.sum(axis=1)),
        "k2": float(probabilities @ (0.5 * x**2).sum(axis=1)),
        "k2 of responses": float(probabilities @ (0.5 * x.sum(axis=1) ** 2)),
    }


def _flat(gradient: Params) -> Flat:
    leaves = [
        np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradient)
    ]
    return np.concatenate(leaves)
