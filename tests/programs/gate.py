"""Lists the waste in compiled programs of real widths, by instruction; JSON.

Run by test_gate.py in its own process: JAX chooses its platforms only once.

    python tests/programs/gate.py h100:1x8 8B fsdp=8 sampling learning -- --lora=rank=16

Two layers of a model are compiled for chips that are not there, and what is wasted is
named:

    in a loop over tokens    weights that are converted, concatenated, gathered or
                             copied; a sum of whole logits over devices
    in every program         float32 logits of whole rows, [B, S, V]
    in the update            gradients that are summed whole where parameters are shared
"""

import dataclasses
import json
import math
import re
import sys

import jax
import planned

from rlhf_jax.devices import precision, sharding
from rlhf_jax.models.families import registry
from rlhf_jax.planning import cost, measured, memory_check
from rlhf_jax.planning.hlo import exchanges, parsing
from rlhf_jax.train.plan import job, plan

MODELS = {"8B": "llama-3.1-8b", "1.5B": "qwen2.5-1.5b", "hybrid": "qwen3.5-4b"}
LAYERS, ROWS, PROMPT, NEW = 2, 64, 896, 640
SMALL = 2**17  # bytes of what a loop carries unchanged that it may move about


class Reader:
    """The instructions of a program that run, and the operands of its loops."""

    def __init__(self, text):
        self.computations, self.entry = parsing.parse(text)
        fused = {
            line.called("calls")
            for line in self.lines(*self.computations)
            if line.opcode == "fusion"
        }
        self.running = [name for name in self.computations if name not in fused]

    def lines(self, *names):
        return [line for name in names for line in self.computations[name].values()]

    def token_loops(self):
        """Bodies of the loops over tokens, which end when every row has stopped."""
        for line in self.lines(*self.running):
            if line.opcode == "while" and "known_trip_count" not in line.rest:
                yield line.called("body")

    def inside(self, name):
        """A computation and all computations that it calls, except fusions."""
        names = [name]
        for line in self.lines(name):
            if line.opcode in ("while", "call", "async-start", "conditional"):
                called = re.findall(
                    r"(?:body|to_apply|calls)=%?([\w.\-]+)", line.rest
                ) + (line.branches if "branch" in line.rest else [])
                names += [inner for one in called for inner in self.inside(one)]
        return names

    def constants(self, body):
        """{name: bytes} of a loop's unchanged state, above all weights."""
        lines = self.computations[body]
        root = parsing.root(lines)
        return {
            line.name: line.whole
            for line in lines.values()
            if line.opcode == "get-tuple-element"
            and lines[line.operands[0]].opcode == "parameter"
            and root.operands[line.index] == line.name
            and line.whole >= SMALL
        }

    def kept(self, body):
        """Bytes that a loop keeps in the chip's small memory."""
        [carried] = (
            line
            for line in self.computations[body].values()
            if line.opcode == "parameter"
        )
        return sum(leaf.size for leaf in carried.result if leaf.on_chip)

    def multiplies(self, line):
        """Whether an instruction is a product or a fusion that contains one."""
        if line.opcode == "fusion":
            return any(map(self.multiplies, self.lines(_called(line))))
        gemm = line.opcode == "custom-call" and "gemm" in line.rest
        return gemm or line.opcode in ("dot", "convolution")

    def takes_rows(self, line):
        """Whether a fusion takes single rows of a table, such as an embedding."""
        kinds = ("gather", "dynamic-slice")
        if line.opcode == "fusion":
            return any(part.opcode in kinds for part in self.lines(_called(line)))
        return line.opcode in kinds


def _called(line):
    return line.called("calls")


def moved_weights(reader, body):
    """Instructions of a loop that copy half of a weight or more."""
    lines = reader.computations[body]
    constants = dict(reader.constants(body))
    for line in lines.values():  # views of a weight are that weight
        if line.opcode in ("bitcast", "opt-barrier") and line.operands[0] in constants:
            constants[line.name] = constants[line.operands[0]]
    free = (
        "bitcast",
        "tuple",
        "get-tuple-element",
        "while",
        "copy-start",
        "opt-barrier",
    )
    for line in lines.values():
        read = [constants[name] for name in line.operands if name in constants]
        if not read or line.opcode in free or line.opcode.endswith("-done"):
            continue
        if reader.multiplies(line) or line.opcode in ("async-start", "slice-start"):
            continue
        if line.written >= max(SMALL, min(read) // 2) and not (
            reader.takes_rows(line) and line.written < max(read) // 2
        ):
            yield described(line)


def collectives(reader, names):
    """Collectives with their computations, including fused ones."""
    for name in names:
        for line in reader.computations[name].values():
            parts = reader.lines(_called(line)) if line.opcode == "fusion" else [line]
            for part in parts:
                kind = part.opcode.removesuffix("-start")
                if kind in exchanges.COLLECTIVES:
                    yield kind, part


def summed_logits(reader, body, *, vocab):
    """Sums of whole logits over devices in a loop."""
    for kind, line in collectives(reader, reader.inside(body)):
        shapes = [leaf.shape for leaf in line.result]
        if kind == "all-reduce" and any(shape[-1:] == (vocab,) for shape in shapes):
            yield described(line)


