"""Log-probs of a frozen model for a fixed data set, computed once and kept on disk.

    rows        3, 2 and 4 tokens
    logprobs    0 1 2 | 0 1 | 0 1 2 3     flat, f32; 0 for a row's first token
    starts      0       3     5       9

DPO and other algorithms that train on fixed texts then need no reference in memory. A
file is named by a hash of everything that its numbers depend on: the fingerprint of the
model as stored, its shape, the tokens and the temperature.

    chosen = precomputed.load_or_compute(
        cache, [[*p.prompt, *p.chosen] for p in pairs], reference=reference, ...
    )
    ref_chosen_logprobs = chosen.padded(rows, width=batch.chosen.tokens.shape[1])

Rows may hold several texts without attention between them, as in `packing`.
"""

from __future__ import annotations

import collections
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from rich.progress import track

from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.data import batches, digests
from rlhf_jax.data.examples import Example, Tokens
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles import policy
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import parsing
from rlhf_jax.runs.folder import write_json
from rlhf_jax.runs.proof import sums
from rlhf_jax.runs.unfinished import replacing

Array = jax.Array
HostArray = np.ndarray[Any, Any]


class Precomputed(NamedTuple):
    """Log-probs by row, in the order of the data set."""

    logprobs: HostArray  # f32[N], nats, N tokens of all rows; memory-mapped
    starts: HostArray  # i64[rows + 1], where each row begins

    def row(self, index: int) -> HostArray:
        """f32[length]: entry t is about token t of the row; entry 0 is 0."""
        return self.logprobs[self.starts[index] : self.starts[index + 1]]

    def padded(self, rows: Sequence[int] | HostArray, *, width: int) -> HostArray:
        """f32[len(rows), width], right-padded with 0 like `Sequences`.

        Args:
          rows: indices in the data set; -1 is a row of padding.

        Raises:
          ValueError: a row is longer than `width`.
        """
        filled = np.zeros((len(rows), width), np.float32)
        for place, index in enumerate(rows):
            if index < 0:
                continue
            values = self.row(int(index))
            filled[place, : len(values)] = values
        return filled


def load_or_compute(
    folder: Path,
    rows: Sequence[Tokens],
    *,
    reference: Frozen,
    model: ModelConfig,
    batch_size: int,
    pad_id: int,
    segments: Sequence[Sequence[int]] | None = None,
    temperature: float = 1.0,
    progress: bool = True,
) -> Precomputed:
    """Reads log π_ref of every token of every row from `folder`, or computes it.

    The numbers are equal to the bit to those of right-padded batches of the same width
    and number of rows on the same devices, so each `batch_size` has its own files. A
    file that a killed run left unfinished is computed again.

    Args:
      folder: holds the files of any models and data sets; made if it is missing.
      rows: token lists, prompt and response together.
      reference: the frozen model, in any storage; it is verified first.
      batch_size: rows of a batch, all padded to the longest row.
      segments: the text that each token of a row belongs to, from 1, if rows have
        several texts (`decoder.hidden_states`); None is one text per row.

    Returns:
      The log-probs of all rows, memory-mapped.

    Raises:
      InputError: a row has no tokens, more than the context, or ids that the model
        lacks; a file is damaged; or there are several processes.
      ReferenceMovedError: the reference is not what was frozen.
      StopError: a log-prob is not finite.
    """
    _check(rows, segments, model=model)
    require_one_process()
    frozen.verify(reference)
    of = {
        "fingerprint": frozen.fingerprint_of(reference).root,
        "model": repr(model),
        "data": digests.of_tokens(rows),
        "temperature": temperature,
        "batch_size": batch_size,  # other shapes may sum in another order
    }
    if segments is not None:
        of["segments"] = digests.of_tokens(segments)
    name = hashlib.sha256(json.dumps(of, sort_keys=True).encode()).hexdigest()[:32]
    values, about = folder / f"{name}.npy", folder / f"{name}.json"
    starts = np.cumsum([0, *map(len, rows)])
    if not about.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(values) as unfinished:
            _compute(
                unfinished,
                rows,
                segments,
                reference=reference,
                compute=functools.partial(
                    _logprobs, model=model, temperature=temperature
                ),
                batch_size=batch_size,
                pad_id=pad_id,
                progress=progress,
            )
        # Written last: log-probs without this file are incomplete.
        write_json(about, {**of, "sha256": sums.of_file(values)[1]})
    _check_whole(values, about)
    return Precomputed(logprobs=np.load(values, mmap_mode="r"), starts=starts)


