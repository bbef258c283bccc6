"""Counts a decoding loop's bytes as libtpu compiles it; JSON on stdout.

Run by test_tpu_traffic.py in its own process: JAX chooses its platforms only once.
Every turn reads gated layers, a cache and a head, and adds the best token's embedding.
"""

import json

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from rlhf_jax.planning import compiled, cost

LAYERS, WIDTH, INNER, WORDS = 2, 2048, 8192, 32768
ROWS, COLUMNS, TURNS = 8, 512, 16


def decode(layers, caches, head, x):
    def turn(step, carry):
        x, total = carry
        for (up, gate, down), cache in zip(layers, caches, strict=True):
            y = x * jax.lax.rsqrt(jnp.mean(x.astype(jnp.float32) ** 2)).astype(x.dtype)
            y = (jax.nn.silu(y @ gate) * (y @ up)) @ down
            share = jax.nn.softmax(jnp.einsum("bd,bsd->bs", y, cache), axis=-1)
            x = x + jnp.einsum("bs,bsd->bd", share, cache)
        logits = jnp.einsum("bd,vd->bv", x, head, preferred_element_type=jnp.float32)
        best = jnp.argmax(logits, axis=-1)
        return x + head[best], total + best + step

    return jax.lax.fori_loop(0, TURNS, turn, (x, jnp.zeros(ROWS, jnp.int32)))


def main():
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    layer = shape(WIDTH, INNER), shape(WIDTH, INNER), shape(INNER, WIDTH)
    args = (
        [layer] * LAYERS,
        [shape(ROWS, COLUMNS, WIDTH)] * LAYERS,
        shape(WORDS, WIDTH),
        shape(ROWS, WIDTH),
    )
    num_bytes = {}
    for topology in ("v5e:2x2", "v5p:2x2x1"):
        device = compiled.target(topology)
        where = SingleDeviceSharding(device)
        placed = compiled.placed(args, jax.tree.map(lambda _: where, args))  # noqa: B023
        done = compiled.program(decode, *placed, device=device)
        num_bytes[topology] = cost.cost(done.as_text()).bytes
    print(json.dumps(num_bytes))


if __name__ == "__main__":
    main()