def whole_logits(reader, *, vocab, width, shares):
    """float32 arrays over columns and vocabulary, or a device's share of either."""
    of_vocab = {vocab // share for share in shares}
    of_width = {width // share for share in shares}
    for line in reader.lines(*reader.running):
        for leaf in line.result:
            count = math.prod(leaf.shape)
            if leaf.size != 4 * count:
                continue
            for dim in of_vocab & set(leaf.shape):
                others = count // dim
                # [V, D] and [D, V] are the head and its gradient.
                if others >= NEW and not of_width & set(leaf.shape):
                    yield described(line)


def summed_gradients(reader, *, smallest, devices):
    """Sums of a kernel's size over the devices that shard it."""
    for kind, line in collectives(reader, reader.running):
        size = max((leaf.size for leaf in line.result), default=0)
        groups = exchanges.group(line.rest)
        if kind == "all-reduce" and size >= 2 * smallest and len(groups) >= devices:
            yield described(line)


def described(line):
    """Describes an instruction so that it can be found in the program."""
    where = re.search(r'op_name="([^"]*)"', line.rest)
    shapes = " ".join(str(list(leaf.shape)) for leaf in line.result)
    return f"{line.opcode} %{line.name} {shapes}, {where[1] if where else 'no op_name'}"


def main():
    jax.config.update("jax_platforms", "cpu")
    topology, size, mesh, *rest = sys.argv[1:]
    at = rest.index("--")
    names, words = rest[:at], rest[at + 1 :]
    whole = registry.KNOWN[MODELS[size]]
    registry.KNOWN["gate"] = last_layers(whole)
    spread_as_all_layers(whole.num_layers)
    config, options = planned.parsed(
        *("grpo", f"--topology={topology}", f"--placement.policy={mesh}"),
        *("--dtype=bfloat16", "--remat=full", "--reference-storage.dtype=bfloat16"),
        *(f"--prompt-length={PROMPT}", f"--max-new-tokens={NEW}"),
        f"--batch-size={ROWS}",
        *words,
        path="gate",
        chip=None,
    )
    with precision.of(config.compute_dtype):
        print(json.dumps(figures(config, options, names)))


def last_layers(model):
    """The model with its last two layers: of a hybrid, a DeltaNet and attention."""
    return dataclasses.replace(
        model,
        num_layers=LAYERS,
        recurrent_layers=model.recurrent_layers[-LAYERS:],
    )


def spread_as_all_layers(count):
    """Shards leaves of two layers like those of all layers."""
    for function in (sharding.shardings, sharding.create, sharding.place):
        function.__kwdefaults__["small"] = sharding.SMALL * LAYERS // count


def figures(config, options, names):
    """{program: its waste}, and for sampling the bytes of a token."""
    target = planned.target_of(config, options)
    config, line = job.Job(options, target).placed(config)
    work = job.Job(options, target).workload_of(config)
    model, mesh = work.model, config.placement.policy
    sampling = config.placement.sampler.mesh or mesh
    texts, count = [], cost.cost

    def counted(text, **settings):
        texts.append(text)
        return count(text, **settings)

    cost.cost = counted
    vocab = model.padded_vocab_size
    shares = {1, mesh.tensor, mesh.fsdp, mesh.size, sampling.tensor}
    results = {"layout": line}
    for program in work.programs:
        if program.name not in names:
            continue
        texts.clear()
        [one] = measured.measure([program], target, rows=ROWS, waiting=plan.silent)
        assert one.refused is None, one.refused
        reader = Reader(texts[0])
        result = {
            "float32 logits": sorted(
                set(
                    whole_logits(
                        reader, vocab=vocab, width=model.hidden_size, shares=shares
                    )
                )
            )
        }
        if program.stage == "rollout":
            bodies = list(reader.token_loops())
            result |= {
                "loops": len(bodies),
                # XLA makes a loop over shares of a product that waits for an exchange,
                # which carries that weight alone.
                "constants": [
                    sum(reader.constants(b).values())
                    for b in bodies
                    if "windowed_dot_general" not in b
                ],
                "kept": [reader.kept(b) for b in bodies],
                "moved weights": [x for b in bodies for x in moved_weights(reader, b)],
                "summed logits": [
                    x
                    for b in bodies
                    for size in {vocab, model.vocab_size}
                    for x in summed_logits(reader, b, vocab=size)
                ],
                # Of the last loop, whose cache is as wide as rows become.
                "bytes": widest(texts[0], len(program.trips), near=target.near),
                "seconds": measured.described(one, target.chip)["seconds_of_turn"],
            }
        if program.stage == "update":
            state = program.args[0]
            kernels = [
                leaf.size // LAYERS // mesh.tensor
                for leaf in jax.tree.leaves(state.policy["layers"])
                if leaf.ndim > 2
            ]
            # Adapters are small, and not all of them are shared.
            shared = mesh.fsdp > 1 and config.start.lora is None
            result |= {
                "summed gradients": list(
                    summed_gradients(reader, smallest=min(kernels), devices=mesh.fsdp)
                )
                if shared
                else [],
                "donated": one.sizes["alias"],
                "state": memory_check.bytes_per_device(
                    state.policy_opt, mesh=target.mesh
                )
                + memory_check.bytes_per_device(state.policy, mesh=target.mesh),
            }
        results[program.name] = result
    return results


def widest(text, loops, *, near):
    """Bytes of a turn of the last loop over tokens."""
    before = (0,) * (loops - 1)
    none, one = (
        cost.cost(text, trips=(*before, turns), near=near).bytes for turns in (0, 1)
    )
    return one - none


if __name__ == "__main__":
    main()
