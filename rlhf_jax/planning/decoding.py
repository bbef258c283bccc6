"""A decoded token by hand: what a chip must at least read and send for it.

    memory    every matrix of the layers and the head once, a share of tensor;
              keys and values of the columns, a share of data and of tensor as far as
              it divides the heads
    links     over tensor: a sum of [rows, D] for the embedding and two per layer, and
              the logits of its rows, [rows, V]

No compiler is asked. What one says of the same token is more; `tests/programs/gate.py`
bounds by how much.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models import decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import workload
from rlhf_jax.planning.chips import Chip


class Token(NamedTuple):
    """Of one token of every row, on one chip."""

    weights: int  # bytes that are read
    cache: int  # bytes that are read
    sent: float  # bytes
    collectives: int

    def seconds(self, chip: Chip) -> float:
        """Memory and links at once, and the latency of every collective."""
        memory = (self.weights + self.cache) / chip.bandwidth
        return max(memory, self.sent / chip.links) + chip.latency * self.collectives


def token(
    model: ModelConfig,
    *,
    mesh: MeshShape,
    rows: int,
    columns: int,
    weight_bytes: int,
) -> Token:
    """The least of a token.

    Args:
      model: with the cache that it is sampled with.
      mesh: of dcn, data and tensor, which divides the key and value heads.
      rows: that are decoded at a time, of all chips.
      columns: of a row that are attended to.
      weight_bytes: of a number of a matrix.
    """
    own, others = -(-rows // (mesh.dcn * mesh.data)), mesh.tensor - 1
    activations = own * model.hidden_size * jnp.dtype(model.dtype).itemsize
    logits = own * model.padded_vocab_size * 4 / mesh.tensor
    sums = 2 * model.num_layers + 1
    return Token(
        weights=weight_bytes * matrix_numbers(model, rows=own) // mesh.tensor,
        cache=workload.cache_bytes(model, rows=own, columns=columns)
        // heads_devices(model, mesh),
        # A sum passes twice, logits go where their rows are drawn.
        sent=(2 * sums * activations + logits) * others / mesh.tensor,
        collectives=sums + 1 if others else 0,
    )


def least_bytes(
    model: ModelConfig,
    *,
    mesh: MeshShape,
    rows: int,
    prompt: int,
    turns: int,
    weight_bytes: int,
    cached: bool = True,
) -> float:
    """Bytes that a chip reads for a token, the mean of a response: no layout has fewer.

    Matrices are shared by all axes but `dcn` and `data`, which only copy them, and a
    column of the cache is read from when it is filled.

    Args:
      mesh: that is sampled on.
      rows: that are decoded at a time, of all chips.
      turns: tokens after the first.
      cached: whether those rows are there from the first column to the last; else the
        cache is left out.
    """
    copies = mesh.dcn * mesh.data
    numbers = matrix_numbers(model, rows=-(-rows // copies))
    least = weight_bytes * numbers / (mesh.size // copies)
    if not cached:
        return least
    # Windows make the bytes concave in the columns: no mean is below that of the ends.
    ends = (
        workload.cache_bytes(model, rows=rows, columns=columns)
        for columns in (prompt + 1, prompt + turns)
    )
    return least + sum(ends) / 2 / cache_devices(model, mesh)


def cache_devices(model: ModelConfig, mesh: MeshShape) -> int:
    """Devices that share a KV cache, by rows and by heads."""
    return mesh.rows * mesh.context * heads_devices(model, mesh)


def heads_devices(model: ModelConfig, mesh: MeshShape) -> int:
    """Devices of `tensor` that share the key and value heads of a row."""
    return math.gcd(mesh.tensor, model.common_kv_heads)


def matrix_numbers(model: ModelConfig, *, rows: int) -> int:
    """Numbers of the matrices that tokens of rows meet: of the layers, and the head."""
    shapes = dict(decoder.shapes(model)["layers"])
    total = model.padded_vocab_size * model.hidden_size
    if model.experts is not None:
        total += shapes.pop("experts")["router"]["weight"].size
        total += round(expert_numbers(model, rows=rows))
    return total + _matrices(shapes)


def expert_numbers(model: ModelConfig, *, rows: int | None = None) -> float:
    """Numbers of the experts that tokens of rows meet where routing is even; None: all.

    E·(1 - (1 - k/E)^rows)      of the E experts of each layer, k for one row
    """
    if model.experts is None:
        return 0.0
    experts = dict(decoder.shapes(model)["layers"]["experts"])
    del experts["router"]
    share = model.experts.per_token / model.experts.count
    return (1.0 if rows is None else 1 - (1 - share) ** rows) * _matrices(experts)


def _matrices(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if len(leaf.shape) > 2)
