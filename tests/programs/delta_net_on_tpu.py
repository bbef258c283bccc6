"""Counts the bytes of a DeltaNet's pass as libtpu compiles it for v6e; JSON on stdout.

Run by test_tpu_traffic.py in its own process: JAX chooses its platforms only once.
The layer is one of Qwen3.5-4B, with four rows, as a chip of the recorded plan has.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from rlhf_jax.models.delta_net import GatedDeltaNet
from rlhf_jax.models.families import registry
from rlhf_jax.models.positions import AttentionMask
from rlhf_jax.planning import compiled, cost

ROWS, COLUMNS = 4, 2048
MODEL = dataclasses.replace(registry.KNOWN["qwen3.5-4b"], dtype="bfloat16")


def forward(params, x, segments):
    mask = AttentionMask(segments)
    net = GatedDeltaNet(MODEL)
    return net.apply({"params": params}, x, rows=ROWS, mask=mask, cache=None)[0]


def main():
    compiled.ask_compilers_alone()
    x = jax.ShapeDtypeStruct((ROWS * COLUMNS, MODEL.hidden_size), jnp.bfloat16)
    segments = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32)

    def init(x):
        net = GatedDeltaNet(MODEL)
        return net.init(jax.random.key(0), x, rows=ROWS, mask=None, cache=None)

    params = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16),
        jax.eval_shape(init, x)["params"],
    )
    device = compiled.target("v6e:2x2")
    args = params, x, segments
    where = SingleDeviceSharding(device)
    args = compiled.placed(args, jax.tree.map(lambda _: where, args))
    done = compiled.program(forward, *args, device=device)
    print(json.dumps(cost.cost(done.as_text()).bytes / (ROWS * COLUMNS)))


if __name__ == "__main__":
    main()
