"""Compiles log-probs of rows with columns over four absent TPUs; JSON on stdout.

Run by test_targets.py with an attention engine, in its own process: JAX chooses
its platforms only once.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp

from rlhf_jax import config, decoder
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.planning import compiled
from rlhf_jax.roles import policy

COLUMNS, WIDTH, CONTEXT = 8192, 384, 4
LLAMA = config.llama(
    vocab_size=4096,
    hidden_size=WIDTH,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    intermediate_size=512,
    max_positions=COLUMNS,
    dtype="bfloat16",
    remat="full",
)


def main():
    jax.config.update("jax_platforms", "cpu")
    model = dataclasses.replace(LLAMA, attention=sys.argv[1])
    mesh = MeshShape(context=CONTEXT).make(compiled.slice_of("v5e:2x2"))
    shapes = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=model))
    tokens = jax.ShapeDtypeStruct((1, COLUMNS), jnp.int32)

    def loss(params, tokens):
        mask = tokens > 0
        return policy.logprobs(params, model=model, tokens=tokens, mask=mask).sum()

    done = compiled.program(
        sharding.on(mesh, jax.grad(loss)),
        compiled.placed(shapes, sharding.shardings(shapes, mesh=mesh)),
        compiled.placed(tokens, row_sharding.row_shardings(tokens, mesh=mesh)),
        device=mesh.devices.flat[0],
    )
    text = done.as_text()
    print(
        json.dumps(
            {
                "kernels": text.count("splash_m"),
                "whole keys": text.count(f"{COLUMNS},{model.head_dim}]"),
                "passed": text.count(" collective-permute-start("),
                "whole rows": text.count(f"{COLUMNS},{WIDTH}]"),
                "own columns": text.count(f"{COLUMNS // CONTEXT},{WIDTH}]"),
            }
        )
    )


if __name__ == "__main__":
    main()
