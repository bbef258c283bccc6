"""A decoded token by hand: the least that a chip must read and send for it.

    memory    every matrix but embedding tables once, divided by tensor;
              keys and values of the columns, divided by data, and by tensor as far as
              it divides the heads
    links     over tensor: a sum of [rows, D] for the embedding and two per layer (three
              of experts beside an MLP), and the logits of its rows, [rows, V]

No compiler is used. A compiled token takes more; `tests/programs/gate.py` bounds by how
much.
"""

from __future__ import annotations

import dataclasses
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
    """Work of one chip for one token of every row."""

    weights: int  # bytes of weights read
    cache: int  # bytes of keys and values read
    sent: float  # bytes sent to other chips
    collectives: int

    def seconds(self, chip: Chip) -> float:
        """The larger of memory and link time, plus the latency of every collective."""
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
    """The least work of a chip for one token of every row.

    Args:
      model: with the cache of the sampler.
      mesh: with the axes dcn, data and tensor; tensor divides the heads.
      rows: rows that are decoded at a time on all chips.
      columns: columns of a row that are attended to.
      weight_bytes: bytes of one weight.
    """
    own, others = -(-rows // (mesh.dcn * mesh.data)), mesh.tensor - 1
    activations = own * model.hidden_size * jnp.dtype(model.dtype).itemsize
    logits = own * model.padded_vocab_size * 4 / mesh.tensor
    beside = model.experts is not None and model.experts.beside_width is not None
    sums = (3 if beside else 2) * model.num_layers + 1
    return Token(
        weights=weight_bytes * matrix_numbers(model, rows=own) // mesh.tensor,
        cache=_cache_read(model, rows=own, columns=columns)
        // heads_devices(model, mesh),
        # An all-reduce sends twice; logits are sent once, to where rows are drawn.
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
    """Lower bound on the bytes that a chip reads per token, averaged over a response.

    All axes but `dcn` and `data` shard the matrices, and a column of the cache is read
    from the turn in which it is filled.

    Args:
      mesh: the sampler's.
      rows: rows that are decoded at a time on all chips.
      prompt: columns of a prompt.
      turns: tokens after the first.
      weight_bytes: bytes of one weight.
      cached: whether the same rows are decoded from the first column to the last;
        otherwise the cache is left out.
    """
    copies = mesh.dcn * mesh.data
    numbers = matrix_numbers(model, rows=-(-rows // copies))
    least = weight_bytes * numbers / (mesh.size // copies)
    if not cached:
        return least
    # Windows make the bytes concave in the columns: the ends' mean is a lower bound.
    ends = (
        _cache_read(model, rows=rows, columns=columns)
        for columns in (prompt + 1, prompt + turns)
    )
    return least + sum(ends) / 2 / cache_devices(model, mesh)


def _cache_read(model: ModelConfig, *, rows: int, columns: int) -> int:
    """Bytes of keys and values that all layers read; shared ones are read again."""
    own = dataclasses.replace(model, shared_layers=0)
    return workload.cache_bytes(own, rows=rows, columns=columns)


def cache_devices(model: ModelConfig, mesh: MeshShape) -> int:
    """Devices that share a KV cache, over rows and heads."""
    return mesh.rows * mesh.context * heads_devices(model, mesh)


def heads_devices(model: ModelConfig, mesh: MeshShape) -> int:
    """Devices of `tensor` that share the key and value heads of a row."""
    return math.gcd(mesh.tensor, model.common_kv_heads)


def matrix_numbers(model: ModelConfig, *, rows: int) -> int:
    """Number of matrix elements that `rows` tokens read, without rows of embeddings."""
    params = decoder.shapes(model)
    shapes = dict(params["layers"])
    total = model.padded_vocab_size * model.hidden_size  # the head
    if model.per_layer_width is not None:
        total += params["embed"]["per_layer_mix"]["kernel"].size
    if model.experts is not None:
        total += shapes.pop("experts")["router"]["weight"].size
        total += round(expert_numbers(model, rows=rows))
    return total + _matrices(shapes)


def expert_numbers(model: ModelConfig, *, rows: int | None = None) -> float:
    """Number of matrix elements of experts that rows read if routing is even.

    E·(1 - (1 - k/E)^rows)      of the E experts of each layer; all if rows is None
    """
    if model.experts is None:
        return 0.0
    experts = dict(decoder.shapes(model)["layers"]["experts"])
    del experts["router"]
    share = model.experts.per_token / model.experts.count
    return (1.0 if rows is None else 1 - (1 - share) ** rows) * _matrices(experts)


def _matrices(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree) if len(leaf.shape) > 2)
