"""Ring attention by the best kernel of the backend: splash on TPUs, else blockwise.

With balanced columns (`axes.py`), queries of device i see of the keys of device j

    j = i     the columns before them, as in a whole row
    j < i     the first half of the keys, from all queries
    j > i     all keys, from the second half of the queries

so that after turn 0 a kernel masks only texts and computes no hidden block.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from rlhf_jax.models import layout
from rlhf_jax.models.attention import ring_passes
from rlhf_jax.models.attention.blockwise import attend_blockwise
from rlhf_jax.models.attention.ring_passes import Blocks, Owner
from rlhf_jax.models.attention.splash import block_columns, block_sizes
from rlhf_jax.models.caches import KeyValue
from rlhf_jax.models.positions import AttentionMask, with_static_window

Array = jax.Array
SegmentIds = splash_attention.SegmentIds
NOTHING = splash_attention_kernel.DEFAULT_MASK_VALUE  # log-denominator of no keys


class Form(NamedTuple):
    """Static arguments of a call."""

    devices: int  # that pass keys round
    softcap: float | None
    interpret: bool


def attend_ring(
    query: Array,
    keys_values: KeyValue,
    *,
    mask: AttentionMask,
    sinks: Array | None = None,
    interpret: bool = False,
) -> Array:
    """softmax(scale · q·kᵀ)·v over what the mask allows, with keys passed round.

    Layers whose window hides columns use the blockwise engine on every backend. Splash
    returns the results of a turn in query's dtype; they are summed in float32.

    Args:
      query: [B, H, T, head_dim], of the columns of this device.
      keys_values: [B, K, T, head_dim] each, of the same columns.
      mask: of all columns, with a cut and `passed`.
      sinks: f32[H], as in `engines.attend_to`.
      interpret: runs splash's operations one by one, on any backend, for tests.

    Returns:
      [B, H, T, head_dim], in query's dtype; finite at padding if the inputs are.
    """
    backend = layout.backend_of(jax.sharding.get_abstract_mesh())
    if not interpret and (backend != "tpu" or query.shape[-1] % layout.SPLASH_HEAD_DIM):
        return attend_blockwise(query, keys_values, mask=mask, sinks=sinks)

    def attend(mask: AttentionMask) -> Array:
        assert mask.window is None or isinstance(mask.window, int)
        if mask.window is not None and mask.window < mask.columns:
            return attend_blockwise(query, keys_values, mask=mask, sinks=sinks)
        return _attend_splash(
            query, keys_values, mask=mask, sinks=sinks, interpret=interpret
        )

    return with_static_window(mask, attend)


def _attend_splash(
    query: Array,
    keys_values: KeyValue,
    *,
    mask: AttentionMask,
    sinks: Array | None,
    interpret: bool,
) -> Array:
    assert mask.cut is not None
    rows, heads, queries, head_dim = query.shape
    half = queries // 2
    # Each half is padded at its end, with columns that are hidden or of no text.
    room = -half % block_columns(half)

    def padded(x: Array, axis: int) -> Array:
        halves = x.reshape(*x.shape[:axis], 2, half, *x.shape[axis + 1 :])
        widths = [(0, 0)] * halves.ndim
        widths[axis + 1] = (0, room)
        halves = jnp.pad(halves, widths)
        return halves.reshape(*x.shape[:axis], -1, *x.shape[axis + 1 :])

    scale = 1 / math.sqrt(head_dim) if mask.scale is None else mask.scale
    scaled = (query * scale).astype(query.dtype)
    # i32[c, B, T], texts of the keys of every device.
    segments = jax.vmap(lambda columns: jnp.take(mask.segments, columns, axis=1))(
        mask.columns_of_devices(queries)
    )
    y: Array = _attend(
        *(padded(x, 2) for x in (scaled, *keys_values)),
        padded(segments, 2),
        None if sinks is None else sinks.astype(jnp.float32),
        Form(devices=mask.cut.count, softcap=mask.softcap, interpret=interpret),
    )
    y = y.reshape(rows, heads, 2, half + room, head_dim)[:, :, :, :half]
    return y.reshape(query.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(
    q: Array, k: Array, v: Array, segments: Array, sinks: Array | None, form: Form
) -> Array:
    out, _ = _forward(q, k, v, segments, sinks, form)
    return out


def _forward(
    q: Array, k: Array, v: Array, segments: Array, sinks: Array | None, form: Form
) -> tuple[Array, Any]:
    def turn(arrays: Blocks, owner: Owner) -> tuple[Array, Array]:
        def attend(part: Part) -> tuple[Array, Array]:
            def row(*arrays: Any) -> Any:
                q, k, v, ids = arrays
                kernel = _kernel(q, k, part=part, form=form, save_residuals=True)
                return kernel(q, k, v, segment_ids=ids)

            out, [normaliser] = jax.vmap(row)(*part.of(arrays, segments, owner=owner))
            rest = ((0, 0), (0, 0), (part.first, 0))
            out = jnp.pad(out, (*rest, (0, 0)))
            return out, jnp.pad(normaliser, rest, constant_values=NOTHING)

        return _by_place(attend, owner, half=q.shape[2] // 2)

    of_heads = None if sinks is None else sinks[None, :, None]
    out, normaliser = ring_passes.forward(
        (q, k, v), turn, count=form.devices, sinks=of_heads
    )
    out = out.astype(q.dtype)
    return out, ((q, k, v), segments, out, normaliser, sinks)


def _backward(form: Form, residuals: Any, gradient: Array) -> tuple[Array | None, ...]:
    arrays, segments, out, normaliser, sinks = residuals

    def turn(arrays: Blocks, owner: Owner) -> Blocks:
        def differentiate(part: Part) -> Blocks:
            def row(*arrays: Any) -> Blocks:
                q, k, v, ids, out, normaliser, gradient = arrays
                kernel = _kernel(q, k, part=part, form=form)
                tables = kernel.dq_mask_info, kernel.dkv_mask_info
                # Needs the denominators over all keys, which the kernel's own custom
                # VJP does not take.
                _, _, _, *gradients, _, _ = (
                    splash_attention_kernel._splash_attention_bwd(
                        **kernel.kwargs,
                        res=(q, k, v, ids, None, out, normaliser, *tables),
                        do=gradient,
                    )
                )
                return tuple(gradients)

            results = (x[:, :, part.first :] for x in (out, normaliser, gradient))
            of_q, *of_keys = jax.vmap(row)(
                *part.of(arrays, segments, owner=owner), *results
            )
            of_q = jnp.pad(of_q, ((0, 0), (0, 0), (part.first, 0), (0, 0)))
            hidden = arrays[1].shape[2] - of_keys[0].shape[2]
            widths = ((0, 0), (0, 0), (0, hidden), (0, 0))
            return of_q, *(jnp.pad(x, widths) for x in of_keys)

        return _by_place(differentiate, owner, half=out.shape[2] // 2)

    blocks = ring_passes.backward(arrays, turn, count=form.devices)
    of_sinks = None
    if sinks is not None:
        of_out = gradient.astype(jnp.float32) * out.astype(jnp.float32)
        share = jnp.exp(sinks[None, :, None] - normaliser)
        of_sinks = -(share * of_out.sum(axis=-1)).sum(axis=(0, 2))
    return *blocks, None, of_sinks


_attend.defvjp(_forward, _backward)


class Part(NamedTuple):
    """The part of a turn that a device computes: queries from first, keys to last."""

    first: int = 0
    last: int | None = None
    causal: bool = False

    def of(self, arrays: Blocks, segments: Array, *, owner: Owner) -> tuple[Any, ...]:
        """q, k and v of this part, and their texts."""
        q, k, v = arrays
        of_q, of_k = (segments[ring_passes.device(device)] for device in (None, owner))
        return (
            q[:, :, self.first :],
            *(x[:, :, : self.last] for x in (k, v)),
            SegmentIds(of_q[:, self.first :], of_k[:, : self.last]),
        )


def _by_place(compute: Callable[[Part], Any], owner: Owner, *, half: int) -> Any:
    """Calls compute(part) for the part of the owner's keys that the queries see."""
    if owner is None:
        return compute(Part(causal=True))
    with jax.named_scope(ring_passes.WHOLE):
        results = jax.lax.cond(
            owner < ring_passes.device(),
            lambda: compute(Part(last=half)),
            lambda: compute(Part(first=half)),
        )
    # Otherwise XLA casts to float32 within the branches and doubles the memory.
    return jax.lax.optimization_barrier(results)


def _kernel(
    q: Array, k: Array, *, part: Part, form: Form, save_residuals: bool = False
) -> Any:
    """The splash kernel for one row: q [H, n, head_dim] and k [K, m, head_dim]."""
    heads, shape = q.shape[0], (q.shape[1], k.shape[1])
    kind = splash_attention.CausalMask if part.causal else splash_attention.FullMask
    block = block_columns(q.shape[1] // 2 if part.causal else min(shape))
    return splash_attention.make_splash_mha(
        splash_attention.MultiHeadMask([kind(shape)] * heads),
        block_sizes=block_sizes(block, block, pairs=shape[0] * shape[1]),
        head_shards=1,
        q_seq_shards=1,
        attn_logits_soft_cap=form.softcap,
        save_residuals=save_residuals,
        interpret=form.interpret,
    )
