"""Training states, accumulation of gradients, and optimizer steps.

Trained parameters are float32: a state of other parameters raises a TypeError that
names the leaf. `micro_batch_size` is the number of rows per forward and backward pass;
None takes all at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from rlhf_jax.algorithms.batch import RolloutPacking
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.control import KLController
from rlhf_jax.models import layout
from rlhf_jax.models.lora import LoRA
from rlhf_jax.models.packing import Packing, SizedPacking, at_size
from rlhf_jax.roles import rewards
from rlhf_jax.roles.reference import fingerprint
from rlhf_jax.roles.reference.frozen import Frozen, adapted_params
from rlhf_jax.roles.rewards.scores import RunningMoments

Array = jax.Array
Params = Any
Optimizer = optax.GradientTransformation
# (params, part of a batch) -> (loss, stats); with `packing=` for a packed part.
LossFunction = Callable[..., tuple[Array, masked.Stats]]


@flax.struct.dataclass
class TrainState:
    """Everything that a policy gradient updates; donate it to the update."""

    step: Array  # i32[], iterations done
    policy: Params
    policy_opt: optax.OptState
    critic: Params  # None without a critic
    critic_opt: optax.OptState | None
    kl: KLController
    scores: RunningMoments  # of all scores so far
    skipped: Array  # i32[], updates skipped in a row, for gradients that are not finite
    # f32[], reward units per nat, the coefficient of `entropy_control`; None without.
    entropy_coef: Array | None = None


@flax.struct.dataclass
class SupervisedState:
    """Everything that supervised training, or a critic apart, updates; donate it."""

    step: Array  # i32[], updates done
    params: Params
    opt: optax.OptState
    skipped: Array  # i32[], updates skipped in a row, for gradients that are not finite


def ppo_state(
    *,
    policy: Params,
    critic: Params,
    policy_optimizer: Optimizer,
    critic_optimizer: Optimizer,
    kl: KLController,
    entropy_coef: float | None = None,
) -> TrainState:
    """The state before the first iteration.

    Args:
      policy, critic: parameters, f32 leaves that share no buffer (`critic.from_policy`
        copies), as both are donated.
      entropy_coef: as in `grpo_state`.
    """
    # `grpo_state` checks the policy, and makes the rest of the state.
    _check_float32({"critic": critic})
    state = grpo_state(
        policy=policy,
        policy_optimizer=policy_optimizer,
        kl=kl,
        entropy_coef=entropy_coef,
    )
    return dataclasses.replace(
        state, critic=critic, critic_opt=critic_optimizer.init(critic)
    )


def grpo_state(
    *,
    policy: Params,
    policy_optimizer: Optimizer,
    kl: KLController,
    entropy_coef: float | None = None,
) -> TrainState:
    """The state before the first iteration, without a critic or with one apart.

    Args:
      entropy_coef: reward units per nat, first coefficient of `entropy_control`; None
        without it.
    """
    _check_float32({"policy": policy})
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        policy=policy,
        policy_opt=policy_optimizer.init(policy),
        critic=None,
        critic_opt=None,
        kl=kl,
        scores=rewards.no_moments(),
        skipped=jnp.zeros((), jnp.int32),
        entropy_coef=None if entropy_coef is None else jnp.float32(entropy_coef),
    )


def supervised_state(params: Params, *, optimizer: Optimizer) -> SupervisedState:
    """The state before the first update by `optimizer`."""
    _check_float32(params)
    return SupervisedState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt=optimizer.init(params),
        skipped=jnp.zeros((), jnp.int32),
    )


def _check_float32(params: Params) -> None:
    for path, leaf in zip(
        fingerprint.paths(params), jax.tree.leaves(params), strict=True
    ):
        if leaf.dtype != jnp.float32:
            raise TypeError(
                f"{path}: expected float32 to train, got {leaf.dtype}, in which small "
                f"steps round to nothing; load with dtype='float32', and set only "
                f"model.dtype to {leaf.dtype}"
            )


def micro_batches(batch: Any, *, micro_batch_size: int | None) -> Any:
    """Cuts a batch whose leaves have B rows into micro-batches [B / size, size, ...].

        rows           0  1  2  3  4  5     B = 6, micro_batch_size = 3
        micro-batch    0  1  0  1  0  1

    Neighbouring rows go to different micro-batches: where rows are sharded in blocks,
    every device keeps its share of each micro-batch.
    """
    rows = jax.tree.leaves(batch)[0].shape[0]
    size = rows if micro_batch_size is None else micro_batch_size
    if size < 1 or rows % size:
        raise InputError(
            f"expected micro_batch_size to divide the {rows} rows of an update, got "
            f"{size}; change either, or leave it out to hold all at once"
        )
    shape = (size, rows // size)
    return jax.tree.map(
        lambda leaf: leaf.reshape(shape + leaf.shape[1:]).swapaxes(0, 1), batch
    )


@jax.named_scope("loss")
def accumulate(
    loss: LossFunction,
    params: Params,
    batch: Any,
    *,
    micro_batch_size: int | None,
    parts: PackedParts | None = None,
) -> tuple[Params, masked.Stats]:
    """Gradient of a loss that is a sum over rows, one micro-batch at a time.

        ∇L = Σ_parts ∇L_part,  stats = Σ_parts stats_part (sums and weights)

    Args:
      loss: (params, rows) -> (loss f32[], stats), already divided by the count of the
        whole batch, so that the losses of its parts add up.
      params: f32 leaves; the gradient is with respect to all of them.
      batch: a pytree whose leaves have B rows.
      micro_batch_size: rows of a part (`micro_batches`); None takes one part.
      parts: packed parts in place of micro-batches (`accumulate_packed`).

    Returns:
      The gradient, with the structure and dtypes of `params`, and the stats of all
      parts together.

    Raises:
      InputError: micro_batch_size does not divide B.
    """
    if parts is not None:
        return accumulate_packed(loss, params, batch, parts=parts)
    gradient = jax.grad(loss, has_aux=True)
    if micro_batch_size in (None, jax.tree.leaves(batch)[0].shape[0]):
        return gradient(params, batch)
    # A scan over parts keeps the activations of one part alive at a time.
    parts = micro_batches(batch, micro_batch_size=micro_batch_size)

    def add(total: Params, part: Any) -> tuple[Params, masked.Stats]:
        grads, stats = gradient(params, part)
        # Gradients are carried, in one buffer for all parts; stats are stacked.
        return jax.tree.map(jnp.add, total, grads), stats

    grads, stats = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return grads, masked.total_stats(stats)


@flax.struct.dataclass
class PackedParts:
    """The packed layout of one minibatch, in C parts of whole responses."""

    packing: SizedPacking  # every leaf [C, ...]
    members: Array  # bool[C, b], the responses of each part


def packed_parts(packing: RolloutPacking | None, *, steps: int) -> PackedParts | None:
    """The parts of all minibatches of an update, every leaf [steps, C, ...]."""
    if packing is None:
        return None
    if packing.members.shape[0] != steps:
        raise InputError(
            f"packing: expected {steps} minibatches, epochs times num_minibatches, got "
            f"{packing.members.shape[0]}; make it by data.layouts for this recipe"
        )
    return PackedParts(packing.minibatches, packing.members)


@jax.named_scope("loss")
def accumulate_packed(
    loss: LossFunction, params: Params, minibatch: Any, *, parts: PackedParts
) -> tuple[Params, masked.Stats]:
    """`accumulate` over packed parts: ∇L = Σ_parts ∇L_part.

    Every part has all rows of the minibatch, with 0 and False in the rows of other
    parts, which therefore have no weight: padded arrays per token are small against the
    model's activations. A part without responses is not computed.

    Args:
      loss: (params, rows, packing=) -> (loss f32[], stats), divided by the counts of
        the whole minibatch.
      minibatch: a pytree whose leaves have b rows.
      parts: `packed_parts` of this minibatch, every leaf [C, ...].

    Returns:
      The gradient, with the structure of `params`, and the stats of all parts together.
    """
    # Stats are the auxiliary output, without gradient.
    gradient = jax.grad(loss, has_aux=True)

    def of_part(part: PackedParts, rows: Any) -> tuple[Params, masked.Stats]:
        def at(packing: Packing | None) -> tuple[Params, masked.Stats]:
            return gradient(params, rows, packing=packing)

        # Each size of packed rows is a branch with its own shapes, inside the scan.
        return at_size(part.packing, at)

    # A single part needs neither selection nor a second buffer of gradients.
    if parts.members.shape[0] == 1:
        return of_part(jax.tree.map(lambda leaf: leaf[0], parts), minibatch)

    def add(total: Params, part: PackedParts) -> tuple[Params, masked.Stats]:
        def own(leaf: Array) -> Array:
            members = part.members.reshape(-1, *[1] * (leaf.ndim - 1))
            # Other rows become zeros: shapes must not depend on the part.
            return jnp.where(members, leaf, jnp.zeros_like(leaf))

        def compute(total: Params) -> tuple[Params, masked.Stats]:
            grads, stats = of_part(part, jax.tree.map(own, minibatch))
            return jax.tree.map(jnp.add, total, grads), stats

        def leave(total: Params) -> tuple[Params, masked.Stats]:
            _, stats = jax.eval_shape(compute, total)
            return total, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)

        # The number of parts suits the fullest minibatch; others have empty parts.
        return jax.lax.cond(part.members.any(), compute, leave, total)

    grads, stats = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return grads, masked.total_stats(stats)


@jax.named_scope("optimizer")
def apply_gradients(
    params: Params,
    opt: optax.OptState,
    grads: Params,
    *,
    optimizer: Optimizer,
    finite: Array,
) -> tuple[Params, optax.OptState]:
    """One optimizer step, or none at all.

    Args:
      finite: bool[]; if False, `params` and `opt` are returned unchanged.
    """

    def step(state: tuple[Params, optax.OptState]) -> tuple[Params, optax.OptState]:
        params, opt = state
        # Weight decay reads the parameters.
        updates, opt = optimizer.update(grads, opt, params)
        return optax.apply_updates(params, updates), opt

    # Moments stay too: NaN would persist in Adam's m and v.
    return layout.change_if(finite, step, (params, opt))


def count_skips(
    skipped: Array, stats: masked.Stats, *, finite: Array
) -> tuple[Array, masked.Stats]:
    """Counts skipped updates in a row, and adds the counts to the stats of an update.

    Args:
      stats: of the update. If it was skipped its sums, weights and maxima become 0.

    Returns:
      i32[] and the stats with `update/skipped`, the share of updates skipped, and
      `update/skipped_in_a_row`, a maximum over updates.
    """
    skipped = jnp.where(finite, 0, skipped + 1)
    # One NaN in a sum over minibatches would hide all others.
    safe: masked.Stats = jax.tree.map(lambda leaf: jnp.where(finite, leaf, 0.0), stats)
    missed = 1.0 - finite.astype(jnp.float32)
    return skipped, safe | {
        "update/skipped": (missed, jnp.ones_like(missed)),
        "update/skipped_in_a_row": (skipped.astype(jnp.float32), None),
    }


def supervised_update(
    state: SupervisedState,
    *,
    batch: Any,
    loss: LossFunction,
    optimizer: Optimizer,
    micro_batch_size: int | None,
    base: Frozen | None,
    lora: LoRA | None,
) -> tuple[SupervisedState, masked.Stats]:
    """One optimizer step on a batch; `loss` is as in `accumulate`.

    It is called with the parameters to run: the state's, or its adapters over `base`.
    """
    grads, stats = accumulate(
        # Inside the loss, so that the gradient reaches the adapters and not the base.
        lambda trained, part: loss(adapted_params(trained, base=base, lora=lora), part),
        state.params,
        batch,
        micro_batch_size=micro_batch_size,
    )
    return supervised_step(state, grads, stats, optimizer=optimizer)


def supervised_step(
    state: SupervisedState,
    grads: Params,
    stats: masked.Stats,
    *,
    optimizer: Optimizer,
) -> tuple[SupervisedState, masked.Stats]:
    """Applies the gradient of a supervised update, or skips it if it is not finite.

    Adds `update/grad_norm`, before any clipping, to the stats. The update is skipped if
    the norm is not finite: an entry is not, or its square overflows, as in Adam.
    """
    norm = optax.tree.norm(grads)
    finite = jnp.isfinite(norm)
    params, opt = apply_gradients(
        state.params, state.opt, grads, optimizer=optimizer, finite=finite
    )
    stats = stats | {"update/grad_norm": (norm, jnp.ones_like(norm))}
    skipped, stats = count_skips(state.skipped, stats, finite=finite)
    next_state = SupervisedState(
        step=state.step + 1, params=params, opt=opt, skipped=skipped
    )
    return next_state, stats
