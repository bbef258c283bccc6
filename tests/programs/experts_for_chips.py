"""Counts expert layers as compiled for a chip; JSON on stdout.

Run by test_experts_on_chips.py in its own process: JAX chooses its platforms once.

    python tests/programs/experts_for_chips.py v5e:2x2
"""

import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from rlhf_jax.models.experts.dispatch import mixed
from rlhf_jax.planning import compiled, cost

# A layer's experts are more than a TPU's on-chip memory takes.
LAYERS, EXPERTS, PER_TOKEN, WIDTH, INNER = 2, 128, 2, 1024, 512
ROWS, TOKENS = 4, 2048  # of a decoded token, of an update


def layer(x, weights, chosen, shares):
    y = mixed(x, chosen, shares, weights=weights, gate=lambda up, gate: up * gate)
    return x + y


def decoded(layers, x, chosen, shares):
    """A decoding step of unrolled layers, as in a sampler."""
    for weights in layers:
        x = layer(x, weights, chosen, shares)
    return x


def trained(stacked, x, chosen, shares):
    """The gradient of all layers, rematerialised in a scan."""

    def total(stacked):
        def body(x, weights):
            return layer(x, weights, chosen, shares), None

        return jax.lax.scan(jax.checkpoint(body), x, stacked)[0].sum(dtype=jnp.float32)

    return jax.grad(total)(stacked)


def main():
    device = compiled.target(sys.argv[1])
    where = SingleDeviceSharding(device)

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    def weights(*layers):
        inward = {"kernel": shape(*layers, EXPERTS, WIDTH, INNER)}
        outward = {"kernel": shape(*layers, EXPERTS, INNER, WIDTH)}
        return {"up": inward, "gate": inward, "down": outward}

    programs = {
        "decoded": (decoded, [weights()] * LAYERS, ROWS),
        "trained": (trained, weights(LAYERS), TOKENS),
    }
    found = {}
    for name, (function, params, tokens) in programs.items():
        done = compiled.program(
            function,
            params,
            shape(tokens, WIDTH),
            shape(tokens, PER_TOKEN, dtype=jnp.int32),
            shape(tokens, PER_TOKEN, dtype=jnp.float32),
            device=device,
        )
        work = cost.cost(done.as_text())
        found[name] = {
            "flops": work.flops,
            "bytes": work.bytes,
            "unknown_loops": work.unknown_loops,
            "temporary": done.memory_analysis().temp_size_in_bytes,
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
