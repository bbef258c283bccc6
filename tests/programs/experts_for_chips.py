"""Counts layers of experts as a chip's compiler has them; JSON on stdout.

A program by itself, run by test_experts_on_chips.py: JAX is told of its platforms once.

    python tests/programs/experts_for_chips.py v5e:2x2
"""

import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from rlhf_jax.models.experts.dispatch import mixed
from rlhf_jax.planning import compiled, cost

LAYERS, EXPERTS, PER_TOKEN, WIDTH, INNER = 3, 32, 2, 1024, 512
TOKENS = 4, 2048  # of a decoded token, of an update


def layers(weights, x, chosen, shares):
    def layer(x, weights):
        y = mixed(x, chosen, shares, weights=weights, gate=lambda up, gate: up * gate)
        return x + y, None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, weights)
    return x.astype(jnp.float32).sum()


def main():
    device = compiled.target(sys.argv[1])
    where = SingleDeviceSharding(device)

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    inward = {"kernel": shape(LAYERS, EXPERTS, WIDTH, INNER)}
    outward = {"kernel": shape(LAYERS, EXPERTS, INNER, WIDTH)}
    weights = {"up": inward, "gate": inward, "down": outward}
    found = {}
    for tokens in TOKENS:
        args = (
            weights,
            shape(tokens, WIDTH),
            shape(tokens, PER_TOKEN, dtype=jnp.int32),
            shape(tokens, PER_TOKEN, dtype=jnp.float32),
        )
        for name, function in (("forward", layers), ("gradient", jax.grad(layers))):
            done = compiled.program(function, *args, device=device)
            work = cost.cost(done.as_text())
            found[f"{name} of {tokens}"] = {
                "flops": work.flops,
                "bytes": work.bytes,
                "unknown_loops": work.unknown_loops,
                "temporary": done.memory_analysis().temp_size_in_bytes,
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
