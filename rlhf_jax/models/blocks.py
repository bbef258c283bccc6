"""Linen modules of one decoder layer.

A module holds no state and knows nothing of its neighbours: `layers.py` owns the loop
over layers, the cache and the masks. Shapes: B rows, T new tokens, S tokens attended
to, D hidden, H query heads, K key-value heads, F the MLP's width.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.models import layout
from rlhf_jax.models.attention import (
    Pages,
    append_to_pages,
    attend,
    attend_to,
    attend_to_pages,
)
from rlhf_jax.models.caches import Cached, DeltaState, Kept, append
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.experts import NOTHING, OWN, Given, Routing
from rlhf_jax.models.experts.routing import NAME, REPLAY, ROUTING
from rlhf_jax.models.positions import AttentionMask, rotate

Array = jax.Array
INIT_STD = 0.02  # Radford et al. 2019


def residual_std(model: ModelConfig) -> float:
    """Initial standard deviation of weights whose output is added to the residual.

    The residual stream sums 2 L such terms: so scaled, its variance is that of one.
    """
    return INIT_STD / math.sqrt(2 * model.num_layers)


def rematerialised(
    function: Callable[..., Array], *, model: ModelConfig
) -> Callable[..., Array]:
    """Wraps a function so that its gradient keeps only its inputs and recomputes it.

    For arithmetic between matrix products, where every intermediate is as large as the
    input. A loop over layers keeps the two forward passes apart by itself. In unrolled
    layers `prevent_cse` asks for it; XLA:CPU ignores that (same memory, no more time).
    """
    return jax.checkpoint(function, prevent_cse=model.unroll)


class Linear(nn.Module):
    """x W (+ b) (+ x A B), in x's dtype. W is [in, out]; A B a low-rank adapter.

    x is [N, in], the tokens of all rows: XLA:CPU computes the weight gradient of a
    three-dimensional product far more slowly than that of a matrix product.
    """

    features: int
    use_bias: bool
    init_std: float = INIT_STD

    @nn.compact
    def __call__(self, x: Array) -> Array:
        # Put there by `cached_decoder.layers_to_decode`.
        if self.has_variable("params", "transposed"):
            transposed: Array = self.get_variable("params", "transposed")
            y = layout.transposed_product(x, transposed.astype(x.dtype)).astype(x.dtype)
        else:
            kernel = self.param(
                "kernel",
                nn.initializers.normal(self.init_std),
                (x.shape[-1], self.features),
                jnp.float32,
            )
            y = layout.product(x, kernel.astype(x.dtype))
        if self.has_variable("params", "lora_a"):  # put there by `lora.attach`
            down: Array = self.get_variable("params", "lora_a")
            up: Array = self.get_variable("params", "lora_b")
            # Two narrow products through [N, r]: W + A B is never materialised.
            apart, down = layout.apart(x, down.astype(x.dtype))
            y = y + (apart @ down) @ up.astype(x.dtype)
        if self.use_bias:
            bias = self.param(
                "bias", nn.initializers.zeros, (self.features,), jnp.float32
            )
            y = y + bias.astype(x.dtype)[None, :]
        return y


class Norm(nn.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019), in float32.

    With `model.norm_from_one` a scale is stored as its difference from 1 and starts at
    0, so that weight decay pulls it towards 1 (Gemma, arXiv:2403.08295).
    """

    model: ModelConfig
    scaled: bool = True

    @nn.compact
    def __call__(self, x: Array) -> Array:
        model, size = self.model, x.shape[-1:]
        centred = model.norm == "layernorm"
        start = nn.initializers.zeros if model.norm_from_one else nn.initializers.ones
        scale = self.param("scale", start, size, jnp.float32) if self.scaled else None
        bias = None
        if centred:
            bias = self.param("bias", nn.initializers.zeros, size, jnp.float32)

        def normalised(x: Array, scale: Array | None, bias: Array | None) -> Array:
            # Explicit, as implicit rank promotion is an error in the tests.
            broadcast = (None,) * (x.ndim - 1)
            y = x.astype(jnp.float32)
            if centred:
                y = y - y.mean(-1, keepdims=True)
            # Moments in float32: squares of bfloat16 numbers have too few digits.
            y = y * jax.lax.rsqrt(
                jnp.square(y).mean(-1, keepdims=True) + model.norm_eps
            )
            if scale is not None:
                scale = scale.astype(jnp.float32)
                y = y * (1 + scale if model.norm_from_one else scale)[broadcast]
            if bias is not None:
                y = y + bias.astype(jnp.float32)[broadcast]
            return y.astype(x.dtype)

        return rematerialised(normalised, model=model)(x, scale, bias)


