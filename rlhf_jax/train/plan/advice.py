"""Advice for a run that does not fit, and the search for the largest batch size."""

from __future__ import annotations

from collections.abc import Callable

from rlhf_jax.planning.measured import Alive
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.plan import job
from rlhf_jax.train.plan.job import Config

GIB = 2**30


def advice(
    config: Config, *, resident: dict[str, int], alive: list[Alive]
) -> list[str]:
    """Returns changes of the models or the largest program, the best saving first.

    The saving of a change to a program is a guess, half of its temporaries.
    """
    peak = max(alive, key=lambda row: row.total)
    savings = [(sum(resident.values()) // 2, "twice the chips, all on the fsdp axis")]
    start, rows = config.start, config.batch.batch_size
    storages = {"reference": config.reference.reference_storage}
    if isinstance(config, PolicyGradientConfig):
        storages["reward model"] = config.rewards.reward_storage
    for name, storage in storages.items():
        whole, option = resident.get(name, 0), f"--{name.split()[0]}-storage.dtype"
        if storage.dtype == "float32":
            savings.append((whole // 2, f"{option} bfloat16"))
            savings.append((whole * 3 // 4, f"{option} int8"))
        elif storage.dtype != "int8":
            savings.append((whole // 2, f"{option} int8"))
    if start.lora is None:
        trained = ("critic", "reference")
        saved = sum(
            size
            for name, size in resident.items()
            if name in trained or name.endswith("optimizer")
        )
        savings.append((saved, "--lora 16"))
    half = peak.temporary // 2
    if start.dtype == "float32":
        savings.append((half, "--dtype bfloat16"))
    if peak.during == "sampling":
        savings.append((half, f"--batch-size {rows // 2}"))
    elif peak.during.endswith("learning"):
        if start.remat != "full":
            savings.append((half, "--remat full"))
        micro = config.method.micro_batch_size or rows // job.minibatches(config)
        mesh = config.placement.policy
        if micro > mesh.rows:
            savings.append((half, f"--micro-batch-size {micro // 2}"))
    return [
        f"{what}: about {size / GIB:.2f} GiB per chip less"
        for size, what in sorted(savings, reverse=True)
        if size
    ]


def largest(
    alive: Callable[[int], int | None],
    *,
    limit: int,
    known: dict[int, int],
    calls: int = 6,
) -> tuple[int, bool]:
    """Finds the largest n whose bytes are within a limit, with few calls.

    Bytes grow about linearly in n: a line through two measurements predicts the next n,
    and bisection continues from there.

    Args:
      alive: n -> bytes; None if the compiler refused the program.
      known: bytes that are measured already.

    Returns:
      n, or 0 if not even 1 was found to fit; and whether n + 1 was found not to fit.
    """
    sizes: dict[int, int | None] = dict(known)
    for _ in range(calls):
        known_sizes = {n: size for n, size in sizes.items() if size is not None}
        low = max((n for n, size in known_sizes.items() if size <= limit), default=0)
        high = min((n for n in sizes if n > low), default=None)
        if high == low + 1:
            return low, True
        if len(known_sizes) < 2:
            guess = low * 2 or (1 if high is None else high // 2)
        else:
            first, last = min(known_sizes), max(known_sizes)
            slope = (known_sizes[last] - known_sizes[first]) / (last - first)
            guess = first + int((limit - known_sizes[first]) / max(slope, 1.0))
        top = 4 * max(low, 1) if high is None else high - 1
        # Between known sizes, so that a good forecast is confirmed from both sides.
        guess = min(max(guess, low + 1), top)
        sizes[guess] = alive(guess)
    known_sizes = [n for n, size in sizes.items() if size is not None and size <= limit]
    low = max(known_sizes, default=0)
    return low, low + 1 in sizes
