"""The self-check of a run on its first rollout, before the first update.

Two facts must hold. The trainer's log-probs of the sampled tokens equal the sampler's:
otherwise their temperatures, columns, masks or positions disagree, and every ratio is
wrong. While the policy still *is* the reference, their KL is 0: otherwise one of them
is another model, or is read differently. The run stops if either fails.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.flow.rollout import response_logprobs
from rlhf_jax.functional.checks import StopError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA, changes_nothing
from rlhf_jax.models.packing import SizedPacking
from rlhf_jax.roles.reference import fingerprint, frozen
from rlhf_jax.roles.reference.frozen import Frozen, adapted_params

Array = jax.Array
Params = Any

# Largest mean |Δ log-prob| of a response, nats per token: by compute dtype, as cached
# decoding and full forward pass sum in different orders, and by storage dtype of a
# reference, whose parameters are rounded.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3, "int8": 1e-1}


class SelfCheckError(StopError):
    """The self-check failed: the run would optimise something else."""


@flax.struct.dataclass
class Measured:
    """The log-probs to compare, at the response tokens of the first rollout."""

    trainer: Array  # f32[B, S], nats, from a full forward pass of the policy
    sampler: Array  # f32[B, S], nats, recorded while sampling
    reference: Array | None  # f32[B, S], nats
    mask: Array  # bool[B, S]
    starts_equal: Array  # bool[], the policy has the reference's parameters


def measure(
    policy: Params,
    *,
    rollout: Rollout,
    reference: Frozen | None,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
    base: Frozen | None = None,
    lora: LoRA | None = None,
    ref_logprobs: Array | None = None,
    packing: SizedPacking | None = None,
) -> Measured:
    """Recomputes the rollout's log-probs by policy and reference; a pure function.

    Args:
      policy: the parameters that sampled the rollout, not updated since.
      reference: None, without `ref_logprobs`, checks no KL.
      ref_logprobs: f32[B, S], nats, of the reference, from the program that scores
        every rollout; `reference` is then not run. Without `reference` the caller says
        whether the policy starts as the reference (`require`).
      packing: packed layout in which the update will read the rollout; None reads
        padded rows.
    """

    def recomputed(params: Params, model: ModelConfig) -> Array:
        return response_logprobs(
            params,
            rollout=rollout,
            model=model,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            packing=packing,
        )

    params = adapted_params(policy, base=base, lora=lora)
    # Without a reference, or with another structure, equality is not required.
    equal = jnp.zeros((), bool)
    if reference is not None:
        if base is None:
            digests, unmoved = fingerprint.digests(policy), True
        else:
            # Under LoRA the base equals the policy as long as the adapters add 0.
            digests, unmoved = base.source_digests, changes_nothing(policy)
        if digests.shape == reference.source_digests.shape:
            equal = (digests == reference.source_digests).all() & unmoved
    if reference is not None and ref_logprobs is None:
        shape = frozen.shape_of(reference, policy=model)
        ref_logprobs = recomputed(frozen.read(reference), shape)
    return Measured(
        trainer=recomputed(params, model),
        sampler=rollout.behaviour_logprobs,
        reference=ref_logprobs,
        mask=rollout.response_mask,
        starts_equal=equal,
    )


def require(
    measured: Measured,
    *,
    tolerance: float,
    sampler_tolerance: float = 0.0,
    storage_tolerance: float = 0.0,
    expect_equal: bool = False,
) -> None:
    """Raises an error unless both facts hold.

    Args:
      tolerance: bound of the mean |trainer - sampler| of any response, nats per token
        (`TOLERANCE`).
      sampler_tolerance: added to `tolerance` for responses that were sampled with
        parameters of fewer bits.
      storage_tolerance: added to `tolerance` for the mean |trainer - reference|, for a
        reference stored in fewer bits than the policy.
      expect_equal: the policy must start as the reference. By default it must only if
        their fingerprints are equal, so that a policy may start elsewhere.

    Raises:
      SelfCheckError: names the pair that differs, by how much, and where most.
    """
    # One transfer for all arrays; NumPy compares them on the host.
    measured = jax.device_get(measured)
    compare(
        measured.trainer,
        measured.sampler,
        mask=measured.mask,
        tolerance=tolerance + sampler_tolerance,
        names=("the trainer's log-probs", "those kept while sampling"),
        advice=(
            "Nothing was updated: the two must use one temperature, one mask, the same "
            "positions and the same columns (column t is about tokens[:, t])"
        ),
    )
    starts_equal = expect_equal or measured.starts_equal
    if measured.reference is not None and starts_equal:
        compare(
            measured.trainer,
            measured.reference,
            mask=measured.mask,
            tolerance=tolerance + storage_tolerance,
            names=("the policy's log-probs", "the reference's (KL must start at 0)"),
            advice=(
                "Nothing was updated: the policy was to start as this reference, so "
                "another model is being read, or the reference is read with another "
                "temperature or mask"
            ),
        )


def compare(
    left: Any,
    right: Any,
    *,
    mask: Any,
    tolerance: float,
    names: tuple[str, str],
    advice: str,
) -> float:
    """Returns the largest mean |left - right| of a row; SelfCheckError if too large."""
    distance = np.where(mask, abs(left - right), 0.0)
    # Per response: a fault in the treatment of padding may affect only a few.
    means = distance.sum(axis=1) / np.maximum(mask.sum(axis=1), 1)
    worst = int(means.argmax())  # a NaN counts as the largest
    if means[worst] <= tolerance:  # False for NaN
        return float(means[worst])
    column = int(distance[worst].argmax())
    raise SelfCheckError(
        f"expected {names[0]} to equal {names[1]} within {tolerance:g} nats per token, "
        f"got a mean difference of {means[worst]:.3g} over the {mask[worst].sum()} "
        f"tokens of row {worst}; most at column {column}: {left[worst, column]:.5f} "
        f"against {right[worst, column]:.5f}. {advice}"
    )
