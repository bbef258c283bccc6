"""DPO: PackedPreferences -> SupervisedState, preferences without a reward model.

    preferences ─────────────────────────┬─> update
         └───> reference_logprobs ───────┘

The reference is a part of the loss. Its log-probs are taken by `reference_logprobs`, a
forward pass of a frozen model or of the base under LoRA, inside `update`, in a program
of its own, or once for all epochs (`precomputed`): the same numbers.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PackedPreferences
from rlhf_jax.algorithms.state import (
    Optimizer,
    SupervisedState,
    accumulate,
    supervised_step,
)
from rlhf_jax.functional import checks, masked, preference_losses
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.preference_losses import DPOKind
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles import adapted, policy
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPORecipe:
    """The coefficients and choices of DPO; an option group of a command line."""

    beta: float = 0.1
    """KL coefficient β, reward units per nat; a smaller one lets the policy move
    farther."""
    kind: DPOKind = "sigmoid"
    """Loss of the pair's margin: DPO's own, IPO's or the hinge of SLiC."""
    label_smoothing: float = 0.0
    """Probability that a preference is the wrong way round (cDPO); for sigmoid."""
    token_mean: bool = False
    """Whether IPO takes the mean log-prob of a response's tokens instead of their sum;
    beta is then reward units per nat per token."""
    reference_free: bool = False
    """Whether the reference is left out, for comparison; sigmoid or hinge."""
    temperature: float = 1.0
    """Temperature that divides the logits of policy and reference."""
    micro_batch_size: int | None = None
    """Rows per forward and backward pass; None is all of a batch."""

    def __post_init__(self) -> None:
        preference_losses.check_dpo(
            beta=self.beta,
            kind=self.kind,
            label_smoothing=self.label_smoothing,
            reference_free=self.reference_free,
        )
        if self.token_mean and self.kind != "ipo":
            raise InputError(
                f"token_mean: expected False with kind {self.kind!r}, whose implicit "
                f"reward is β log π/π_ref of whole responses, got True; leave it out, "
                f"or choose ipo"
            )
        checks.positive(temperature=self.temperature)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPO(DPORecipe):
    """A recipe with its shape and optimizer; hashable, so static under `jax.jit`.

    `DPO(**vars(recipe), model=...)` makes one of a `DPORecipe`.
    """

    model: ModelConfig  # of the policy, and of a reference that has none of its own
    optimizer: Optimizer
    lora: LoRA | None = None  # of adapters over a base; None trains every parameter


def reference_logprobs(
    reference: Frozen, *, batch: PackedPreferences, dpo: DPO
) -> Array:
    """log π_ref of every token of every pair.

    Args:
      reference: the frozen policy, or the base of adapters; stored in any way.
      batch: PackedPreferences[B, S].
      dpo: static.

    Returns:
      f32[B, S], nats; 0 at padding and at the first token of each text. No gradient
      reaches the reference.
    """
    model = frozen.shape_of(reference, policy=dpo.model)
    own = dataclasses.replace(dpo, model=model)
    return token_logprobs(frozen.read(reference), batch=batch, dpo=own)


def token_logprobs(params: Params, *, batch: PackedPreferences, dpo: DPO) -> Array:
    """As `reference_logprobs`, of parameters that a gradient reaches."""
    return policy.logprobs(
        params,
        model=dpo.model,
        tokens=batch.tokens,
        mask=batch.mask,
        temperature=dpo.temperature,
        segments=batch.segments,
    )


def pair_logprobs(
    logprobs: Array, *, batch: PackedPreferences, token_mean: bool = False
) -> tuple[Array, Array]:
    """Sums over the responses: log π(chosen | prompt) and log π(rejected | prompt).

    Args:
      logprobs: f32[B, S], nats per token; those outside `response_mask` are not read.
      batch: PackedPreferences[B, S].
      token_mean: divide each sum by the response's tokens, EOS included.

    Returns:
      f32[B, K] each, nats, or nats per token with token_mean; 0 where there is no pair.

    Raises:
      ValueError: shapes do not belong together. TypeError: logprobs is not f32.
    """
    checks.same_shape(logprobs=logprobs, tokens=batch.tokens)
    checks.float32(logprobs=logprobs)
    texts = 1 + jnp.arange(2 * batch.pairs.shape[1], dtype=jnp.int32)
    of_text = batch.segments[:, :, None] == texts[None, None, :]
    responses = of_text & batch.response_mask[:, :, None]
    # Not a product with ones: that would round on devices that multiply in bfloat16.
    sums = jnp.sum(jnp.where(responses, logprobs[:, :, None], 0.0), axis=1)
    if token_mean:
        lengths = jnp.sum(responses, axis=1, dtype=jnp.float32)
        sums = sums / jnp.maximum(lengths, 1.0)
    return sums[:, 0::2], sums[:, 1::2]