class Attention(nn.Module):
    """Causal self-attention with grouped queries (Ainslie et al. 2023).

    With `reads` the cache has keys and values of another layer, the new ones included.
    """

    model: ModelConfig
    reads: bool = False

    @nn.compact
    def __call__(
        self,
        x: Array,
        *,
        mask: AttentionMask | Pages | Array,
        rotary: tuple[Array, Array] | None,
        first: int,
        cache: Cached | None,
        column: Array | int,
    ) -> tuple[Array, Cached]:
        model = self.model
        rows = mask.shape[0] if isinstance(mask, Array) else mask.rows

        def heads(name: str, x: Array, count: int, *, norm: bool = False) -> Array:
            y = Linear(count * model.head_dim, model.attention_bias, name=name)(x)
            if norm:  # over all heads together
                y = Norm(model, name=f"{name}_norm")(y)
            return y.reshape(rows, -1, count, model.head_dim).swapaxes(1, 2)

        # Columns before `first` need no query, but later ones attend to their keys and
        # values.
        joint, read = model.joint_head_norm, columns_from(x, first, rows=rows)
        query = heads("query", read, model.num_heads, norm=joint)
        key: Any
        value: Any
        if self.reads:
            assert cache is not None
            key, value = cache
        else:
            key = heads("key", x, model.num_kv_heads, norm=joint)
            value = (
                key if model.keys_as_values else heads("value", x, model.num_kv_heads)
            )
            if model.value_norm:
                value = Norm(model, scaled=False, name="value_norm")(value)
        if model.query_key_norm and not joint:
            query = Norm(model, name="query_norm")(query)
            key = key if self.reads else Norm(model, name="key_norm")(key)
        if rotary is not None:
            cos, sin = rotary
            query = rotate(query, (cos[:, :, first:], sin[:, :, first:]))
            key = key if self.reads else rotate(key, rotary)
        kept: Cached = key, value
        if cache is not None and not self.reads:
            # Before attention: a token attends to itself.
            if isinstance(mask, Pages):
                kept = append_to_pages(cache, (key, value), pages=mask)
            else:
                kept = append(cache, (key, value), column=column)
        sinks = None
        if model.sinks:
            zeros = nn.initializers.zeros
            sinks = self.param("sinks", zeros, (model.num_heads,), jnp.float32)
        scale, softcap = model.query_scale, model.attention_softcap
        if isinstance(mask, AttentionMask):
            y = attend(query, (key, value), mask=mask, model=model, sinks=sinks)
        elif isinstance(mask, Pages):
            y = attend_to_pages(
                query, kept, pages=mask, scale=scale, softcap=softcap, sinks=sinks
            )
        else:
            y = attend_to(
                query, kept, attend=mask, scale=scale, softcap=softcap, sinks=sinks
            )
        y = y.swapaxes(1, 2).reshape(-1, model.num_heads * model.head_dim)
        if model.output_gate:
            gate = Linear(y.shape[-1], model.attention_bias, name="gate")(read)
            y = rematerialised(gated, model=model)(y, gate)
        y = Linear(
            x.shape[-1],
            model.attention_output_bias,
            init_std=residual_std(model),
            name="output",
        )(y)
        return y, kept


def gated(y: Array, gate: Array) -> Array:
    """y · sigmoid(gate)."""
    return y * nn.sigmoid(gate)


def columns_from(x: Array, first: int, *, rows: int) -> Array:
    """Drops the columns before `first` of every row: [N, D] to [N', D]."""
    if first == 0:
        return x
    return x.reshape(rows, -1, x.shape[-1])[:, first:].reshape(-1, x.shape[-1])


