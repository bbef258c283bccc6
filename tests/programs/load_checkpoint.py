"""Loads a checkpoint onto a mesh and prints resident memory, before and at its peak.

Run by test_loading_memory.py in its own process, whose memory it measures.
"""

import functools
import json
import resource
import sys

import jax

from rlhf_jax import hf
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape


def main(folder, devices):
    mesh = MeshShape(fsdp=int(devices)).make()
    jax.block_until_ready(jax.numpy.zeros(1))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    over = functools.partial(sharding.shardings, mesh=mesh)
    _, params = hf.load(folder, dtype="float32", sharding=over)
    jax.block_until_ready(params)
    at_most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    kib = 1024
    print(json.dumps({"before": before * kib, "at_most": at_most * kib, "size": size}))


if __name__ == "__main__":
    main(*sys.argv[1:])
