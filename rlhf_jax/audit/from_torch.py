"""Makes a loss of PyTorch tensors a loss of JAX arrays, so that it can be audited."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.audit.expected import Batch, Loss

Array = jax.Array
CHUNK = 1024  # groups per backward pass, whose graph is kept in memory


def from_torch(loss: Callable[[Batch], Any]) -> Loss:
    """Wraps a PyTorch loss; JAX gets its value and gradients from PyTorch.

    Args:
      loss: `Batch` of torch tensors -> tensor of one float; the gradient reaches
        `logprobs` and `logits`.

    Raises:
      ImportError: PyTorch is not installed. When called: an error of JAX around the
        TypeError of a loss that is not a tensor of one float.
    """
    # In the extra "parity"; no other module of the library imports it.
    import torch  # pyright: ignore[reportMissingImports]

    def of_rows(rows: list[np.ndarray]) -> tuple[np.ndarray, ...]:
        read: Any = Batch(*(torch.tensor(field) for field in rows))
        leaves = (read.logprobs.requires_grad_(), read.logits.requires_grad_())
        parts = [field.unbind() for field in read]
        values = [loss(Batch(*row)) for row in zip(*parts, strict=True)]
        for value in values:
            if not isinstance(value, torch.Tensor):
                raise TypeError(
                    f"expected a tensor, got {type(value).__name__}; return the loss "
                    f"itself, which has a gradient, and not its `item()`"
                )
            if value.numel() != 1 or not value.is_floating_point():
                raise TypeError(
                    f"expected a tensor of one float, the loss of a group, got "
                    f"{value.dtype}{list(value.shape)}; add up the tokens"
                )
        total = torch.stack([value.reshape(()) for value in values])
        grads = (None, None)
        if total.requires_grad:  # a constant loss has no graph
            grads = torch.autograd.grad(total.sum(), leaves, allow_unused=True)
        return (
            total.detach().numpy().astype(np.float32),
            *(
                np.zeros(leaf.shape, np.float32) if grad is None else grad.numpy()
                for leaf, grad in zip(leaves, grads, strict=True)
            ),
        )

    def on_host(batch: Batch) -> tuple[np.ndarray, ...]:
        # One call for all groups, along the first axis of `vmap`.
        lead = batch.rewards.shape[:-1]
        rows = [
            np.asarray(field).reshape(-1, *np.shape(field)[len(lead) :])
            for field in batch
        ]
        parts = [
            of_rows([field[first : first + CHUNK] for field in rows])
            for first in range(0, len(rows[0]), CHUNK)
        ]
        return tuple(
            np.concatenate(part).reshape((*lead, *part[0].shape[1:]))
            for part in zip(*parts, strict=True)
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
        value, by_logprobs, by_logits = computed(batch)
        return value, (by_logprobs, by_logits)

    def backward(grads: tuple[Array, Array], slope: Array) -> tuple[Batch]:
        none: Any = (None,) * len(Batch._fields)
        by_logprobs, by_logits = (slope * grad for grad in grads)
        return (Batch(*none)._replace(logprobs=by_logprobs, logits=by_logits),)

    of_batch.defvjp(forward, backward)
    return functools.wraps(loss)(of_batch)