ACTIVATIONS = {
    "gelu_tanh": lambda x: nn.gelu(x, approximate=True),
    "gelu": lambda x: nn.gelu(x, approximate=False),
    "silu": nn.silu,
}


class MLP(nn.Module):
    """down(act(up x)), or down(act(gate x) · up x) (Shazeer 2020, SwiGLU)."""

    model: ModelConfig

    @nn.compact
    def __call__(self, x: Array) -> Array:
        model = self.model
        activation = ACTIVATIONS[model.activation]

        def hidden(up: Array, gate: Array | None) -> Array:
            return activation(up) if gate is None else activation(gate) * up

        up = Linear(model.intermediate_size, model.mlp_bias, name="up")(x)
        gate = None
        if model.gated_mlp:
            gate = Linear(model.intermediate_size, model.mlp_bias, name="gate")(x)
        return Linear(
            x.shape[-1],
            model.mlp_bias,
            init_std=residual_std(model),
            name="down",
        )(rematerialised(hidden, model=model)(up, gate))


class PerLayer(nn.Module):
    """output(act(gate x) · own), own being the layer's embedding of each token."""

    model: ModelConfig

    @nn.compact
    def __call__(self, x: Array, own: Array) -> Array:
        activation = ACTIVATIONS[self.model.activation]

        def hidden(gate: Array, own: Array) -> Array:
            return activation(gate) * own

        gate = Linear(own.shape[-1], False, name="gate")(x)
        return Linear(
            x.shape[-1],
            False,
            init_std=residual_std(self.model),
            name="output",
        )(rematerialised(hidden, model=self.model)(gate, own))


