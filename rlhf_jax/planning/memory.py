"""Memory before anything is allocated: shapes for what is held, the compiler for the
rest.

    rlhf-jax memory --model gpt2 --reference int8 --policy lora

Parameters, optimizer states and the KV cache are counted from `jax.eval_shape`. What a
step needs beside them is the temporaries of its own programs (`jobs/`), as the
compiler reports them for one device: this machine's, or that of a TPU that is not there
(`--topology v5e:2x2`, extra `plan`). For a slice of many, see `plan.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from rlhf_jax.models import leaves
from rlhf_jax.planning import compiled, run_shape, workload
from rlhf_jax.planning.jobs import policy_gradient
from rlhf_jax.planning.run_shape import WAYS, Options
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import report

PyTree = Any


class Line(NamedTuple):
    """What something takes, bytes."""

    what: str
    device: int
    host: int = 0


def memory(options: Options) -> list[Line]:
    """`models`, and what a PPO run needs beside them.

    The last two lines are all that is held, and that with the most that a program of a
    step needs at a time. Batches, a few numbers a token, are left out.

    Raises:
      InputError: there is no such checkpoint or topology, a storage that the device
        lacks, or sizes that do not fit.
    """
    device = compiled.target(options.topology)
    lines = models(options)
    ppo = run_shape.ppo(options)
    programs = policy_gradient.programs(
        options, policy_gradient.resident(options, recipe=ppo), recipe=ppo
    )
    temporaries = {
        program.name: compiled.memory(
            program.function, *program.args, device=device, donate=program.donate
        ).temp_size_in_bytes
        for program in programs
    }
    columns = options.prompt_length + options.max_new_tokens
    cache = workload.cache_bytes(ppo.model, rows=options.sampled_rows, columns=columns)
    resident = sum(line.device for line in lines)
    host = sum(line.host for line in lines)
    most = resident + max(cache, *temporaries.values())
    sampling = temporaries.pop("sampling")
    return [
        *lines,
        Line("KV cache", cache),
        Line("activations of sampling", max(sampling - cache, 0)),
        *(Line(f"activations of {what}", size) for what, size in temporaries.items()),
        Line("held throughout", resident, host),
        Line("held at most", most, host),
    ]


def models(options: Options) -> list[Line]:
    """What the models and optimizers of a PPO run take; nothing is compiled.

    Raises:
      InputError: there is no such checkpoint or topology, or a storage that the device
        lacks.
    """
    ways = (
        WAYS.get(way, {})
        for way in (options.base, options.reference, options.reward_model)
    )
    if any("memory" in way for way in ways):
        storage.check_memory(compiled.target(options.topology))
    ppo = run_shape.ppo(options)
    resident = policy_gradient.parts(policy_gradient.resident(options, recipe=ppo))
    names = ["policy", "policy's optimizer", "critic", "critic's optimizer"]
    names.append("reference, the base" if options.reference == "base" else "reference")
    if options.policy == "lora":
        names.insert(0, "base of the adapters")
    names.append("reward model")
    return [Line(name, *_bytes(resident.get(name))) for name in names]


def run(options: Options) -> None:
    """Prints `memory` as a table."""
    if options.topology is not None:
        compiled.ask_compilers_alone()
    where = options.topology or compiled.target(None).device_kind
    name = options.model or f"GPT-2 of {options.num_layers} layers"
    rows = [
        (line.what, round(line.device / 2**20), round(line.host / 2**20))
        for line in memory(options)
    ]
    title = f"Memory of PPO on {name}, on one {where} [MiB]"
    report.table(title, ("", "device", "host"), rows)


def _bytes(tree: PyTree) -> tuple[int, int]:
    """On the device and on the host; of a `Frozen` the parameters alone."""
    stored = tree.stored if isinstance(tree, Frozen) else tree
    whole = jax.tree.leaves(stored, is_leaf=leaves.is_stored)
    host = sum(
        storage.nbytes(leaf) for leaf in whole if isinstance(leaf, leaves.OnHost)
    )
    return storage.nbytes(stored) - host, host
