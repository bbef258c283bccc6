"""The KL penalty: which estimator, where it acts, and what its gradient is.

With x_t = logprobs_t - ref_logprobs_t (reverse) or ref_logprobs_t - logprobs_t
(forward), an estimate k(x) from `kl` acts in two places:

    in the reward  token_rewards takes -β·k(x_t): the policy gradient multiplies it by
                   ∇log π, and nothing is differentiated through k
    in the loss    the loss gets β Σ_t weights_t·k(x_t), which is differentiated

Which of the two, and which estimate, decides what the penalty does to the policy:
`Penalty.gradient` says it in the words of `gradients`, and `Penalty.warning` speaks
up where it is not what any KL would do. Where responses differ in length the names are
those of aggregation "constant": the means divide by lengths that the policy chooses.

    per        column    0   1   2   3   4      a response of three tokens
    token      kl        0  k1  k2  k3   0      k(x_t), an estimate of each
    length     kl        0  k1  k2  k3   0      each a third of that
    response   kl        0   0   0  k    0      k(x_1 + x_2 + x_3) of all
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, masked, ratios
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import estimators, gradients
from rlhf_jax.functional.kl.gradients import Estimator

Array = jax.Array
Stats = masked.Stats


@dataclasses.dataclass(frozen=True)
class Penalty:
    """By default the estimate k1 per token in the reward, as in Ziegler et al. 2019."""

    value_estimator: Estimator = "k1"
    """The number that is penalised in the reward, and shown for the loss."""
    grad_estimator: Estimator | None = None
    """What the loss differentiates; None is value_estimator."""
    placement: Literal["reward", "loss", "both"] | None = "reward"
    """Where the penalty acts; None measures it and leaves the policy alone."""
    direction: estimators.Direction = "reverse"
    """reverse is KL(policy, reference), forward is KL(reference, policy)."""
    per: Literal["token", "response", "length"] = "token"
    """An estimate of each token; one of the whole response, on its last token; or each
    token's, divided by the length of its response."""
    importance_weights: Literal["token", "prefix"] | None = None
    """Weights for samples of another policy than the one the KL is about: of the token
    alone, or of everything up to it (per response: of the whole response)."""
    clip: float | None = None
    """Largest size of one estimate, its weight included, in nats; None is no limit."""
    top_k: int | None = None
    """Exact KL over the policy's so many likeliest words and one bucket of all others;
    None is over every word."""

    def __post_init__(self) -> None:
        self._check_names()
        if self.grad_estimator is not None and not self.in_loss:
            raise InputError(
                f"grad_estimator: expected None where nothing is in the loss "
                f"(placement {self.placement}), got {self.grad_estimator}; choose "
                f"placement loss or both, or leave it out"
            )
        if self.clip is not None:
            checks.positive(clip=self.clip)
        if self.top_k is not None and (self.top_k < 1 or not self.needs_logits):
            raise InputError(
                f"top_k: expected 1 word or more, and an exact estimator, got "
                f"{self.top_k} with {' and '.join(self._estimators)}; choose "
                f"value_estimator exact, or leave top_k out"
            )
        self._check_weights()

    def _check_names(self) -> None:
        for name, value, known in (
            ("value_estimator", self.value_estimator, get_args(Estimator)),
            ("grad_estimator", self.grad_estimator, (None, *get_args(Estimator))),
            ("placement", self.placement, (None, "reward", "loss", "both")),
            ("direction", self.direction, get_args(estimators.Direction)),
            ("per", self.per, ("token", "response", "length")),
            ("importance_weights", self.importance_weights, (None, "token", "prefix")),
        ):
            if value not in known:
                raise InputError(
                    f"{name}: expected one of {', '.join(map(str, known))}, got "
                    f"{value!r}; choose one of them"
                )

    def _check_weights(self) -> None:
        sampled = [each for each in self._estimators if each != "exact"]
        if self.direction == "forward" and self.importance_weights is None and sampled:
            raise InputError(
                f"importance_weights: expected token or prefix for {sampled[0]} of a "
                f"forward KL, which is a mean over samples of the reference, got none "
                f"for samples of the policy; choose importance_weights, the exact "
                f"estimator, or direction reverse"
            )
        if self.importance_weights is None:
            return
        if self.direction == "reverse" and not self.in_loss:
            raise InputError(
                f"importance_weights: expected none where a reverse KL is only in the "
                f"reward, got {self.importance_weights}; the policy that samples is "
                f"the one that is priced there, so that each weight is 1"
            )
        if self.importance_weights == "token" and (
            self.per == "response" or not sampled
        ):
            what = "one response" if self.per == "response" else "an exact estimator"
            raise InputError(
                f"importance_weights: expected prefix or none for {what}, got token; a "
                f"token's own weight says nothing about what stands before it"
            )

    @property
    def in_reward(self) -> bool:
        """True if the value is a part of the reward."""
        return self.placement in ("reward", "both")

    @property
    def in_loss(self) -> bool:
        """True if the estimate is a term of the loss."""
        return self.placement in ("loss", "both")

    @property
    def in_gradient(self) -> Estimator:
        """The estimator that the loss differentiates."""
        if self.grad_estimator is None:
            return self.value_estimator
        return self.grad_estimator

    @property
    def needs_logits(self) -> bool:
        """True if the exact KL is wanted somewhere: log-probs alone do not do."""
        return "exact" in self._estimators

    @property
    def reward_needs_logits(self) -> bool:
        """True if `reward_kl` takes the exact KL."""
        return self.value_estimator == "exact"

    @property
    def loss_needs_logits(self) -> bool:
        """True if `kl_loss` takes the exact KL, and the update so the reference."""
        return self.in_loss and self.needs_logits

    @property
    def _estimators(self) -> tuple[Estimator, ...]:
        both = (self.value_estimator, self.in_gradient)
        return both[:1] if both[0] == both[1] else both

    @property
    def terms(self) -> dict[str, int]:
        """The expected gradient as a sum, {name: how many of it}; {} is zero."""
        return gradients.terms(
            in_reward=self.value_estimator if self.in_reward else None,
            in_loss=self.in_gradient if self.in_loss else None,
            direction=self.direction,
            per_response=self.per == "response",
            importance_weights=self.importance_weights,
            top_k=self.top_k is not None,
        )

    @property
    def gradient(self) -> str:
        """The name of the expected gradient on-policy, as `gradients` has it.

        With weights "prefix" it is that on samples of an older policy too. With "token"
        a fixed-state gradient is at the older policy's prefixes. Where responses differ
        in length it is that of aggregation "constant", and of no other.
        """
        if self.placement is None:
            return "none"
        name = gradients.name(self.terms)
        if self.per == "length":
            name += ", each response's divided by its length"
        return name

    @property
    def warning(self) -> str | None:
        """What to say, once, where this gradient is that of no KL; None where it is."""
        if self.placement is None:
            return None
        if gradients.is_kl(self.terms) and self.per != "length":
            return None
        places = [f"{self.value_estimator} in the reward"] if self.in_reward else []
        places += [f"{self.in_gradient} in the loss"] if self.in_loss else []
        what = f"{' and '.join(places)}, {self.direction}, per {self.per}"
        if not self.terms and self.per != "length":
            return (
                f"KL penalty ({what}): its expected gradient is zero, so that it does "
                f"not hold the policy; choose k2 in the loss, or k1 in the reward"
            )
        return (
            f"KL penalty ({what}): its expected gradient is that of no KL, it is "
            f"{self.gradient}; k1 in the reward gives full reverse"
        )


