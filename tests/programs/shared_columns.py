"""Temporary memory of attention's gradients with columns over chips; JSON.

Runs in its own process, for absent chips: JAX chooses its platforms only once.

    python tests/programs/shared_columns.py v5p:2x2x2 131072 splash ring

One row of 32 heads, 8 of them key heads, of 128 numbers in bfloat16.
"""

import dataclasses
import json
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models import axes
from rlhf_jax.models.attention import attend
from rlhf_jax.models.families import registry
from rlhf_jax.models.positions import mask_of
from rlhf_jax.planning import compiled

MODEL = registry.KNOWN["llama-3.1-8b"]


def main():
    jax.config.update("jax_platforms", "cpu")
    topology, columns, *engines = sys.argv[1:]
    chips = compiled.slice_of(topology)
    mesh = MeshShape(context=len(chips)).make(chips)
    device = mesh.devices.flat[0]
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        cut = axes.cut_of(1)
    by_part = NamedSharding(mesh, cut.by_part)

    def shape(heads):
        size = (len(chips), heads, int(columns) // len(chips), MODEL.head_dim)
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=by_part)

    row = jax.ShapeDtypeStruct((1, int(columns)), jnp.bool_)
    [mask] = jax.tree.leaves(compiled.placed(row, NamedSharding(mesh, cut.by_row)))
    sizes = {}
    for engine in engines:
        model = dataclasses.replace(MODEL, dtype="bfloat16", attention=engine)

        def loss(query, key, value, mask, model=model):
            of_row = mask_of(mask, segments=None, cut=cut)
            y = attend(query, (key, value), mask=of_row, model=model)
            return y.astype(jnp.float32).sum()

        done = compiled.program(
            sharding.on(mesh, jax.grad(loss, (0, 1, 2))),
            shape(MODEL.num_heads),
            *(shape(MODEL.num_kv_heads) for _ in range(2)),
            mask,
            device=device,
        )
        sizes[engine] = done.memory_analysis().temp_size_in_bytes
    print(json.dumps(sizes))


if __name__ == "__main__":
    main()
