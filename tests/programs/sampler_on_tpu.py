"""What the sampler's loop over tokens does on TPUs that are not there; JSON on stdout.

A program by itself, run by test_targets.py: JAX is told of its platforms once.
"""

import json
import re

import jax

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.planning import cost, measured, plan
from rlhf_jax.planning.hlo import instructions, parsing
from rlhf_jax.planning.jobs import job
from rlhf_jax.planning.plan_options import Options

# A cache that does not fit on the chip, and heads that four devices share.
SHAPE = {"vocab_size": 4096, "hidden_size": 2048, "num_layers": 2, "num_heads": 16}
SHAPE |= {"prompt_length": 896, "max_new_tokens": 128, "batch_size": 64}
SHAPE |= {"max_positions": 1024}
MESH = MeshShape(data=2, tensor=4)


def loops(text):
    """Bodies of loops that end when every row has stopped."""
    computations, _ = parsing.parse(text)
    for lines in computations.values():
        for line in lines.values():
            if line.opcode == "while" and "known_trip_count" not in line.rest:
                yield computations[instructions.called(line, "body")]


def main():
    jax.config.update("jax_platforms", "cpu")
    texts, count = [], cost.cost

    def counted(text, **settings):
        texts.append(text)
        return count(text, **settings)

    cost.cost = counted
    options = Options(
        **SHAPE,
        algorithm="grpo",
        topology="v5e:2x4",
        mesh=MeshShape(fsdp=8),
        sampler_mesh=MESH,
        sampler="bf16",
        dtype="bfloat16",
    )
    target = measured.target(options.slice, chip=options.chip, mesh=options.mesh)
    work = job.workload_of(options, lengths=None)
    [one] = measured.measure(
        work.programs[:1], target, rows=options.batch_size, waiting=plan.silent
    )
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
                "weights": of_layers + 4096 * 2048 * 2 / MESH.tensor,
                "cache": cached,
                "copied": [
                    list(leaf.shape)
                    for line in lines
                    for leaf in line.result
                    if line.opcode in ("copy", "transpose")
                    and leaf.size >= cached / 2 / SHAPE["num_layers"]
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
