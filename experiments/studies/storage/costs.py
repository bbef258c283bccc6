"""The cost of one storage of the reference, and its errors relative to float32."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from rlhf_jax import frozen, policy
from rlhf_jax.algorithms.batch import Rollout, Scored, Sequences
from rlhf_jax.algorithms.flow import score
from rlhf_jax.checkpoints import precomputed
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import compiled
from rlhf_jax.roles.reference.frozen import Frozen
from studies.storage.options import WAYS, Config, Preparation

Params = Any
Row = dict[str, Any]


class Exact(NamedTuple):
    """Figures of the float32 copy, with which the others are compared."""

    logprobs: np.ndarray  # f32[N], nats, of the held-out tokens
    kl: np.ndarray  # f32[responses], nats


MIB = 2**20


def scoring(options: Preparation, *, model: ModelConfig) -> Callable[..., Scored]:
    """The program whose cost is measured; it computes the KL of the responses."""

    def scored(reference: Frozen | None, responses: Rollout) -> Scored:
        return score.score(
            responses,
            scores=jnp.zeros(options.responses, jnp.float32),
            reference=reference,
            model=model,
            max_new_tokens=options.max_new_tokens,
            temperature=options.temperature,
        )

    return scored


def cost(
    options: Config, reference: Frozen | None, *, model: ModelConfig, responses: Rollout
) -> tuple[Row, Scored]:
    """Measures the peak bytes and the seconds of scoring with a storage."""

    def moved() -> Rollout:
        return responses if reference is None else frozen.beside(reference, responses)

    scoring_of_batch = scoring(options, model=model)
    program = jax.jit(scoring_of_batch).lower(reference, moved()).compile()
    scored = program(reference, moved())
    seconds = []
    for _ in range(options.repeats):
        began = time.perf_counter()
        jax.block_until_ready(program(reference, moved()))
        seconds.append(time.perf_counter() - began)
    row: Row = {
        "peak_mib": peak(program.memory_analysis()),
        "tpu_peak_mib": None,
        "seconds": statistics.median(seconds),
    }
    if options.topology is not None:
        device = compiled.target(options.topology)
        memory = compiled.memory(scoring_of_batch, reference, responses, device=device)
        row["tpu_peak_mib"] = peak(memory)
    return row, scored


def peak(memory: Any) -> float:
    """MiB of a program's arguments and temporaries on the device."""
    return (memory.argument_size_in_bytes + memory.temp_size_in_bytes) / MIB


def held_out_logprobs(
    reference: Frozen, held_out: list[Sequences], *, model: ModelConfig
) -> np.ndarray:
    """f32[N], the log-probs of all held-out tokens, nats."""

    @jax.jit
    def logprobs(reference: Frozen, batch: Sequences) -> jax.Array:
        return policy.logprobs(
            frozen.read(reference), model=model, tokens=batch.tokens, mask=batch.mask
        )

    parts = [
        np.asarray(logprobs(reference, frozen.beside(reference, batch)))[
            np.asarray(batch.response_mask)
        ]
        for batch in held_out
    ]
    return np.concatenate(parts)


def stored(storage: str, params: Params, *, base: Frozen) -> Frozen | None:
    """The reference in a storage other than disk.

    Args:
      storage: one of `STORAGES`, except precomputed.
      base: the base of a LoRA policy, for "lora-base".
    """
    match storage:
        case "none":
            return None
        case "lora-base":
            return base
        case "cpu":
            device = SingleDeviceSharding(jax.devices("cpu")[0])
            return frozen.freeze(params, sharding=device)
    return frozen.freeze(params, **WAYS[storage])


def live_mib() -> tuple[float, float]:
    """MiB of all live arrays, on the devices and in pinned host memory."""
    sizes = {True: 0, False: 0}
    for array in jax.live_arrays():
        sizes[array.sharding.memory_kind == "pinned_host"] += array.nbytes
    return sizes[False] / MIB, sizes[True] / MIB


def errors(logprobs: np.ndarray, kl: np.ndarray, *, exact: Exact) -> Row:
    """Mean absolute errors relative to the float32 copy."""
    return {
        "logprob_error": float(np.abs(logprobs - exact.logprobs).mean()),
        "kl": float(kl.mean()),
        "kl_error": float(np.abs(kl - exact.kl).mean()),
    }


def from_disk(
    options: Config,
    reference: Frozen,
    *,
    folder: Path,
    model: ModelConfig,
    responses: Rollout,
    held_out: list[Sequences],
    exact: Exact,
) -> Row:
    """The row of precomputed log-probs, which suit a data set that does not change."""
    cached = functools.partial(
        precomputed.load_or_compute,
        folder,
        reference=reference,
        model=model,
        pad_id=0,
        progress=options.progress,
    )
    texts = [
        (tokens[mask].tolist(), trained[mask])
        for batch in jax.device_get(held_out)
        for tokens, mask, trained in zip(
            batch.tokens, batch.mask, batch.response_mask, strict=True
        )
        if mask.any()
    ]
    cache = cached([tokens for tokens, _ in texts], batch_size=options.batch_size)
    logprobs = np.concatenate(
        [cache.row(i)[trained] for i, (_, trained) in enumerate(texts)]
    )
    tokens = np.asarray(responses.tokens).tolist()
    cached = functools.partial(
        cached, tokens, batch_size=len(tokens), temperature=options.temperature
    )
    ref_logprobs = cached().padded(range(len(tokens)), width=len(tokens[0]))
    before, seconds = live_mib(), []
    for _ in range(options.repeats):
        began = time.perf_counter()
        cached().padded(range(len(tokens)), width=len(tokens[0]))
        seconds.append(time.perf_counter() - began)
    after = live_mib()
    log_ratio = np.asarray(responses.old_logprobs) - ref_logprobs
    kl = np.where(np.asarray(responses.response_mask), log_ratio, 0.0).sum(axis=1)
    return {
        "held_mib": after[0] - before[0],
        "host_mib": after[1] - before[1],
        "peak_mib": None,  # no program runs
        "tpu_peak_mib": None,
        "seconds": statistics.median(seconds),
        **errors(logprobs, kl, exact=exact),
    }
