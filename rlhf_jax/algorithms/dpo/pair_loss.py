"""The loss of packed preferences, from log-probs of whole responses.

policy ─────> token_logprobs ─────> pair_logprobs ─┐
reference ──> reference_logprobs ─> pair_logprobs ─┴─> loss, by its kind
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PackedPreferences
from rlhf_jax.algorithms.dpo.recipe import DPO
from rlhf_jax.algorithms.state import micro_batches
from rlhf_jax.functional import checks, masked, preference_losses
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles import policy
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen, adapted_params

Array = jax.Array
Params = Any


@jax.named_scope("reference")
def reference_logprobs(
    reference: Frozen, *, batch: PackedPreferences, dpo: DPO
) -> Array:
    """log π_ref of every token of every pair, f32[B, S], nats, without gradient."""
    model = frozen.shape_of(reference, policy=dpo.model)
    # The reference may have its own shape; temperature and the rest are the policy's.
    own = dataclasses.replace(dpo, model=model)
    return token_logprobs(frozen.read(reference), batch=batch, dpo=own)


def token_logprobs(params: Params, *, batch: PackedPreferences, dpo: DPO) -> Array:
    """log π of every token of every pair.

    Returns:
      f32[B, S], nats; 0 at padding and at the first token of each text.
    """
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
      logprobs: f32[B, S], nats per token; not read outside `response_mask`.
      token_mean: divide each sum by the response's tokens, EOS included.

    Returns:
      f32[B, K] each, nats, or nats per token with token_mean; 0 where there is no pair.
    """
    checks.same_shape(logprobs=logprobs, tokens=batch.tokens)
    checks.float32(logprobs=logprobs)
    texts = 1 + jnp.arange(2 * batch.pairs.shape[1], dtype=jnp.int32)
    # bool[B, S, 2K]: which of the row's 2K texts a token belongs to.
    of_text = batch.segments[:, :, None] == texts[None, None, :]
    responses = of_text & batch.response_mask[:, :, None]
    # Not a product with ones, which rounds on devices that multiply in bfloat16.
    sums = jnp.sum(jnp.where(responses, logprobs[:, :, None], 0.0), axis=1)
    if token_mean:
        lengths = jnp.sum(responses, axis=1, dtype=jnp.float32)
        # A row with fewer than K pairs has texts without a token: avoid 0/0.
        sums = sums / jnp.maximum(lengths, 1.0)
    # Segments alternate: chosen, rejected, chosen, ...
    return sums[:, 0::2], sums[:, 1::2]


def loss(
    params: Params,
    batch: PackedPreferences,
    *,
    ref_logprobs: Array | None,
    dpo: DPO,
    num_pairs: Array | None = None,
    kl: Array | None = None,
) -> tuple[Array, masked.Stats]:
    """The loss of the pairs, from one forward pass over all responses.

    Args:
      batch: PackedPreferences[b, S]; with labels for KTO.
      ref_logprobs: f32[b, S], nats, `reference_logprobs` of the same rows; None without
        a reference (`DPO.has_reference`).
      num_pairs: f32[], pairs in the whole batch; None counts the pairs of these rows.
      kl: f32[], nats per response, `kto_baseline` of the whole batch; None computes
        KTO's z0 from these rows.

    Returns:
      f32[] and the stats of `losses.dpo_loss`, `simpo_loss`, `orpo_loss` or
      `kto_loss`. No gradient reaches ref_logprobs or kl.

    Raises:
      InputError: ref_logprobs is missing, or given but not read; labels are missing for
        kto, or given for another kind.
    """
    if dpo.has_reference == (ref_logprobs is None):
        free = "reference_free" if dpo.reference_free else f"kind {dpo.kind!r}"
        or_free = "" if dpo.kind in ("ipo", "kto") else ", or set reference_free"
        raise InputError(
            f"expected no ref_logprobs with {free}, got some, which would not "
            "be read; leave one of them out"
            if ref_logprobs is not None
            else "expected ref_logprobs, as DPO is a loss of log-ratios to a "
            "reference, got none; give them (`reference_logprobs`)"
            f"{or_free}"
        )
    if (dpo.kind == "kto") != (batch.labels is not None):
        needs = "labels" if dpo.kind == "kto" else "no labels"
        raise InputError(
            f"expected pairs with {needs} for kind {dpo.kind!r}, got others; see "
            f"data.unpaired"
        )
    means = {"batch": batch, "token_mean": dpo.mean_logprobs}
    both = pair_logprobs(token_logprobs(params, batch=batch, dpo=dpo), **means)
    ref_chosen, ref_rejected = None, None
    if ref_logprobs is not None:
        of_reference = pair_logprobs(ref_logprobs, **means)
        ref_chosen, ref_rejected = (numbers.reshape(-1) for numbers in of_reference)
    chosen, rejected = (numbers.reshape(-1) for numbers in both)
    pairs = {"num_pairs": num_pairs, "mask": batch.pairs.reshape(-1)}
    match dpo.kind:
        case "simpo":
            return preference_losses.simpo_loss(
                chosen_logprobs=chosen,
                rejected_logprobs=rejected,
                beta=dpo.beta,
                target_margin=dpo.target_margin,
                **pairs,
            )
        case "orpo":
            return preference_losses.orpo_loss(
                chosen_logprobs=chosen,
                rejected_logprobs=rejected,
                odds_weight=dpo.beta,
                **pairs,
            )
        case "kto":
            assert batch.labels is not None
            assert ref_chosen is not None
            assert ref_rejected is not None
            if kl is None:
                kl = preference_losses.kto_kl(
                    logprobs=rejected, ref_logprobs=ref_rejected, mask=pairs["mask"]
                )
            return preference_losses.kto_loss(
                logprobs=chosen,
                ref_logprobs=ref_chosen,
                desirable=batch.labels.reshape(-1),
                kl=kl,
                beta=dpo.beta,
                desirable_weight=dpo.desirable_weight,
                undesirable_weight=dpo.undesirable_weight,
                num_texts=num_pairs,
                mask=pairs["mask"],
            )
    return preference_losses.dpo_loss(
        chosen_logprobs=chosen,
        rejected_logprobs=rejected,
        ref_chosen_logprobs=ref_chosen,
        ref_rejected_logprobs=ref_rejected,
        beta=dpo.beta,
        kind=dpo.dpo_kind,
        label_smoothing=dpo.label_smoothing,
        **pairs,
    )


def kto_baseline(
    trained: Params,
    *,
    batch: PackedPreferences,
    ref_logprobs: Array,
    dpo: DPO,
    base: Frozen | None = None,
) -> Array:
    """KTO's z0 of a whole batch, by one more forward pass, one micro-batch at a time.

    Args:
      batch: PackedPreferences[B, S], whose rejected texts belong to other prompts.

    Returns:
      f32[], nats per response. No gradient reaches any argument.
    """
    params = adapted_params(trained, base=base, lora=dpo.lora)
    parts = micro_batches(batch, micro_batch_size=dpo.micro_batch_size)
    # A loop, not `vmap`: the activations of one micro-batch are alive at a time.
    logprobs = jax.lax.map(
        lambda part: pair_logprobs(
            token_logprobs(params, batch=part, dpo=dpo), batch=part
        )[1],
        parts,
    )
    # `micro_batches` gives each part every n-th row; restore the order of the batch.
    rejected = logprobs.swapaxes(0, 1).reshape(batch.pairs.shape)
    return preference_losses.kto_kl(
        logprobs=rejected.reshape(-1),
        ref_logprobs=pair_logprobs(ref_logprobs, batch=batch)[1].reshape(-1),
        mask=batch.pairs.reshape(-1),
    )
