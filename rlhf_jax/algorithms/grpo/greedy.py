"""Groups whose last response is greedy: the baseline of ReMax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import flow
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.functional import checks
from rlhf_jax.models.generation.sampling import Shaping

if TYPE_CHECKING:
    from rlhf_jax.algorithms.grpo.recipe import GRPO

Array = jax.Array
Tree = TypeVar("Tree")


def rollout_with_greedy(
    policy: Any, *, prompts: Prompts, key: Array, recipe: GRPO, version: Array | None
) -> Rollout:
    """Samples all rows of a group except the last, whose response is greedy.

    A prompt is run twice: once for its samples, and once for its greedy response.
    """
    checks.groups(len(prompts.index), group_size=recipe.group_size, least=2)
    options: dict[str, Any] = {
        "model": recipe.model,
        "key": key,
        "max_new_tokens": recipe.max_new_tokens,
        "stop_ids": recipe.stop_ids if recipe.fixed_length is None else (),
        "temperature": recipe.temperature,
        "version": version,
        "record_experts": recipe.routing_record is not None,
        "record_top_k": recipe.recorded_top_k,
    }
    sampled = flow.rollout.rollout(
        policy,
        prompts=without_greedy(prompts, group_size=recipe.group_size),
        group_size=recipe.group_size - 1,
        continuous_batching=recipe.continuous_batching,
        **options,
    )
    last = jax.tree.map(
        lambda x: x[recipe.group_size - 1 :: recipe.group_size], prompts
    )
    greedy = flow.rollout.rollout(
        policy, prompts=last, shaping=Shaping(greedy=True), **options
    )

    def beside(a: Array, b: Array) -> Array:
        groups = a.reshape(len(b), -1, *a.shape[1:])
        return jnp.concatenate([groups, b[:, None]], axis=1).reshape(-1, *a.shape[1:])

    return jax.tree.map(beside, sampled, greedy)


def without_greedy(rows: Tree, *, group_size: int) -> Tree:
    """The rows of a pytree of arrays [B, ...] without the last of every group."""

    def without_last(x: Array) -> Array:
        if not jnp.ndim(x):  # a scalar has no rows
            return x
        groups = x.reshape(-1, group_size, *x.shape[1:])
        return groups[:, :-1].reshape(-1, *x.shape[1:])

    return jax.tree.map(without_last, rows)
