"""A loss of PyTorch tensors as one of JAX arrays, so that it can be audited."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.audit.expected import Batch, Loss

Array = jax.Array


def from_torch(loss: Callable[[Batch], Any]) -> Loss:
    """The loss with the gradients that PyTorch has for it.

    Args:
      loss: of a `Batch` whose fields are torch tensors, a tensor of one number; its
        backward pass may reach `logprobs` and `logits`.

    Raises:
      ImportError: PyTorch is not installed.
    """
    import torch  # the extra "parity"; no other module of the library has it

    def of_one(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        tensors = [torch.tensor(np.asarray(field)) for field in batch]
        read = Batch(*tensors)
        trained = (read.logprobs.requires_grad_(), read.logits.requires_grad_())
        value = loss(read)
        grads = [
            np.zeros(leaf.shape, np.float32) if grad is None else grad.numpy()
            for leaf, grad in zip(
                trained,
                # A loss of constants alone has no graph, and no gradient.
                torch.autograd.grad(value, trained, allow_unused=True)
                if value.requires_grad
                else (None, None),
                strict=True,
            )
        ]
        return value.detach().numpy().astype(np.float32), *grads

    def on_host(batch: Batch) -> tuple[np.ndarray, ...]:
        # One call for all groups: `vmap` puts its axis first.
        lead = batch.rewards.shape[:-1]
        rows = [
            np.asarray(field).reshape(-1, *np.shape(field)[len(lead) :])
            for field in batch
        ]
        results = [of_one(Batch(*fields)) for fields in zip(*rows, strict=True)]
        return tuple(
            np.stack(parts).reshape(*lead, *np.shape(parts[0]))
            for parts in zip(*results, strict=True)
        )

    def computed(batch: Batch) -> tuple[Array, Array, Array]:
        shapes = (
            jax.ShapeDtypeStruct((), jnp.float32),
            jax.ShapeDtypeStruct(batch.logprobs.shape, jnp.float32),
            jax.ShapeDtypeStruct(batch.logits.shape, jnp.float32),
        )
        return jax.pure_callback(on_host, shapes, batch, vmap_method="broadcast_all")

    @jax.custom_vjp
    def of_batch(batch: Batch) -> Array:
        return computed(batch)[0]

    def forward(batch: Batch) -> tuple[Array, tuple[Array, Array]]:
        value, *grads = computed(batch)
        return value, tuple(grads)

    def backward(grads: tuple[Array, Array], slope: Array) -> tuple[Batch]:
        nothing = Batch(*[None] * len(Batch._fields))
        by_logprobs, by_logits = (slope * grad for grad in grads)
        return (nothing._replace(logprobs=by_logprobs, logits=by_logits),)

    of_batch.defvjp(forward, backward)
    return functools.wraps(loss)(of_batch)
