"""Plans small PPO and GRPO runs for absent chips; JSON on stdout.

Run by test_targets.py with a topology and a mesh, in its own process: JAX chooses
its platforms once, and other compilers do not know the flags of the tests' CPU.
"""

import collections
import json
import re
import sys

import jax
import planned

from rlhf_jax.planning import cost
from rlhf_jax.train.plan import plan


def main():
    topology, mesh = sys.argv[1:]
    jax.config.update("jax_platforms", "cpu")
    targets, count = collections.Counter(), cost.cost

    def counted(text, **settings):
        targets.update(re.findall(r'custom_call_target="([^"]*)"', text))
        return count(text, **settings)

    cost.cost = counted
    results = {}
    for algorithm in ("ppo", "grpo"):
        targets.clear()
        # Heads that cuDNN has kernels for, and sizes that every axis divides.
        words = [f"--topology={topology}", f"--placement.policy={mesh}"]
        words += ["--dtype=bfloat16", "--remat=full", "--num-epochs=1"]
        words += ["--placement.sampler=policy"]  # else it is resharded first
        words += ["--prompt-length=64", "--max-new-tokens=64"]
        # `auto` takes cuDNN from 1,024 tokens on.
        words += ["--attention=cudnn"] if topology.startswith("h100") else []
        path = planned.model(vocab=512, width=256, heads=4)
        result = plan.plan(*planned.parsed(algorithm, *words, path=path, chip=None))
        results[algorithm] = {**result, "custom_calls": dict(targets)}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