IN_REWARD = Penalty()
IN_LOSS = Penalty(grad_estimator="k2", placement="loss")


def reward_kl(
    *,
    penalty: Penalty,
    logprobs: Array,
    ref_logprobs: Array,
    mask: Array,
    exact: Array | None = None,
) -> tuple[Array, Stats]:
    """The value that `token_rewards` multiplies by -β.

    Args:
      penalty: which estimate; its placement is not read here.
      logprobs: f32[B, S], nats, of the policy that sampled; column t is about
        tokens[:, t].
      ref_logprobs: f32[B, S], nats, of the reference.
      mask: bool[B, S], response tokens, EOS included.
      exact: f32[B, S], nats, of `kl.exact_from_hidden` in the penalty's direction;
        wanted where value_estimator is exact.

    Returns:
      f32[B, S], nats, 0 outside the mask, without gradient, and {name: (sum, weight)}:
      where clip is set `penalty/clipfrac`, the share of estimates that it cut; of k3
      or with weights `penalty/overflowfrac`, the share held where float32 ends.

    Raises:
      InputError: exact is wanted and not there. ValueError: shapes differ.
      TypeError: floats are not f32 or mask is not bool.
    """
    _check(mask, exact, logprobs=logprobs, ref_logprobs=ref_logprobs)
    log_ratio = _log_ratio(penalty.direction, logprobs, ref_logprobs)
    # Of the policy that samples: only a forward KL has weights here, π_ref/π.
    weighted = penalty.direction == "forward" and penalty.importance_weights is not None
    found = _estimates(
        penalty,
        log_ratio=log_ratio,
        log_weights=log_ratio if weighted else None,
        mask=mask,
        exact=exact,
        estimator=penalty.value_estimator,
    )
    stats: Stats = {} if penalty.clip is None else {"penalty/clipfrac": found.clipfrac}
    if penalty.value_estimator == "k3" or weighted:
        stats["penalty/overflowfrac"] = found.overflowfrac
    return jax.lax.stop_gradient((found.kl * _share(penalty, mask), stats))


