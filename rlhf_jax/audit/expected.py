"""The expected gradient of a loss, and the target gradients to compare it with.

A loss reads a `Batch`, which is a group of responses. Its gradient with respect to the
policy's logits is averaged over every group that the sampler can draw:

    g = Σ_groups Π_i π_sampler(y_i) · ∇_logits loss(group)

The targets are gradients that g may be meant to have, up to a positive factor:

    full reverse         ∇ KL(π ‖ π_ref) of whole responses
    full forward         ∇ KL(π_ref ‖ π) of whole responses
    fixed-state reverse  E_{y~π} Σ_t ∇ KL(π(·|s_t) ‖ π_ref(·|s_t)), states held fixed
    fixed-state forward  E_{y~π} Σ_t ∇ KL(π_ref(·|s_t) ‖ π(·|s_t)), states held fixed
    reward               -∇ E_{y~π}[r], the descent direction of a policy gradient

`functional.kl.gradients` has the same names for the library's own penalties.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rlhf_jax.audit.worlds import GROUP, World
from rlhf_jax.functional.kl.gradients import (
    FIXED_FORWARD,
    FIXED_REVERSE,
    FULL_FORWARD,
    FULL_REVERSE,
)

Array = jax.Array
Float32 = npt.NDArray[np.float32]

REWARD = "reward"


class Batch(NamedTuple):
    """A group of G = 3 responses, as a loss reads it; there are no prompt columns.

    Column t of every [G, T] array is about the token in column t. Where mask is False,
    after the end of a response or at an environment's tokens, log-probs are still those
    of a model: a loss has to leave them out.
    """

    logprobs: Array  # f32[G, T], nats, of the policy; has a gradient, as have logits
    old_logprobs: Array  # f32[G, T], nats, of the policy that sampled
    ref_logprobs: Array  # f32[G, T], nats, of the reference
    mask: Array  # bool[G, T], the policy's tokens, the stop token included
    rewards: Array  # f32[G], reward units
    logits: Array  # f32[G, T, V], of the policy, for an exact KL
    ref_logits: Array  # f32[G, T, V], of the reference


Loss = Callable[[Batch], Array]


def expected_gradient(loss: Loss, world: World, *, with_rewards: bool = False) -> Array:
    """f32[states, V]: the expected gradient of a loss, by enumeration.

    Args:
      loss: loss f32[] of one group.
      with_rewards: use the world's rewards; else they are 0, which leaves only the
        penalty of a policy gradient.

    Raises:
      AssertionError: the loss is not one float.
    """
    groups = np.array([*itertools.product(range(len(world.tokens)), repeat=GROUP)])

    # Arrays are arguments: XLA would evaluate a program of constants while compiling.
    def expected(policy: Array, world: World, groups: Array) -> Array:
        probability = jnp.exp(_of_responses(world, world.sampler).sum(axis=1))

        def of_group(rows: Array) -> Array:
            batch = _batch(world, policy, rows, with_rewards=with_rewards)
            value = loss(batch)
            chex.assert_shape(value, ())
            chex.assert_type(value, float)
            return jnp.prod(probability[rows]) * value

        return jnp.sum(jax.vmap(of_group)(groups))

    arrays = world._replace(name=None)
    return jax.jit(jax.grad(expected))(jnp.asarray(world.policy), arrays, groups)


def targets(world: World) -> dict[str, Array]:
    """{name: f32[states, V]}: the targets of this module's docstring."""

    def responses(table: Array) -> Array:
        """f32[N]: log-probs of whole responses, nats."""
        return _of_responses(world, table).sum(axis=1)

    policy, reference = jnp.asarray(world.policy), jnp.asarray(world.reference)
    ref, ref_responses = jax.nn.log_softmax(reference), responses(reference)
    # Fixed states: visit probabilities are not differentiated.
    visits = jnp.exp(responses(policy))

    def over_states(per_state: Array) -> Array:
        columns = jnp.where(world.mask, per_state[world.states], 0.0)
        return jnp.sum(visits * columns.sum(axis=1))

    functions = {
        FULL_REVERSE: lambda table: _kl(responses(table), ref_responses),
        FULL_FORWARD: lambda table: _kl(ref_responses, responses(table)),
        FIXED_REVERSE: lambda table: over_states(_kl(jax.nn.log_softmax(table), ref)),
        FIXED_FORWARD: lambda table: over_states(_kl(ref, jax.nn.log_softmax(table))),
        REWARD: lambda table: -jnp.sum(jnp.exp(responses(table)) * world.rewards),
    }
    return {name: jax.grad(of)(policy) for name, of in functions.items()}


def _kl(logprobs: Array, others: Array) -> Array:
    """Σ p (log p - log q) over the last axis, nats."""
    return jnp.sum(jnp.exp(logprobs) * (logprobs - others), axis=-1)


def _of_responses(world: World, table: Array | Float32) -> Array:
    """f32[N, T]: log-probs of the policy's own tokens, nats; 0 elsewhere."""
    return jnp.where(world.mask, _of_tokens(world, table), 0.0)


def _of_tokens(world: World, table: Array | Float32) -> Array:
    return jax.nn.log_softmax(jnp.asarray(table))[world.states, world.tokens]


def _batch(world: World, policy: Array, rows: Array, *, with_rewards: bool) -> Batch:
    rewards, states = world.rewards[rows], world.states[rows]
    return Batch(
        logprobs=_of_tokens(world, policy)[rows],
        old_logprobs=_of_tokens(world, world.sampler)[rows],
        ref_logprobs=_of_tokens(world, world.reference)[rows],
        mask=world.mask[rows],
        rewards=rewards if with_rewards else jnp.zeros_like(rewards),
        logits=policy[states],
        ref_logits=jnp.asarray(world.reference)[states],
    )
