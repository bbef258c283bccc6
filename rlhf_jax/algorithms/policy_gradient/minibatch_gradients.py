"""The gradients of a minibatch that `state.accumulate` does not take by itself.

packed_parts ─> accumulate_packed    of rows that the models read packed, part by part
ptx_parts    ─> ptx_gradient         of texts whose language-model loss is mixed into an
                                     update of the policy (PPO-ptx)
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import RolloutPacking, Sequences
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.state import LossFunction, accumulate
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.packing import Packing, SizedPacking, at_size
from rlhf_jax.roles.reference.frozen import FrozenModels, adapted_params

Array = jax.Array
Params = Any


@flax.struct.dataclass
class PackedParts:
    """How the rows of one minibatch are packed, in C parts of whole responses."""

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
    """`accumulate`, of parts that hold tokens rather than rows: ∇L = Σ_parts ∇L_part.

    The rows of a minibatch that a part does not hold are all 0 and False in it: they
    weigh nothing. Padded arrays of numbers per token are small beside the model's. A
    part without responses is not computed.

    Args:
      loss: (params, rows, packing=) -> (loss f32[], stats), divided by the counts of
        the whole minibatch.
      minibatch: a pytree whose leaves have b rows.
      parts: of this minibatch, every leaf [C, ...], of `packed_parts`.

    Returns:
      The gradient, of the structure of `params`, and the stats of all parts together.
    """
    # Stats are the auxiliary output: no gradient flows through what is logged.
    gradient = jax.grad(loss, has_aux=True)

    def of_part(part: PackedParts, rows: Any) -> tuple[Params, masked.Stats]:
        def at(packing: Packing | None) -> tuple[Params, masked.Stats]:
            return gradient(params, rows, packing=packing)

        # Each size of packed rows is a branch with shapes of its own, inside the scan.
        return at_size(part.packing, at)

    # One part holds all responses: neither selection nor a second buffer of gradients.
    if parts.members.shape[0] == 1:
        return of_part(jax.tree.map(lambda leaf: leaf[0], parts), minibatch)

    def add(total: Params, part: PackedParts) -> tuple[Params, masked.Stats]:
        def own(leaf: Array) -> Array:
            members = part.members.reshape(-1, *[1] * (leaf.ndim - 1))
            # All rows stay, others as zeros: shapes must not depend on how many a part
            # holds.
            return jnp.where(members, leaf, jnp.zeros_like(leaf))

        def compute(total: Params) -> tuple[Params, masked.Stats]:
            grads, stats = of_part(part, jax.tree.map(own, minibatch))
            return jax.tree.map(jnp.add, total, grads), stats

        def leave(total: Params) -> tuple[Params, masked.Stats]:
            _, stats = jax.eval_shape(compute, total)
            return total, jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)

        # Parts are as many as the fullest minibatch needs; elsewhere some are empty.
        return jax.lax.cond(part.members.any(), compute, leave, total)

    grads, stats = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, params), parts)
    return grads, masked.total_stats(stats)


def ptx_parts(ptx: Sequences | None, recipe: PolicyGradient) -> Sequences | None:
    """The texts of each minibatch.

    Args:
      ptx: Sequences[M, S'].

    Returns:
      Sequences[num_minibatches, M / num_minibatches, S'].

    Raises:
      InputError: there is one of texts and `ptx_coef` without the other, or M does
        not divide.
    """
    if (ptx is None) != (recipe.ptx_coef == 0):
        texts = "none" if ptx is None else "some"
        raise InputError(
            f"expected ptx texts if, and only if, ptx_coef is above 0, got {texts} "
            f"with ptx_coef {recipe.ptx_coef:g}; give both or neither"
        )
    if ptx is None:
        return None
    rows, count = ptx.tokens.shape[0], recipe.num_minibatches
    if rows % count:
        raise InputError(
            f"expected num_minibatches to divide the {rows} rows of ptx, got {count}; "
            f"change either"
        )
    return jax.tree.map(
        lambda leaf: leaf.reshape(count, rows // count, *leaf.shape[1:]), ptx
    )


def ptx_gradient(
    policy: Params, texts: Sequences, *, recipe: PolicyGradient, frozen: FrozenModels
) -> tuple[Params, masked.Stats]:
    """ptx_coef · gradient of the language-model loss at temperature 1.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2.
    """
    from rlhf_jax.algorithms import sft  # few runs mix texts in

    # Of all texts of the minibatch, so that micro-batches add up to its mean.
    num_tokens = sft.predicted(texts).sum(dtype=jnp.float32)

    def ptx_loss(trained: Params, part: Sequences) -> tuple[Array, masked.Stats]:
        loss, stats = sft.loss(
            adapted_params(trained, base=frozen.base, lora=recipe.lora),
            part,
            model=recipe.model,
            num_tokens=num_tokens,
        )
        return recipe.ptx_coef * loss, {"loss/ptx": stats["loss/language_model"]}

    # Texts may be fewer than responses: then one micro-batch holds them all.
    size = recipe.micro_batch_size
    if size is not None and size >= texts.tokens.shape[0]:
        size = None
    return accumulate(ptx_loss, policy, texts, micro_batch_size=size)
