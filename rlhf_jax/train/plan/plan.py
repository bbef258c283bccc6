"""Whether a run fits TPUs or GPUs that are not there, and how fast it can be.

Every program of a step is compiled for the slice (extra `plan`, or `plan-cuda` for
GPUs, named as nodes x GPUs per node); nothing runs. The verdict counts what is alive
while each program runs. Models that it does not read stay in memory:

    alive = models not read + arguments + temporaries + results - aliases

Seconds are a roofline, a lower bound: matrix products at the chip's bfloat16 peak, its
memory and its links (for GPUs NVLink inside a node and the network between nodes) at
their peak rates, all at the same time. A decoded token also takes the latency of every
exchange. `by_hand` is a bound for any program: model FLOPs, and in sampling reads of
the weights and the filled cache once per token. Sampling runs to the last token.
Without a topology this machine's compiler replaces the chip's (`--chip`). Its layouts
and fusions differ, and the plan says so.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import math
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from rlhf_jax.devices import precision
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import decoder, layout
from rlhf_jax.planning import (
    decoding,
    gpu_targets,
    histogram,
    measured,
    resharding,
    tables,
    workload,
)
from rlhf_jax.planning.chips import Chip
from rlhf_jax.planning.measured import Waiting
from rlhf_jax.runs import parsing, report, write_errors
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.plan import job, sampler_meshes
from rlhf_jax.train.plan.advice import advice, largest
from rlhf_jax.train.plan.job import Config, Job, Options


def silent(what: str) -> AbstractContextManager[None]:
    """Shows no progress."""
    del what
    return nullcontext()


def plan(
    config: Config, options: Options, *, command: str = "", waiting: Waiting = silent
) -> dict[str, Any]:
    """Makes the plan, as `--json` writes it.

    Args:
      command: the command line, for the record.
      waiting: what to wait for -> a context that shows it.

    Returns:
      JSON values. All bytes are per chip: `held` by models and optimizers throughout,
      `programs` with the memory and work of each, `alive` while each runs, `peak` the
      largest of these, and `within` the temporaries that are known from shapes.
    """
    config, choices = job.chosen(config, options)
    mesh = config.placement.policy
    target = measured.target(options.slice, chip=options.chip, mesh=mesh)
    lengths = None if options.lengths is None else histogram.read(options.lengths)
    of, line = Job(options, target, lengths), None
    if not options.find_sampler_mesh:  # that compares all meshes
        config, line = of.placed(config)
    work = of.workload_of(config)
    resident = measured.resident(work.parts, target)
    layouts = []
    if options.find_sampler_mesh:
        layouts = sampler_meshes.compare(config, of, resident=resident, waiting=waiting)
        config = sampler_meshes.sampled_on(config, layouts[0].mesh)
        work = of.workload_of(config)
    sampler_mesh = None
    if isinstance(config, PolicyGradientConfig):
        sampler_mesh = config.placement.sampler.mesh
    visits = workload.block_visits(
        work.model,
        columns=job.columns_of(config, options),
        context=mesh.context,
        backend=layout.backend_of(target.mesh.abstract_mesh),
    )
    measurements = measured.measure(
        work.programs,
        target,
        rows=config.batch.batch_size,
        visits=visits,
        waiting=waiting,
    )
    alive = [measured.alive(one, resident) for one in measurements]
    peak = max(alive, key=lambda row: row.total)
    fits = peak.total <= target.chip.memory and not any(
        one.refused for one in measurements
    )
    chips = mesh.size
    programs = []
    for one in measurements:
        brought = resharding.described(one, target)
        programs += [] if brought is None else [brought]
        programs.append(measured.described(one, target.chip, num_chips=chips))
    within = {name: size // mesh.rows for name, size in work.within.items()}
    if "KV cache" in within:
        shared = decoding.cache_devices(work.model, sampler_mesh or mesh)
        within["KV cache"] = work.within["KV cache"] // shared
    result: dict[str, Any] = {
        "command": command,
        "versions": _versions(),
        "compiler": target.compiler,
        "algorithm": config.name,
        "topology": options.slice,
        "chips": chips,
        "mesh": dataclasses.asdict(mesh),
        "chip": {"name": target.name, **dataclasses.asdict(target.chip)},
        "parameters": decoder.num_parameters(work.model),
        "attention": work.model.attention,
        "fits": fits,
        "peak": peak._asdict(),
        "held": resident,
        "alive": [row._asdict() for row in alive],
        "within": within,
        **speed(programs, chip=target.chip, num_chips=chips, tokens=work.tokens),
        "advice": [] if fits else advice(config, resident=resident, alive=alive),
        "programs": programs,
    }
    if choices:
        result["auto"] = choices
    if line is not None:
        result["sampler"] = line
    if sampler_mesh is not None:
        result["sampler_mesh"] = dataclasses.asdict(sampler_mesh)
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
            config,
            of,
            resident=resident,
            peak=peak.total if fits else None,
            waiting=waiting,
        )
    return result


def speed(
    programs: list[dict[str, Any]], *, chip: Chip, num_chips: int, tokens: int
) -> dict[str, Any]:
    """Returns the highest speed of a step, as JSON values.

    Args:
      tokens: of a step's prompts and responses, without padding.

    Returns:
      `seconds`, `model_flops` and `mfu` of a step, `tokens`, tokens per second and
      chip, and the share of the seconds that each stage takes.
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


def run(config: Config, options: Options, *, command: str) -> None:
    """Prints the plan as tables, and writes it to the file of `--json`."""
    if options.json is not None:
        write_errors.check_place(
            options.json, option="--json", called="plan", is_own=_is_plan
        )
    result = plan(config, options, command=command, waiting=report.waiting)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    tables.show(result)


def _is_plan(path: Path) -> bool:
    shape = {"command": str, "fits": bool, "alive": [{}], "programs": [{}]}
    try:
        parsing.read_object(path, expected="a plan", advice="", shape=shape)
    except InputError:
        return False
    return True


def _largest_batch(
    config: Config,
    of: Job,
    *,
    resident: dict[str, int],
    peak: int | None,
    waiting: Waiting,
) -> dict[str, Any]:
    """Returns the most rows that fit, in steps that minibatches and devices divide."""
    mesh, target = config.placement.policy, of.target
    step = job.minibatches(config) * math.lcm(
        mesh.rows, config.method.micro_batch_size or 1
    )
    step = math.lcm(step, getattr(config.method, "rows_per_prompt", 1))
    known = {}
    if peak is not None and config.batch.batch_size % step == 0:
        known[config.batch.batch_size // step] = peak

    def alive(steps: int) -> int | None:
        rows = steps * step
        batch: Any = dataclasses.replace(config.batch, batch_size=rows)
        tried = dataclasses.replace(config, batch=batch)
        work = of.workload_of(tried)
        measurements = measured.measure(
            work.programs, target, rows=rows, waiting=waiting
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
    return versions | {"matmul_precision": precision.name()}
