"""Where the time of a run went: the table of `--profile`, with tokens and MFU.

    MFU = model FLOPs / (seconds · devices · peak FLOPs per second of a device)

`model_flops` counts the model FLOPs of the texts that the steps read. Not counted are
texts mixed in by --ptx, recomputed log-probs, exact KL, batches that were drawn again,
and the second pass over prompts in the sampler of Nash-MD.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import chips
from rlhf_jax.planning.model_flops import forward, training
from rlhf_jax.runs import metrics, report
from rlhf_jax.runs.profile import Window, profiler
from rlhf_jax.runs.profile.profiler import Profiled, Text

if TYPE_CHECKING:
    from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
    from rlhf_jax.runs.profile.trace import Times

Flops = Callable[[Sequence[Text]], dict[str, float]]
FORMULA = "model FLOPs / (seconds · devices · peak FLOPs per second of a device)"
UNNAMED = "device work"  # the only row if a trace names less than half of the work


def policy_gradient_flops(
    texts: Sequence[Text],
    *,
    recipe: PolicyGradient,
    adapters: Any | None = None,
    references: Sequence[ModelConfig] = (),
    rewards: Sequence[ModelConfig] = (),
) -> dict[str, float]:
    """Model FLOPs of an iteration by scope.

    Args:
      texts: prompts and responses of the rollout; tokens that an episode observes are
        run and not predicted.
      adapters: parameters of the adapters if only these are trained, else None.
      references, rewards: the frozen models that score the rollout.
    """
    count = _count(adapters)
    model, critic, group_size = recipe.model, recipe.critic, recipe.rows_per_prompt
    flops = {
        "rollout": forward(model, texts, head=True, group_size=group_size),
        "reference": sum(forward(model, texts, head=True) for model in references),
        "reward": sum(forward(model, texts, head=False) for model in rewards),
        "values": 0.0,
    }
    update = training(model, texts, head=True, adapters=count)
    flops["loss"] = recipe.trained_share * recipe.num_epochs * update
    if critic is not None:
        flops["values"] = forward(critic.model, texts, head=False)
        if not critic.shared_trunk:
            own = training(critic.model, texts, head=False, adapters=count)
            flops["loss"] += recipe.num_epochs * own
    return flops


def supervised_flops(
    texts: Sequence[Text],
    *,
    model: ModelConfig,
    head: bool,
    adapters: Any | None = None,
    reference: ModelConfig | None = None,
) -> dict[str, float]:
    """Model FLOPs of one update by scope, for all texts that it reads, two per pair.

    Args:
      head: whether tokens are predicted.
      adapters: parameters of the adapters if only these are trained, else None.
    """
    count = _count(adapters)
    flops = {"loss": training(model, texts, head=head, adapters=count)}
    if reference is not None:
        flops["reference"] = forward(reference, texts, head=True)
    return flops


def summary(
    run_folder: Path, *, profile: str | None, flops: Flops | None
) -> dict[str, Any]:
    """Prints the table of a profiled run and returns its figures for summary.json.

    Args:
      run_folder: of a finished run.
      profile: the steps of --profile.
      flops: maps the texts of a step to its model FLOPs by scope; None if the command
        counts none.

    Returns:
      {"profile": {...}}, or {} if the run has no profile of these steps.
    """
    steps = None if profile is None else Window.parse(profile)
    profiled = profiler.read(run_folder, window=steps)
    if profiled is None:
        return {}
    from rlhf_jax.runs.profile import trace

    times = None
    with contextlib.suppress(OSError, ValueError):  # the file is missing or truncated
        times = trace.times(run_folder / profiled.trace)
    if times is not None and times.unscoped > times.busy / 2:
        # Seen on a GPU: 1.6 ms of a step of 2.6 s had a scope. The scopes of the rest
        # are unknown, and shares of the named part would mislead.
        times = times._replace(scopes={}, unscoped=times.busy)
    devices = profiled.processes * times.devices if times else profiled.devices
    work: dict[str, float] = defaultdict(float)
    if flops is not None:
        for step in profiled.texts:
            for scope, count in flops(step).items():
                work[scope] += count
    tokens = sum(sum(text) for step in profiled.texts for text in step)
    seconds = _seconds(run_folder, profiled, times)
    chip = chips.of_kind(profiled.device)

    def mfu(count: float, seconds: float) -> float | None:
        if chip is None or not count:
            return None
        # Imported late, as few runs are profiled.
        from rlhf_jax.planning import measured

        return measured.mfu(count, seconds=seconds, chip=chip, num_chips=devices)

    whole = mfu(sum(work.values()), profiled.seconds)
    reference = seconds.get("reference")
    figures = {
        "stage": profiled.stage,
        "first": profiled.first,
        "end": profiled.end,
        "trace": profiled.trace,
        "source": "trace" if times else "timings.jsonl",
        "seconds_per_step": profiled.seconds / profiled.steps,
        "seconds": {name: total / profiled.steps for name, total in seconds.items()},
        "tokens_per_second": tokens / profiled.seconds if tokens else None,
        "model_flops_per_step": sum(work.values()) / profiled.steps if work else None,
        "mfu": whole,
        "mfu_formula": FORMULA,
        "reference_share": None if reference is None else reference / profiled.seconds,
        "devices": devices,
        "device": profiled.device,
        "compiled": profiled.compiled,
    }
    total = figures["model_flops_per_step"]
    work["step"] = sum(work.values())
    rows = [
        (
            name,
            total / profiled.steps,
            _share(total / profiled.seconds),
            work[name] / profiled.steps / 1e12 if work.get(name) else None,
            _share(mfu(work.get(name, 0.0), total)),
        )
        for name, total in [*seconds.items(), ("step", profiled.seconds)]
    ]
    report.table(
        f"Where the time goes: {profiled.stage}, steps {profiled.first} to "
        f"{profiled.end - 1}",
        ("", "seconds per step", "share", "model TFLOPs", "MFU"),
        rows,
    )
    _tell(figures, chip=chip, total=total)
    return {"profile": figures}


def _tell(
    figures: dict[str, Any], *, chip: chips.Chip | None, total: float | None
) -> None:
    devices, kind = figures["devices"], figures["device"]
    source = "device time by named scope, from the trace"
    if figures["source"] != "trace":
        source = "phases of timings.jsonl, as the trace is not there or not whole"
    elif UNNAMED in figures["seconds"]:
        source = "device time, whose scopes the trace does not name, so in one row"
    print(f"seconds: {source}; {devices} × {kind}")
    if figures["tokens_per_second"] is not None:
        print(
            f"tokens per second, prompts and responses: "
            f"{figures['tokens_per_second']:,.0f}"
        )
    print(f"MFU = {FORMULA}")
    if total is None:
        print("    unknown: model FLOPs are not counted for this command")
    elif chip is None:
        rate = total / figures["seconds_per_step"]
        print(
            f"    unknown: no peak of this device is known; {total:.3g} model FLOPs "
            f"per step are {rate:.3g} per second"
        )
    else:
        print(
            f"    {_share(figures['mfu'])} = {total:.3g} / "
            f"({figures['seconds_per_step']:.3g} · {devices} · {chip.flops:.3g}), the "
            f"peak of bfloat16 products"
        )
    if figures["compiled"]:
        print(
            f"{figures['compiled']} programs were compiled in this window: profile "
            f"later steps, or read the shares without that time"
        )
    if figures["reference_share"] is not None:
        print(f"the reference costs {figures['reference_share']:.1%} of a step")
    print(f"trace: {figures['trace']}; xprof and Perfetto read it")


def _seconds(
    run_folder: Path, profiled: Profiled, times: Times | None
) -> dict[str, float]:
    """Seconds of all steps for each row of the table, in order."""
    if times is not None:
        idle = max(profiled.seconds - times.busy - times.waited, 0.0)
        return {
            **times.scopes,
            "other device work" if times.scopes else UNNAMED: times.unscoped,
            "waiting for the reward": times.waited,
            "devices idle": idle,
        }
    seconds: dict[str, float] = defaultdict(float)
    for row in metrics.read(run_folder / "timings.jsonl"):
        inside = profiled.first <= row["step"] < profiled.end
        if row["stage"] == profiled.stage and inside:
            for phase, spent in row["phases"].items():
                seconds[phase] += spent
    return dict(seconds)


def _share(value: float | None) -> str | None:
    return None if value is None else f"{value:.1%}"


def _count(adapters: Any | None) -> int | None:
    if adapters is None:
        return None
    return sum(leaf.size for leaf in jax.tree.leaves(adapters))