def kl_loss(
    *,
    penalty: Penalty,
    logprobs: Array,
    old_logprobs: Array,
    ref_logprobs: Array,
    mask: Array,
    weights: Array,
    exact: Array | None = None,
) -> tuple[Array, Stats]:
    """Σ weights·kl with kl = w·(g + stop_gradient(v - g)); β is the caller's factor.

    v is the value estimator, g the gradient estimator and w the importance weight
    (reverse π/π_old, forward π_ref/π_old), which is not differentiated.

    Args:
      penalty: which estimates; its placement is not read here.
      logprobs: f32[B, S], nats, of the policy now; column t is about tokens[:, t].
      old_logprobs: f32[B, S], nats, of the policy that sampled.
      ref_logprobs: f32[B, S], nats, of the reference.
      mask: bool[B, S], response tokens, EOS included.
      weights: f32[B, S], dimensionless, of `losses.token_weights`; those of a whole
        minibatch sum to 1, so that its micro-batches add up. An estimate of a whole
        response takes the weight of the last token.
      exact: f32[B, S], nats, of `kl.exact_from_hidden` in the penalty's direction and
        with its gradient; wanted where an estimator is exact.

    Returns:
      f32[] loss, nats, and {name: (sum, weight)}. The gradient reaches `logprobs` and
      `exact`; none comes from an estimate that was clipped. `loss/kl`: the values
      (weighted by w, clipped, not divided by a length), nats per token. Where clip is
      set `loss/kl_clipfrac`: the share of estimates that it cut. Of k3 or with weights
      `loss/kl_overflowfrac`: the share held where float32 ends, value and slope: k3 at
      e^88.72, another at the largest weight with which its product is a float32.

    Raises:
      InputError: exact is wanted and not there. ValueError: shapes differ.
      TypeError: floats are not f32 or mask is not bool.

    Source: Schulman 2020, joschu.net/blog/kl-approx; Tang and Munos 2025,
    arXiv:2506.09477, on what their gradients are.
    """
    floats = {"logprobs": logprobs, "old_logprobs": old_logprobs}
    floats |= {"ref_logprobs": ref_logprobs, "weights": weights}
    _check(mask, exact, **floats)
    fixed, old_logprobs = jax.lax.stop_gradient((ref_logprobs, old_logprobs))
    log_weights = None
    if penalty.importance_weights is not None:
        target = logprobs if penalty.direction == "reverse" else fixed
        log_weights = estimators.k1(target, old_logprobs)
    found = _estimates(
        penalty,
        log_ratio=_log_ratio(penalty.direction, logprobs, fixed),
        log_weights=log_weights,
        mask=mask,
        exact=exact,
        estimator=penalty.in_gradient,
    )
    weights = jax.lax.stop_gradient(jnp.where(mask, weights, 0.0))
    loss = jnp.sum(weights * found.kl * _share(penalty, mask))
    num_tokens = jnp.sum(mask, dtype=jnp.float32)
    stats: Stats = {"loss/kl": (jnp.sum(found.kl), num_tokens)}
    if penalty.clip is not None:
        stats["loss/kl_clipfrac"] = found.clipfrac
    if "k3" in penalty._estimators or log_weights is not None:
        stats["loss/kl_overflowfrac"] = found.overflowfrac
    return loss, jax.lax.stop_gradient(stats)


class _Estimates(NamedTuple):
    kl: Array  # f32[B, S], nats, 0 where no estimate stands
    clipfrac: tuple[Array, Array]  # estimates that were clipped, estimates
    overflowfrac: tuple[Array, Array]  # held where float32 ends, estimates


def _estimates(
    penalty: Penalty,
    *,
    log_ratio: Array,
    log_weights: Array | None,
    mask: Array,
    exact: Array | None,
    estimator: Estimator,
) -> _Estimates:
    """The values, with the gradient of `estimator`."""
    cells = _last(mask) if penalty.per == "response" else mask
    x = _placed(penalty, log_ratio, mask, cells)
    if exact is not None:
        exact = _placed(penalty, exact, mask, cells)
    log_weights = _log_importance(penalty, log_weights, mask, cells)
    value = _weighted(penalty.value_estimator, x, exact, log_weights)
    kept = cells
    if penalty.clip is not None:
        kept = cells & (jnp.abs(value) <= penalty.clip)
        value = jnp.clip(value, -penalty.clip, penalty.clip)
        # Selected before the estimator: an infinite slope times 0 would be NaN.
        x = jnp.where(kept, x, 0.0)
        exact = None if exact is None else jnp.where(kept, exact, 0.0)
    slope = _weighted(estimator, x, exact, log_weights)
    slope = jnp.where(kept, slope - jax.lax.stop_gradient(slope), 0.0)
    clipped = jnp.sum(cells & ~kept, dtype=jnp.float32)
    held = log_weights > _most(_estimate(estimator, x, exact))
    if "k3" in penalty._estimators:
        far = _far(x, log_weights)
        held = jnp.where(far, log_weights - x > ratios.LARGEST, held)
    estimates = jnp.sum(cells, dtype=jnp.float32)
    return _Estimates(
        kl=jax.lax.stop_gradient(value) + slope,
        clipfrac=(clipped, estimates),
        overflowfrac=(jnp.sum(held & kept, dtype=jnp.float32), estimates),
    )


