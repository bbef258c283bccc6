"""The data that all storages are measured on, prepared by the first run.

PREPARED/seed_0.lock     held by the run that prepares, while others wait
PREPARED/seed_0/         a run folder, whose stages train the reference and the policy
    reference/           the trained reference, without --model
    shared.npz           responses, held-out blocks and the figures of the copy
    summary.json         written last, when the preparation is complete

The lock is released when its process ends. After a kill the next run resumes from the
newest snapshot.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rlhf_jax import decoder, frozen, hf
from rlhf_jax.algorithms.batch import Rollout, Sequences
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data import batches, digests, json_lines, splits
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import fingerprint
from rlhf_jax.runs import folder, plots, run, run_config
from rlhf_jax.runs.snapshots import resume
from rlhf_jax.runs.unfinished import replacing
from studies import locks
from studies.storage.costs import Exact, held_out_logprobs, scoring
from studies.storage.models import blocks, sample, train
from studies.storage.options import Config, Preparation

Params = Any
SUMMARY = "summary.json"
SHARED = "shared.npz"
REFERENCE = "reference"
TEXT = "text_digest"  # a key of summary.json, as is the next
FINGERPRINT = "reference_fingerprint"


class Prepared(NamedTuple):
    """The data that all storages are measured on."""

    model: ModelConfig
    params: Params  # parameters of the reference, f32
    responses: Rollout  # responses of the policy
    held_out: list[Sequences]
    exact: Exact
    summary: dict[str, Any]


def check(options: Config) -> None:
    """Checks that an existing preparation has the same options; writes nothing.

    Raises:
      InputError: the text cannot be read, or the folder was prepared with other options
        or another text.
    """
    text = _digest(options.text)
    config = options.preparation()
    recorded = config.out / folder.CONFIG
    if not recorded.exists():
        return
    before, now = folder.read_config(recorded), run_config.to_json(config)
    but = frozenset(run_config.MAY_DIFFER)
    for name in resume.differing(before, now, but=but):
        raise InputError(
            f"--prepared {config.out.parent}: expected what was prepared with the "
            f"options of this run, got {name} {before.get(name)} there and "
            f"{now.get(name)} here; give another folder, or the same options"
        )
    if (config.out / SUMMARY).exists():
        prepared_of = _summary(config.out)[TEXT]
        if prepared_of != text:
            raise InputError(
                f"--prepared {config.out.parent}: expected what was prepared of "
                f"{options.text}, got that of another text, as the file was changed; "
                f"give another folder, or the same text"
            )


def get(options: Config) -> Prepared:
    """Returns the shared data, and prepares it first if it does not exist.

    Raises:
      InputError: as `check`, or the checkpoint has changed.
    """
    config = options.preparation()
    with _alone(config.out):
        check(options)
        if not (config.out / SUMMARY).exists():
            begun = (config.out / folder.CONFIG).exists()
            _prepare(dataclasses.replace(config, resume=begun))
    return _read(config)


def _prepare(options: Preparation) -> None:
    """Trains the models, samples responses and writes the folder."""
    started = time.perf_counter()
    text = _digest(options.text)
    model, params, examples = blocks(options)
    share, seed = options.held_out, options.seed
    trained, held_out = splits.hold_out(examples, share=share, seed=seed)
    trained, other = splits.hold_out(trained, share=share, seed=seed)
    num_steps = {"sft": options.num_steps, "nudge": options.nudge_steps}
    if options.model is not None:
        del num_steps["sft"]
    with run.Run(options, num_steps=num_steps) as job:
        if options.model is None:
            schedule = optax.warmup_cosine_decay_schedule(
                0.0, options.learning_rate, options.num_steps // 20, options.num_steps
            )
            params = train(
                job, "sft", params, model=model, examples=trained, schedule=schedule
            )
        nudged = train(
            *(job, "nudge", params),
            model=model,
            examples=other,
            schedule=optax.constant_schedule(options.nudge_learning_rate),
        )
    responses = sample(options, nudged, model=model, texts=held_out)
    in_order = batches.sequences_in_order(
        held_out, batch_size=options.batch_size, pad_id=0
    )
    reference = frozen.freeze(params)
    scored = jax.jit(scoring(options, model=model))(reference, responses)
    assert scored.kl is not None  # because there is a reference
    logprobs = held_out_logprobs(reference, in_order, model=model)
    _save(
        options.out / SHARED,
        {
            "logprobs": logprobs,
            "kl": np.asarray(scored.kl).sum(axis=1),
            **_arrays("responses", responses),
            **_arrays("held_out", jax.tree.map(lambda *b: np.stack(b), *in_order)),
        },
    )
    if options.model is None and not (options.out / REFERENCE).exists():
        hf.save(options.out / REFERENCE, model, params)
    plots.draw(options.out)
    folder.write_summary(
        options.out,
        {
            TEXT: text,
            FINGERPRINT: fingerprint.fingerprint(params).root,
            "held_out_loss": float(-logprobs.mean()),
            "held_out_tokens": len(logprobs),
            "parameters": decoder.num_parameters(model),
            "seconds": time.perf_counter() - started,
        },
    )


def _read(options: Preparation) -> Prepared:
    """Reads the prepared data."""
    summary = _summary(options.out)
    if options.model is None:
        model, params = hf.load(options.out / REFERENCE)
    else:
        start = pretrained.load(options.model)
        model, params = start.model, start.params
    if fingerprint.fingerprint(params).root != summary[FINGERPRINT]:
        at = options.out / REFERENCE if options.model is None else options.model
        raise InputError(
            f"--prepared {options.out.parent}: expected the reference that it was "
            f"prepared with, got other parameters in {at}; give another folder"
        )
    with np.load(options.out / SHARED) as arrays:
        responses = _record(arrays, "responses")
        stacked = _record(arrays, "held_out")
        exact = Exact(arrays["logprobs"], arrays["kl"])
    held_out = [
        Sequences(**{name: batches[n] for name, batches in stacked.items()})
        for n in range(len(stacked["tokens"]))
    ]
    return Prepared(
        model=model,
        params=params,
        responses=Rollout(**jax.tree.map(jnp.asarray, responses)),
        held_out=held_out,
        exact=exact,
        summary=summary,
    )


@contextlib.contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Holds the lock of a preparation; other runs wait for it."""
    path = place.with_name(f"{place.name}.lock")
    with contextlib.ExitStack() as locked:
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            locked.enter_context(locks.held(path, prepares=place, check=lambda: None))
        except OSError as error:
            raise InputError(
                f"--prepared {place.parent}: expected a folder that can be made, "
                f"written to and locked, got: {error.strerror}; give another"
            ) from error
        yield


def _summary(place: Path) -> dict[str, Any]:
    return json.loads((place / SUMMARY).read_text(encoding="utf-8"))


def _digest(text: str) -> str:
    return digests.of_values([{"text": json_lines.read_text(text)}])


def _arrays(name: str, record: Rollout | Sequences) -> dict[str, np.ndarray]:
    """The fields of a record that are not None, by their names in the file."""
    return {
        f"{name}/{field}": np.asarray(value)
        for field, value in vars(record).items()
        if value is not None
    }


def _record(arrays: Any, name: str) -> dict[str, np.ndarray]:
    """The inverse of `_arrays`."""
    return {
        path.partition("/")[2]: arrays[path]
        for path in arrays.files
        if path.startswith(f"{name}/")
    }


def _save(path: Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes a file, whole or not at all."""
    with replacing(path) as unfinished, unfinished.open("wb") as file:
        np.savez(file, allow_pickle=False, **arrays)
