"""The update of DPO: PackedPreferences -> SupervisedState.

    preferences ─────────────────────────┬─> update
         └───> reference_logprobs ───────┘

The loss (`pair_loss.py`) needs the reference's log-probs, except for kinds without a
reference. `reference_logprobs` computes them by a forward pass of a frozen model, or of
the base under LoRA: inside `update`, in a program of its own, or once for all epochs
(`precomputed`), with equal results.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import PackedPreferences
from rlhf_jax.algorithms.dpo.pair_loss import kto_baseline, loss, reference_logprobs
from rlhf_jax.algorithms.dpo.recipe import DPO
from rlhf_jax.algorithms.state import SupervisedState, supervised_update
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import Frozen, adapted_params

Array = jax.Array
Params = Any


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
      ref_logprobs: f32[B, S], nats, of the reference; None computes them from `base`.
    """
    if ref_logprobs is None and base is not None and dpo.has_reference:
        ref_logprobs = reference_logprobs(base, batch=batch, dpo=dpo)
    params = adapted_params(trained, base=base, lora=dpo.lora)
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
      ref_logprobs: f32[B, S], nats, `reference_logprobs` of this batch; None runs
        `reference` or `base` here.
      reference: the frozen reference, if it is to be run here; else None.
      base: the base under adapters, else None. It is the reference where neither
        ref_logprobs nor reference is given.

    Raises:
      InputError: a reference is missing, or given but not read; micro_batch_size does
        not divide B; base and lora are not given together; adapters do not fit.
    """
    if reference is not None and (not dpo.has_reference or ref_logprobs is not None):
        other = "reference_free" if dpo.reference_free else f"kind {dpo.kind!r}"
        other = "ref_logprobs" if dpo.has_reference else other
        raise InputError(
            f"expected no reference with {other}, got one, which would not be read; "
            f"leave one of them out"
        )
    # Under LoRA the base is the policy at its start: no second copy of the model.
    frozen_model = base if reference is None else reference
    if ref_logprobs is None and frozen_model is not None and dpo.has_reference:
        ref_logprobs = reference_logprobs(frozen_model, batch=batch, dpo=dpo)
    num_pairs, kl = batch.pairs.sum(dtype=jnp.float32), None
    # z0 is a mean over the whole batch, which a micro-batch cannot compute.
    cut = dpo.micro_batch_size not in (None, len(batch.tokens))
    if dpo.kind == "kto" and cut and ref_logprobs is not None:
        kl = kto_baseline(
            state.params, batch=batch, ref_logprobs=ref_logprobs, dpo=dpo, base=base
        )
    return supervised_update(
        state,
        # Micro-batches cut the reference's log-probs along with their rows.
        batch=(batch, ref_logprobs),
        loss=lambda params, part: loss(
            params, part[0], ref_logprobs=part[1], dpo=dpo, num_pairs=num_pairs, kl=kl
        ),
        optimizer=dpo.optimizer,
        micro_batch_size=dpo.micro_batch_size,
        base=base,
        lora=dpo.lora,
    )
