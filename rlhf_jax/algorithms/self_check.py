"""Before the first update PPO proves itself, or stops and says what differs.

Two facts must hold on the very first rollout. The trainer's log-probs of the sampled
tokens are the sampler's: else the temperature, the columns, the masks or the positions
of the two disagree, and every ratio is wrong. And while the policy still *is* the
reference, their KL is 0: else one of them is another model, or is read differently.
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

# Largest mean |Δ log-prob| of a response, nats per token. By compute dtype: cached
# decoding and the full forward sum in different orders. By the dtype that a reference
# is stored in: its parameters are rounded.
TOLERANCE = {"float32": 1e-4, "bfloat16": 5e-2, "float16": 5e-3, "int8": 1e-1}


class SelfCheckError(StopError):
    """The first rollout contradicts itself: PPO would optimise something else."""


@flax.struct.dataclass
class Measured:
    """What the check compares, on the response tokens of the first rollout."""

    trainer: Array  # f32[B, S], nats, recomputed by the policy's full forward
    sampler: Array  # f32[B, S], nats, kept while sampling
    reference: Array | None  # f32[B, S], nats
    mask: Array  # bool[B, S]
    starts_equal: Array  # bool[], the policy holds the reference's parameters


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
    """Log-probs of the rollout, recomputed by policy and reference; pure, so jittable.

    Args:
      policy: the parameters that sampled the rollout, not updated since.
      reference: None has no KL to check.
      ref_logprobs: f32[B, S], nats, of the reference, from the very program
        that will score every rollout; `reference` is not run then, and whether the
        policy starts as it is the caller's to say (`require`).
      packing: of the rollout, as the update will read it; None leaves its rows padded.
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
    # Without a reference, or with one of another structure, nothing must be equal.
    equal = jnp.zeros((), bool)
    if reference is not None:
        if base is None:
            digests, unmoved = fingerprint.digests(policy), True
        else:
            # The reference under LoRA is the base: it is the policy as long as the
            # adapters add 0.
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
    """Stops unless the two facts hold.

    Args:
      tolerance: of the mean |trainer - sampler| of any response, nats per token
        (`TOLERANCE`).
      sampler_tolerance: of that mean beyond `tolerance`, for responses that were
        sampled with parameters of fewer bits.
      storage_tolerance: of the mean |trainer - reference| beyond `tolerance`, for a
        reference stored in fewer bits than the policy.
      expect_equal: the policy must start as the reference. By default that is read off
        their fingerprints, so that a policy may start elsewhere.

    Raises:
      SelfCheckError: says which pair differs, by how much and where most.
    """
    # One transfer for all arrays: the comparison is NumPy's, on the host.
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
    """The largest mean |left - right| of a row, which must be within the tolerance."""
    distance = np.where(mask, abs(left - right), 0.0)
    # By response, since a fault in how padding is treated may touch only a few.
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
