"""Texts whose language-model loss is mixed into an update of the policy (PPO-ptx)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.state import accumulate
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles import adapted
from rlhf_jax.roles.frozen_models import FrozenModels

Array = jax.Array
Params = Any


def shared_out(ptx: Sequences | None, recipe: PolicyGradient) -> Sequences | None:
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


def gradient(
    policy: Params, texts: Sequences, *, recipe: PolicyGradient, frozen: FrozenModels
) -> tuple[Params, masked.Stats]:
    """ptx_coef · gradient of the language-model loss at temperature 1.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2.
    """
    from rlhf_jax.algorithms import sft  # few runs mix texts in

    num_tokens = sft.predicted(texts).sum(dtype=jnp.float32)

    def ptx_loss(trained: Params, part: Sequences) -> tuple[Array, masked.Stats]:
        loss, stats = sft.loss(
            adapted.params(trained, base=frozen.base, lora=recipe.lora),
            part,
            model=recipe.model,
            num_tokens=num_tokens,
        )
        return recipe.ptx_coef * loss, {"loss/ptx": stats["loss/language_model"]}

    size = recipe.micro_batch_size
    if size is not None and size >= texts.tokens.shape[0]:
        size = None
    return accumulate(ptx_loss, policy, texts, micro_batch_size=size)