def _weighted(
    estimator: Estimator, x: Array, exact: Array | None, log_weights: Array
) -> Array:
    """The estimate times exp(log_weights), which is not differentiated."""
    if estimator != "k3":
        return _times(_estimate(estimator, x, exact), log_weights)
    far = _far(x, log_weights)
    near = _times(_estimate("k3", jnp.where(far, 0.0, x), exact), log_weights)
    # Far out exp(-x) is all of k3 but less than a digit. Times its weight it is taken
    # as one exponential, which may be finite where the factors are not.
    return jnp.where(far, ratios.held_exp(jnp.where(far, log_weights - x, 0.0)), near)


def _times(estimate: Array, log_weights: Array) -> Array:
    return jnp.exp(jnp.minimum(log_weights, _most(estimate))) * estimate


def _most(estimate: Array) -> Array:
    """The largest log-weight, nats, with which value and slope are float32."""
    size = jnp.maximum(2.0, 4.0 * jnp.abs(jax.lax.stop_gradient(estimate)))
    return ratios.LARGEST - jnp.log(size)


def _far(x: Array, log_weights: Array) -> Array:
    """Where k3 or its weighted form comes near the end of float32."""
    return (x < -20) & (jnp.maximum(log_weights, 0.0) - x > ratios.LARGE)


def _estimate(estimator: Estimator, x: Array, exact: Array | None) -> Array:
    match estimator:
        case "k1":
            return x
        case "k2":
            return estimators.k2(x, jnp.zeros_like(x))
        case "k3":
            return estimators.k3(x, jnp.zeros_like(x))
        case "exact":
            if exact is None:
                raise InputError(
                    "exact: expected the exact KL f32[B, S] for the exact estimator, "
                    "got log-probs only; pass kl.exact_from_hidden of both models' "
                    "hidden states, or choose k1, k2 or k3"
                )
            return exact


def _log_ratio(
    direction: estimators.Direction, logprobs: Array, ref_logprobs: Array
) -> Array:
    """x with E[x] the KL of this direction, under samples of its first distribution."""
    if direction == "reverse":
        return estimators.k1(logprobs, ref_logprobs)
    return estimators.k1(ref_logprobs, logprobs)


def _log_importance(
    penalty: Penalty, log_weights: Array | None, mask: Array, cells: Array
) -> Array:
    """f32[B, S], nats, without gradient; 0 where no weights are asked for."""
    if log_weights is None:
        return jnp.zeros(mask.shape, jnp.float32)
    log_weights = jax.lax.stop_gradient(log_weights)
    if penalty.importance_weights == "prefix" and penalty.per != "response":
        log_weights = jnp.cumsum(jnp.where(mask, log_weights, 0.0), axis=1)
    return _placed(penalty, log_weights, mask, cells)


def _placed(penalty: Penalty, x: Array, mask: Array, cells: Array) -> Array:
    """x where an estimate stands, there its sum over the response if that is asked."""
    if penalty.per == "response":
        x = masked.masked_sum(x, mask=mask, axis=1)[:, None]
    return jnp.where(cells, x, 0.0)


def _share(penalty: Penalty, mask: Array) -> Array:
    """f32[B, 1]: what an estimate is multiplied by, 1 or 1 / response length."""
    length = jnp.sum(mask, axis=1, dtype=jnp.float32, keepdims=True)
    if penalty.per != "length":
        return jnp.ones_like(length)
    return 1.0 / jnp.maximum(length, 1.0)


def _last(mask: Array) -> Array:
    """bool[B, S], the last True of each row alone."""
    columns = jnp.arange(mask.shape[1], dtype=jnp.int32)[None, :]
    last = jnp.max(columns, axis=1, where=mask, initial=-1, keepdims=True)
    return columns == last


def _check(mask: Array, exact: Array | None, **floats: Array) -> None:
    checks.shape((None, None), mask=mask)
    if exact is not None:
        floats["exact"] = exact
    checks.same_shape(**floats, mask=mask)
    checks.float32(**floats)
    checks.boolean(mask=mask)
