"""Whether a run fits TPUs or GPUs that are not there, and how fast it can be.

    rlhf-jax plan --model llama-2-7b --topology v5e:8x8 --mesh fsdp=64 \\
        --dtype bfloat16 --remat full --reference bf16 --reward bf16 \\
        --batch-size 512 --prompt-length 512 --max-new-tokens 512 \\
        --num-minibatches 4 --json plan.json

    rlhf-jax plan --model llama-3.1-8b --chip h100 --topology 8x8 --mesh fsdp=64 ...

Every program of a step is compiled for the slice (extra `plan`, or `plan-cuda` for
GPUs, named as nodes x GPUs of a node; nothing runs). The verdict is over what is alive
at the same time: while one program runs, everything that it does not read stays where
it is.

    alive = what it does not read + its arguments + temporaries + results - aliases

Seconds are a roofline, a lower bound: matrix products at the chip's peak in bfloat16,
its memory and its links (of GPUs NVLink inside a node, and the network between nodes)
at their peak rates, and all of it at once. Sampling goes on to the last token. Without
a topology this machine's own compiler stands in for the chip's (`--chip`); its layouts
and fusions are others, and the plan says so.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from rlhf_jax.models import decoder, engine_choice
from rlhf_jax.planning import (
    compiled,
    gpu_targets,
    histogram,
    measured,
    tables,
    workload,
)
from rlhf_jax.planning.advice import advice, largest
from rlhf_jax.planning.chips import Chip
from rlhf_jax.planning.jobs import job
from rlhf_jax.planning.measured import Target, Waiting
from rlhf_jax.planning.plan_options import Options, command
from rlhf_jax.planning.sampler import meshes, resharding
from rlhf_jax.runs import report


def silent(what: str) -> AbstractContextManager[None]:
    """Shows nothing of what is waited for."""
    del what
    return nullcontext()


def plan(options: Options, *, waiting: Waiting = silent) -> dict[str, Any]:
    """The plan, as `--json` writes it.

    Args:
      waiting: shows what is being compiled.

    Returns:
      All bytes are of one chip. `held` is what is alive throughout, `programs` what
      each takes and does, `alive` the sum while each runs, `peak` the largest of those,
      `within` what of the temporaries is known from shapes alone.

    Raises:
      InputError: libtpu or the topology is missing, the mesh does not multiply to the
        chips, an axis does not divide a dimension or the rows, or sizes do not fit.
    """
    target = measured.target(options.slice, chip=options.chip, mesh=options.mesh)
    lengths = None if options.lengths is None else histogram.read(options.lengths)
    work = job.workload_of(options, lengths=lengths)
    resident = measured.resident(work.parts, target)
    layouts = []
    if options.find_sampler_mesh:
        layouts = meshes.compare(
            options, target, resident=resident, lengths=lengths, waiting=waiting
        )
        options = dataclasses.replace(
            options, sampler_mesh=layouts[0].mesh, find_sampler_mesh=False
        )
        work = job.workload_of(options, lengths=lengths)
    visits = workload.block_visits(
        work.model,
        columns=options.columns,
        context=options.mesh.context,
        backend=engine_choice.backend_of(target.mesh.abstract_mesh),
    )
    measurements = measured.measure(
        work.programs,
        target,
        rows=options.batch_size,
        visits=visits,
        waiting=waiting,
    )
    alive = [measured.alive(one, resident) for one in measurements]
    peak = max(alive, key=lambda row: row.total)
    fits = peak.total <= target.chip.memory and not any(
        one.refused for one in measurements
    )
    chips = options.mesh.size
    programs = []
    for one in measurements:
        brought = resharding.described(one, target)
        programs += [] if brought is None else [brought]
        programs.append(measured.described(one, target.chip, num_chips=chips))
    row_devices = options.mesh.data * options.mesh.fsdp
    within = {name: size // row_devices for name, size in work.within.items()}
    if "KV cache" in within:  # whose rows lie on `context` too
        within["KV cache"] //= options.mesh.context
    if options.sampler_mesh is not None and "KV cache" in within:
        shape = options.sampler_mesh
        heads = math.gcd(shape.tensor, work.model.num_kv_heads)
        shared = shape.data * shape.fsdp * heads
        within["KV cache"] = work.within["KV cache"] // shared
    result: dict[str, Any] = {
        "command": command(options),
        "versions": _versions(),
        "compiler": target.compiler,
        "algorithm": options.algorithm,
        "topology": options.slice,
        "chips": chips,
        "mesh": dataclasses.asdict(options.mesh),
        "chip": {"name": target.name, **dataclasses.asdict(target.chip)},
        "parameters": decoder.num_parameters(work.model),
        "attention": work.model.attention,
        "fits": fits,
        "peak": peak._asdict(),
        "held": resident,
        "alive": [row._asdict() for row in alive],
        "within": within,
        **speed(programs, chip=target.chip, num_chips=chips, tokens=work.tokens),
        "advice": [] if fits else advice(options, resident=resident, alive=alive),
        "programs": programs,
    }
    if options.sampler_mesh is not None:
        result["sampler_mesh"] = dataclasses.asdict(options.sampler_mesh)
    if layouts:
        result["sampler_meshes"] = [one.described() for one in layouts]
    if lengths is not None:
        result["lengths"] = {
            "responses": len(lengths),
            "mean": sum(lengths) / len(lengths),
            "longest": lengths[-1],
        }
    if options.find_batch:
        result["largest_batch"] = _largest_batch(
            options,
            target,
            resident=resident,
            peak=peak.total if fits else None,
            lengths=lengths,
            waiting=waiting,
        )
    return result


def speed(
    programs: list[dict[str, Any]], *, chip: Chip, num_chips: int, tokens: int
) -> dict[str, Any]:
    """How fast a step can be at most, as JSON values.

    Args:
      programs: from `measured.described`.
      chip: its peak rate.
      num_chips: chips.
      tokens: of a step's prompts and responses, without padding.

    Returns:
      `seconds`, `model_flops` and `mfu` of a step, `tokens`, tokens a second and chip,
      and the share of the seconds that each stage takes.
    """
    seconds = sum(one["seconds"]["bound"] for one in programs)
    flops = sum(one["model_flops"] for one in programs)
    stages = {one["stage"]: 0.0 for one in programs}
    for one in programs:
        stages[one["stage"]] += one["seconds"]["bound"]
    return {
        "seconds": seconds,
        "model_flops": flops,
        "mfu": measured.mfu(flops, seconds=seconds, chip=chip, num_chips=num_chips),
        "tokens": tokens,
        "tokens_per_second_per_chip": (
            tokens / (seconds * num_chips) if seconds else None
        ),
        "shares": {
            stage: part / seconds if seconds else None for stage, part in stages.items()
        },
    }


def run(options: Options) -> None:
    """Prints `plan` as tables, and writes it where `--json` says."""
    if options.topology is not None:
        compiled.ask_compilers_alone()
    result = plan(options, waiting=report.waiting)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    tables.show(result)


def _largest_batch(
    options: Options,
    target: Target,
    *,
    resident: dict[str, int],
    peak: int | None,
    lengths: Sequence[int] | None,
    waiting: Waiting,
) -> dict[str, Any]:
    """The most rows that fit, by `largest`, in steps that everything divides."""
    rows = options.mesh.data * options.mesh.fsdp
    step = options.num_minibatches * math.lcm(rows, options.micro_batch_size or 1)
    if options.algorithm == "grpo":
        step = math.lcm(step, options.group_size)
    known = {}
    if peak is not None and options.batch_size % step == 0:
        known[options.batch_size // step] = peak

    def alive(steps: int) -> int | None:
        other = dataclasses.replace(options, batch_size=steps * step)
        work = job.workload_of(other, lengths=lengths)
        measurements = measured.measure(
            work.programs, target, rows=other.batch_size, waiting=waiting
        )
        if any(one.refused for one in measurements):
            return None
        return max(measured.alive(one, resident).total for one in measurements)

    most, exact = largest(alive, limit=target.chip.memory, known=known)
    return {"rows": most * step, "multiple_of": step, "exact": exact}


def _versions() -> dict[str, str]:
    names = ("jax", "jaxlib", "libtpu", *gpu_targets.PLUGINS, "rlhf-jax")
    versions = {}
    for name in names:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions
