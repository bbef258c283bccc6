"""Plans small PPO and GRPO runs for chips that are not there; JSON on stdout.

A program by itself, run by test_targets.py with a topology and a mesh: JAX is told of
its platforms once, and the flags of the tests' own CPU are not for other compilers.
"""

import collections
import json
import re
import sys

import jax

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.planning import cost, plan
from rlhf_jax.planning.plan_options import Options

# Heads that cuDNN has kernels for, and sizes that every axis divides.
SHAPE = {"vocab_size": 512, "hidden_size": 256, "num_layers": 2, "num_heads": 4}
SHAPE |= {"prompt_length": 64, "max_new_tokens": 64, "batch_size": 16}


def main():
    topology, mesh = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    targets, count = collections.Counter(), cost.cost

    def counted(text, **settings):
        targets.update(re.findall(r'custom_call_target="([^"]*)"', text))
        return count(text, **settings)

    cost.cost = counted
    found = {}
    for algorithm in ("ppo", "grpo"):
        targets.clear()
        options = Options(
            **SHAPE,
            algorithm=algorithm,
            topology=topology,
            mesh=MeshShape.parse(mesh),
            dtype="bfloat16",
            remat="full",
            num_epochs=1,
            # `auto` takes cuDNN from 1,024 tokens on.
            attention="cudnn" if topology.startswith("h100") else None,
        )
        result = plan.plan(options)
        found[algorithm] = {**result, "custom_calls": dict(targets)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