class Block(nn.Module):
    """x + attention(norm x), then x + mlp(norm x).

    With `model.parallel_residual`, x + attention(norm x) + mlp(norm' x) of the same x
    (Wang & Komatsuzaki 2021, GPT-J). With `model.post_norms` the outputs of attention
    and MLP are normed before they are added, and without `model.pre_norms` their inputs
    are not normed (OLMo 2, arXiv:2501.00656). Experts are in place of the MLP, or
    beside it as norm(mlp(norm x)) + norm'(experts(norm" x)) (Gemma 4).
    `model.residual_scale` multiplies what is added. A recurrent block has the module
    `recurrence` in place of attention. With `model.per_layer_width` W g(x) is added
    last, g(x) = act(gate x) · per_layer (Gemma 3n), and with `model.layer_scale` a
    scalar multiplies the output.

    Args of a call:
      x: [B, T, D], in the compute dtype.
      mask: which columns each new token attends to: an `AttentionMask` of S columns, or
        with a cache bool[B, T, S] or the pages of each row. For a recurrent block with
        a cache bool[B, T], True at tokens; None: all are.
      rotary: `angles` of the new tokens' positions; None rotates nothing.
      first: columns to leave out of the output; later ones still attend to them.
      cache: keys and values of the columns so far, with room for the new ones; None
        when S = T. For a recurrent block its state.
      column: i32[] or i32[B], the place of the first new token in the cache.
      per_layer: [B, T, P], `per_layer.inputs` of the new tokens.

    Returns:
      [B, T - first, D], and the keys and values that were attended to: the cache with
      the new columns, or those of the T tokens without a cache. A recurrent block
      returns its state after the last token instead.
    """

    model: ModelConfig
    recurrence: Callable[..., Any] | None = None
    # The names of its modules, and whether attention reads another layer's cache.
    attention: str = "attention"
    mlp: str = "mlp"
    reads: bool = False

    @nn.compact
    def __call__(
        self,
        x: Array,
        *,
        mask: AttentionMask | Pages | Array | None,
        rotary: tuple[Array, Array] | None,
        first: int = 0,
        cache: Cached | DeltaState | None = None,
        column: Array | int = 0,
        per_layer: Array | None = None,
    ) -> tuple[Array, Kept]:
        model, (rows, columns, size) = self.model, x.shape
        x = x.reshape(-1, size)  # the tokens of all rows, as `Linear` wants them

        def before(name: str, x: Array) -> Array:
            return Norm(model, name=name)(x) if model.pre_norms else x

        def after(name: str, y: Array) -> Array:
            if model.post_norms:
                y = Norm(model, name=name)(y)
            if model.residual_scale == 1.0:
                return y
            # In float32: bfloat16 would round 0.22 to 0.2197 in every layer.
            return (y.astype(jnp.float32) * model.residual_scale).astype(y.dtype)

        kept: Kept
        if self.recurrence is not None:
            y, kept = self.recurrence(model, name="delta_net")(
                before("attention_norm", x), rows=rows, mask=mask, cache=cache
            )
            y = columns_from(y, first, rows=rows)
        else:
            assert mask is not None
            assert not isinstance(cache, DeltaState)
            y, kept = Attention(model, self.reads, name=self.attention)(
                before("attention_norm", x),
                mask=mask,
                rotary=rotary,
                first=first,
                cache=cache,
                column=column,
            )
        y = after("attention_post_norm", y)
        x = columns_from(x, first, rows=rows)
        attended = x + y
        # GPT-J and NeoX: the MLP reads the input of attention, so that both can run at
        # once.
        read = x if model.parallel_residual else attended
        between = before("mlp_norm", read)
        if model.experts is None:
            z = MLP(model, name=self.mlp)(between)
        else:
            # Imported only for models that have it.
            from rlhf_jax.models.experts.block import Mixture

            mixture = Mixture(
                model,
                activation=ACTIVATIONS[model.activation],
                init_std=INIT_STD,
                output_std=residual_std(model),
                name=NAME,
            )
            if model.experts.beside_width is None:
                z = mixture(between)
            else:
                z = MLP(model, name=self.mlp)(between)
                routed = Norm(model, scaled=False, name="router_norm")(read)
                mixed = mixture(Norm(model, name="experts_norm")(read), routed)
                mixed = Norm(model, name="experts_post_norm")(mixed)
                z = Norm(model, name="dense_post_norm")(z) + mixed
        x = attended + after("mlp_post_norm", z)
        if per_layer is not None:
            own = columns_from(
                per_layer.reshape(-1, per_layer.shape[-1]), first, rows=rows
            )
            added = PerLayer(model, name="per_layer")(x, own)
            x = x + Norm(model, name="per_layer_norm")(added)
        if model.layer_scale:
            scale = self.param("layer_scale", nn.initializers.ones, (1,), jnp.float32)
            # A buffer in transformers; see also `optimizers.keep_buffers`.
            x = x * jax.lax.stop_gradient(scale).astype(x.dtype)[None]
        return x.reshape(rows, columns - first, size), kept


def apply(
    block: nn.Module,
    params: Any,
    x: Array,
    *,
    experts: Given = NOTHING,
    first: int = 0,
    **others: Any,
) -> tuple[Any, Routing | None]:
    """Calls block(x, first=first, **others), replaying or recording its experts.

    Args:
      x: [B, S, D].
      experts: of one layer, for all S columns; empty for a dense model.
      first: columns that the block leaves out of its output.

    Returns:
      The output of the block, and the layer's `Routing` of B x S tokens, with `OWN` at
      padding and in columns that were not computed; None if nothing is recorded.
    """
    variables = {"params": params}
    read = {"tokens": experts.tokens, "chosen": experts.chosen}
    read = {name: x[:, first:] for name, x in read.items() if x is not None}
    if read:
        variables[REPLAY] = {NAME: read}
    if not experts.record:
        return block.apply(variables, x, first=first, **others), None
    output, kept = block.apply(variables, x, first=first, **others, mutable=[ROUTING])
    recorded: Any = kept
    own: Routing = recorded[ROUTING][NAME]["layer"][0]
    chosen = own.chosen.reshape(x.shape[0], x.shape[1] - first, -1)
    room = ((0, 0), (first, 0), (0, 0))
    chosen = jnp.pad(chosen, room, constant_values=OWN)
    return output, dataclasses.replace(own, chosen=chosen)
