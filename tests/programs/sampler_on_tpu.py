"""Counts the operations of the sampler's loop on absent TPUs; JSON on stdout.

Run by test_targets.py in its own process: JAX chooses its platforms only once.
"""

import json
import re

import jax
import planned

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.planning import cost, measured
from rlhf_jax.planning.hlo import parsing
from rlhf_jax.train.plan import job, plan

# A cache that does not fit on the chip, and heads that four devices share.
VOCAB, WIDTH, LAYERS, ROWS = 4096, 2048, 2, 64
MESH = MeshShape(data=2, tensor=4)


def loops(text):
    """Bodies of the loops over tokens, which end when every row has stopped."""
    computations, _ = parsing.parse(text)
    for lines in computations.values():
        for line in lines.values():
            if line.opcode == "while" and "known_trip_count" not in line.rest:
                yield computations[line.called("body")]


def main():
    jax.config.update("jax_platforms", "cpu")
    texts, count = [], cost.cost

    def counted(text, **settings):
        texts.append(text)
        return count(text, **settings)

    cost.cost = counted
    config, options = planned.parsed(
        *("grpo", "--topology=v5e:2x4", "--placement.policy=fsdp=8"),
        *(f"--placement.sampler={MESH}", "--sampler=here,dtype=bfloat16"),
        *("--prompt-length=896", "--max-new-tokens=128", f"--batch-size={ROWS}"),
        "--dtype=bfloat16",
        path=planned.model(VOCAB, WIDTH, LAYERS, heads=16, positions=1024),
        chip=None,
    )
    target = planned.target_of(config, options)
    work = job.Job(options, target).workload_of(config)
    [one] = measured.measure(work.programs[:1], target, rows=ROWS, waiting=plan.silent)
    described = measured.described(one, target.chip, num_chips=8)
    lines = [line for body in loops(texts[0]) for line in body.values()]
    layers = one.program.args[0]["layers"]
    of_layers = sum(leaf.size for leaf in jax.tree.leaves(layers)) * 2 / MESH.tensor
    cached = work.within["KV cache"] / MESH.size
    print(
        json.dumps(
            {
                "loops": len(list(loops(texts[0]))),
                "turns": described["turns"],
                "bytes": described["seconds_of_turn"]["memory"] * target.chip.bandwidth,
                "weights": of_layers + VOCAB * WIDTH * 2 / MESH.tensor,
                "cache": cached,
                "copied": [
                    list(leaf.shape)
                    for line in lines
                    for leaf in line.result
                    if line.opcode in ("copy", "transpose")
                    and leaf.size >= cached / 2 / LAYERS
                ],
                "collectives": sorted(
                    {
                        line.opcode.removesuffix("-start")
                        for line in lines
                        if re.match(r"all-|reduce-scatter|collective", line.opcode)
                        and not line.opcode.endswith("-done")
                        and max(leaf.size for leaf in line.result) > 8 * 64
                    }
                ),
            }
        )
    )


if __name__ == "__main__":
    main()
