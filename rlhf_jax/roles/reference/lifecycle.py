"""The lifecycle of a reference: frozen for the run, or replaced or mixed every N steps.

    step              0   1   2   3   4   5   6   7      Reset(every=4), kl_every = 2
    measures the KL   x       x       x       x
    reset after                   x               x

The decision is plain Python on the step number: nothing is read off a device. A
reference changes only here; `run.Stage` rejects every other change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import expect_none
from rlhf_jax.models import leaves
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import fingerprint, storage
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any


@dataclasses.dataclass(frozen=True)
class Reset:
    """The reference is replaced by the policy every N steps."""

    every: int
    """Number of steps from one reset to the next."""

    def __post_init__(self) -> None:
        checks.at_least_one(every=self.every)


@dataclasses.dataclass(frozen=True)
class Mix:
    """The policy is mixed into the reference every N steps."""

    every: int
    """Number of steps from one mixture to the next."""
    rate: float
    """Share r of the policy in ref ← r·policy + (1 − r)·ref, 0 to 1."""

    def __post_init__(self) -> None:
        checks.at_least_one(every=self.every)
        checks.fraction(rate=self.rate)


@dataclasses.dataclass(frozen=True)
class Lifecycle:
    """How the reference moves, and how often its KL is measured; by default frozen."""

    move: Reset | Mix | None = None
    """How the reference moves: reset,every=N replaces it by the policy every N steps,
    mix,every=N,rate=R mixes the policy in; None freezes it for the run."""
    kl_every: int = 1
    """Number of steps from one measurement of the KL to the next; the reference is not
    run in between."""
    scale_kl_coef: bool = False
    """Whether β is multiplied by kl_every in the steps that measure the KL."""

    def __post_init__(self) -> None:
        checks.at_least_one(kl_every=self.kl_every)

    @property
    def moves(self) -> bool:
        """Whether the reference moves during the run."""
        return self.move is not None

    @property
    def mixes(self) -> bool:
        """Whether the policy is mixed into the reference.

        Adapters cannot be mixed: a mixture of A₁B₁ and A₂B₂ is not the product of the
        mixtures. They can be reset.
        """
        return isinstance(self.move, Mix)

    def takes_kl(self, step: int) -> bool:
        """Whether step `step`, from 0, measures the KL, and so runs the reference."""
        return step % self.kl_every == 0

    def due(self, step: int) -> bool:
        """Whether the reference moves after step `step`, from 0."""
        # `every=4` first acts after the fourth step, numbered 3.
        return self.move is not None and (step + 1) % self.move.every == 0

    def refuse_another_shape(self, model: ModelConfig | None) -> None:
        """Raises InputError if a reference with a shape of its own would move."""
        if model is not None:
            expect_none(
                "where the reference is of another shape than the policy",
                advice="such a reference cannot become the policy",
                lifecycle=self.move,
            )


FROZEN = Lifecycle()  # never moves, and measures the KL at every step


def after_step(
    frozen: Frozen, params: Params, *, step: int, lifecycle: Lifecycle
) -> Frozen:
    """The reference after step `step`, from 0; the same object if it does not move.

    Args:
      params: the policy after the step; copied, so it may be donated to the next step.
    """
    if not lifecycle.due(step):
        return frozen
    match lifecycle.move:
        case Mix(rate=rate):
            return mix(frozen, params, rate=rate)
        case _:
            return reset(frozen, params)


def within_program(
    frozen: Frozen, params: Params, *, step: Array, lifecycle: Lifecycle
) -> Frozen:
    """`after_step` for a traced step: an EMA reference in a scan of iterations.

        state, stats, _ = ppo.iteration(state, frozen=FrozenModels(reference), ...)
        reference = within_program(reference, state.policy, step=step, lifecycle=moves)

    Args:
      step: i32[], from 0; both branches are compiled, and one of them runs.
      frozen, params, lifecycle: as in `after_step`. The result has the same bits, up to
        how a compiler rounds a mixture.

    Source: Zhang and Ba 2026, arXiv:2602.04417: π_ema with θ_ema ← η·θ_ema + (1 − η)·θ,
    `Mix(every=N, rate=1 − η)`.
    """
    if lifecycle.move is None:
        return frozen
    # `after_step` then moves the reference: the last step of a period is always due.
    due = lifecycle.move.every - 1
    return jax.lax.cond(
        (step + 1) % lifecycle.move.every == 0,
        lambda: after_step(frozen, params, step=due, lifecycle=lifecycle),
        lambda: frozen,
    )


def reset(frozen: Frozen, params: Params) -> Frozen:
    """ref <- policy, stored as the reference was: a copy with its own digests.

    Source: Gorbatovski et al. 2024, arXiv:2404.09656, section 3 (hard update).
    """
    stored_leaves, structure = _stored_leaves(frozen, params)
    pairs = zip(stored_leaves, jax.tree.leaves(params), strict=True)
    copied = [storage.copy_as(leaf, like=old) for old, leaf in pairs]
    stored = jax.tree.unflatten(structure, copied)
    return dataclasses.replace(
        frozen,
        stored=stored,
        source_digests=fingerprint.digests(params),
        stored_digests=fingerprint.digests(stored),
    )


def mix(frozen: Frozen, params: Params, *, rate: checks.Scalar) -> Frozen:
    """ref <- rate·policy + (1 - rate)·ref, computed in float32, stored as ref was.

    Pure, so an exponential moving average of the policy is one line of a program:

        reference = lifecycle.mix(reference, state.policy, rate=0.01)

    Args:
      params: the policy, f32 leaves; copied, so it may be donated afterwards.
      rate: share of the policy, from 0 to 1.

    Raises:
      InputError: rate is outside of 0 to 1, or params are not of the reference's model.

    The next mixture reads the stored values. In bfloat16 a step below 1/256 of a
    parameter is rounded away, in int8 one below half a step of its scale: with a small
    rate such a reference does not move, and one in float32 does.

    Source: Gorbatovski et al. 2024, arXiv:2404.09656, section 3 (soft update).
    """
    checks.fraction(rate=rate)
    stored_leaves, structure = _stored_leaves(frozen, params)
    stored, digests = [], []
    # A leaf at a time: the whole model is never in memory in float32.
    for path, old, leaf in zip(
        fingerprint.paths(params), stored_leaves, jax.tree.leaves(params), strict=True
    ):
        mixed = _mixed(leaves.read(old), leaf, rate=rate)
        stored.append(storage.copy_as(mixed, like=old))
        digests.append(fingerprint.digest(mixed, path=path))
    tree = jax.tree.unflatten(structure, stored)
    return dataclasses.replace(
        frozen,
        stored=tree,
        source_digests=jnp.stack(digests),
        stored_digests=fingerprint.digests(tree),
    )


def _mixed(anchor: Array, leaf: Array, *, rate: checks.Scalar) -> Array:
    if not jnp.issubdtype(anchor.dtype, jnp.floating):
        return leaf
    # In float32: in bfloat16 a small rate would round to no step at all.
    leaf = storage.place_as(leaf, anchor).astype(jnp.float32)
    return rate * leaf + (1.0 - rate) * anchor.astype(jnp.float32)


def _stored_leaves(frozen: Frozen, params: Params) -> tuple[list[Any], Any]:
    """The stored leaves of a reference, one for each leaf of `params`."""
    stored_leaves, structure = jax.tree.flatten(frozen.stored, is_leaf=leaves.is_stored)
    if jax.tree.structure(params) != structure:
        raise InputError(
            f"expected parameters of the reference's structure, {structure}, got "
            f"{jax.tree.structure(params)}; a reference becomes, or is mixed with, a "
            f"later state of the model that it was frozen of"
        )
    for path, old, leaf in zip(
        fingerprint.paths(params), stored_leaves, jax.tree.leaves(params), strict=True
    ):
        shape = jax.eval_shape(leaves.read, old).shape
        if leaf.shape != shape:
            raise InputError(
                f"{path}: expected the reference's shape {shape}, got {leaf.shape}; a "
                f"reference becomes, or is mixed with, a later state of its own model"
            )
    return stored_leaves, structure