def require_one_process() -> None:
    """Raises InputError if there are several processes."""
    if jax.process_count() > 1:
        raise InputError(
            f"expected one process to precompute a reference, got "
            f"{jax.process_count()}; run once without --coordinator, or compute the "
            f"log-probs of each batch when it is due"
        )


@functools.partial(jax.jit, static_argnames=("model", "temperature"))
def _logprobs(
    reference: Frozen,
    *,
    tokens: Array,
    mask: Array,
    segments: Array | None,
    model: ModelConfig,
    temperature: float,
) -> Array:
    return policy.logprobs(
        frozen.read(reference),
        model=frozen.shape_of(reference, policy=model),
        tokens=tokens,
        mask=mask,
        temperature=temperature,
        segments=segments,
    )


def _compute(
    path: Path,
    rows: Sequence[Tokens],
    segments: Sequence[Sequence[int]] | None,
    *,
    reference: Frozen,
    compute: Callable[..., Array],
    batch_size: int,
    pad_id: int,
    progress: bool,
) -> None:
    total = sum(map(len, rows))
    # A memory map, so that the log-probs need not fit into memory.
    values = np.lib.format.open_memmap(
        path, mode="w+", dtype=np.float32, shape=(total,)
    )

    def padded(rows: Sequence[Sequence[int]], *, fill: int) -> list[Sequences]:
        examples = [Example((), row) for row in rows]
        return batches.sequences_in_order(examples, batch_size=batch_size, pad_id=fill)

    in_order = padded(rows, fill=pad_id)
    of_texts = [None] * len(in_order)
    if segments is not None:
        of_texts = [batch.tokens for batch in padded(segments, fill=0)]
    done = 0
    for batch, of_text in track(
        list(zip(in_order, of_texts, strict=True)),
        description="reference log-probs",
        disable=not progress,
    ):
        inputs = {"tokens": batch.tokens, "mask": batch.mask, "segments": of_text}
        logprobs = np.asarray(compute(reference, **frozen.beside(reference, inputs)))
        of_tokens = logprobs[np.asarray(batch.mask)][: total - done]  # fillers are last
        if not np.isfinite(of_tokens).all():
            raise StopError(
                "expected finite log-probs of the reference, got NaN or infinity; its "
                "parameters are broken, or its dtype overflows on these texts"
            )
        values[done : done + len(of_tokens)] = of_tokens
        done += len(of_tokens)
    values.flush()


def _check(
    rows: Sequence[Tokens],
    segments: Sequence[Sequence[int]] | None,
    *,
    model: ModelConfig,
) -> None:
    if not rows:
        raise InputError("expected at least one row, got none; give texts")
    for place, row in enumerate(rows):
        longest = len(row)
        if segments is not None and longest:
            if len(segments[place]) != longest:
                raise ValueError(
                    f"row {place} (from 0): expected a segment for each of its "
                    f"{longest} tokens, got {len(segments[place])}"
                )
            longest = max(collections.Counter(segments[place]).values())
        if not 1 <= longest <= model.max_positions:
            raise InputError(
                f"row {place} (from 0): expected 1 to {model.max_positions} tokens, "
                f"the reference's context, got {longest}; shorten or remove it"
            )
        if not 0 <= min(row) <= max(row) < model.vocab_size:
            raise InputError(
                f"row {place} (from 0): expected token ids below {model.vocab_size}, "
                f"the reference's vocabulary, got {max(row)}; encode the data with its "
                f"tokenizer"
            )


def _check_whole(values: Path, about: Path) -> None:
    try:
        recorded = parsing.read_object(about, expected="what it is of", advice="")
        whole = recorded["sha256"] == sums.of_file(values)[1]
    except (OSError, InputError, KeyError):
        whole = False
    if not whole:
        raise InputError(
            f"{values}: expected the log-probs that {about.name} describes, got other "
            f"bytes; the cache is damaged: remove both files, and they are computed "
            f"again"
        )