def loss(
    params: Params,
    batch: PackedPreferences,
    *,
    ref_logprobs: Array | None,
    dpo: DPO,
    num_pairs: Array | None = None,
) -> tuple[Array, masked.Stats]:
    """The loss of the pairs, all their responses in one forward pass.

    Args:
      params: the decoder's, adapters applied.
      batch: PackedPreferences[b, S].
      ref_logprobs: f32[b, S], nats, `reference_logprobs` of the same rows; None with
        `reference_free`.
      dpo: static.
      num_pairs: f32[], pairs in the whole batch; None counts these.

    Returns:
      f32[] and the stats of `losses.dpo_loss`. No gradient reaches ref_logprobs.

    Raises:
      InputError: ref_logprobs is missing, or given without being read.
      ValueError: shapes differ. TypeError: floats are not f32.
    """
    if dpo.reference_free != (ref_logprobs is None):
        raise InputError(
            "expected no ref_logprobs with reference_free, got some, which would not "
            "be read; leave one of them out"
            if dpo.reference_free
            else "expected ref_logprobs, as DPO is a loss of what the policy says over "
            "what its reference says, got none; give them (`reference_logprobs`), or "
            "set reference_free"
        )
    chosen, rejected = pair_logprobs(
        token_logprobs(params, batch=batch, dpo=dpo),
        batch=batch,
        token_mean=dpo.token_mean,
    )
    ref_chosen, ref_rejected = None, None
    if ref_logprobs is not None:
        pairs = pair_logprobs(ref_logprobs, batch=batch, token_mean=dpo.token_mean)
        ref_chosen, ref_rejected = (numbers.reshape(-1) for numbers in pairs)
    return preference_losses.dpo_loss(
        chosen_logprobs=chosen.reshape(-1),
        rejected_logprobs=rejected.reshape(-1),
        ref_chosen_logprobs=ref_chosen,
        ref_rejected_logprobs=ref_rejected,
        beta=dpo.beta,
        kind=dpo.kind,
        label_smoothing=dpo.label_smoothing,
        num_pairs=num_pairs,
        mask=batch.pairs.reshape(-1),
    )


def measure(
    trained: Params,
    *,
    batch: PackedPreferences,
    dpo: DPO,
    ref_logprobs: Array | None = None,
    base: Frozen | None = None,
) -> masked.Stats:
    """The stats of `loss` for pairs that are not trained on.

    Args:
      trained: the policy's parameters, or its adapters over `base`.
      batch: PackedPreferences[B, S].
      dpo: the loss and its coefficients.
      ref_logprobs: f32[B, S], nats, of the reference; None computes them by `base`.
      base: the parameters that adapters adapt; None without adapters.

    Returns:
      {name: (sum, weight)}.

    Raises:
      InputError: base and lora are not given together, or adapters do not fit.
    """
    if ref_logprobs is None and base is not None and not dpo.reference_free:
        ref_logprobs = reference_logprobs(base, batch=batch, dpo=dpo)
    params = adapted.params(trained, base=base, lora=dpo.lora)
    return loss(params, batch, ref_logprobs=ref_logprobs, dpo=dpo)[1]


def update(
    state: SupervisedState,
    *,
    batch: PackedPreferences,
    dpo: DPO,
    ref_logprobs: Array | None = None,
    reference: Frozen | None = None,
    base: Frozen | None = None,
) -> tuple[SupervisedState, masked.Stats]:
    """One optimizer step.

    Args:
      state: of `state.supervised_state`; donated by the caller's `jit`.
      batch: PackedPreferences[B, S].
      dpo: static.
      ref_logprobs: f32[B, S], nats, `reference_logprobs` of this batch, live or
        precomputed; `reference` is not run then.
      reference: the frozen policy, run here; else None.
      base: with adapters as the state's parameters, else None. It is the reference
        where neither ref_logprobs nor reference is given.

    Returns:
      The next state and the stats of `loss` and `state.supervised_step`.

    Raises:
      InputError: there is no reference to be had, or one that would not be read;
        micro_batch_size does not divide B, base and lora are not given
        together, or adapters do not fit.
    """
    if reference is not None and (dpo.reference_free or ref_logprobs is not None):
        other = "reference_free" if dpo.reference_free else "ref_logprobs"
        raise InputError(
            f"expected no reference with {other}, got one, which would not be read; "
            f"leave one of them out"
        )
    frozen_model = base if reference is None else reference
    if ref_logprobs is None and frozen_model is not None and not dpo.reference_free:
        ref_logprobs = reference_logprobs(frozen_model, batch=batch, dpo=dpo)
    num_pairs = batch.pairs.sum(dtype=jnp.float32)
    grads, stats = accumulate(
        lambda trained, part: loss(
            adapted.params(trained, base=base, lora=dpo.lora),
            part[0],
            ref_logprobs=part[1],
            dpo=dpo,
            num_pairs=num_pairs,
        ),
        state.params,
        (batch, ref_logprobs),
        micro_batch_size=dpo.micro_batch_size,
    )
    return supervised_step(state, grads, stats, optimizer=dpo.optimizer)
