"""Batches token lists: batches[step] is a pure function of data, seed and step.

There is no iterator whose state a snapshot would have to keep. Rows come from an
endless stream of epochs, each a fresh shuffle of all rows:

    stream     2 0 1 | 1 2 0 | 0 2 1 | ...      3 rows, | between epochs
    batches    ---   ---   ---   ---            2 rows per step

So a batch may cross the end of an epoch, and a batch larger than the data set spans
several epochs. Every process computes the same global batch and takes its share of the
rows; the width is that of the global batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from rlhf_jax.algorithms.batch import Preferences, Prompts, Sequences
from rlhf_jax.data import lengths
from rlhf_jax.data.examples import Example, Pair, Text, Tokens
from rlhf_jax.devices import row_sharding
from rlhf_jax.devices.row_sharding import Share
from rlhf_jax.functional.checks import InputError

if TYPE_CHECKING:
    import grain

# The records name jax.Array; a batch holds the NumPy arrays that become one.
HostArray = Any
Batch = TypeVar("Batch")
Other = TypeVar("Other")


class Visit(NamedTuple):
    """One place in the stream."""

    row: int
    epoch: int


class Batches(Generic[Batch]):
    """`batches[step]` for any step >= 0, in any order."""

    def __init__(self, dataset: grain.MapDataset[Batch], *, steps_per_epoch: int):
        self._dataset = dataset
        self.steps_per_epoch = steps_per_epoch  # rounded up

    def __getitem__(self, step: int) -> Batch:
        batch = self._dataset[step]
        assert batch is not None  # grain's None stands for filtered elements
        return batch

    def map(self, function: Callable[[Batch], Other]) -> Batches[Other]:
        """Applies a function to every batch, such as `row_sharding.put_rows`."""
        dataset = self._dataset.map(function)
        return Batches(dataset, steps_per_epoch=self.steps_per_epoch)


def prompt_batches(
    prompts: Sequence[Tokens],
    *,
    batch_size: int,
    seed: int,
    pad_id: int,
    samples_per_prompt: int = 1,
    buckets: Sequence[int] | None = None,
    share: Share = row_sharding.WHOLE,
) -> Batches[Prompts]:
    """Batches left-padded prompts; samples of one prompt are in neighbouring rows.

    Args:
      prompts: token lists, one per row of the data set.
      batch_size: rows of the global batch, batch_size / samples_per_prompt prompts.
      seed: of the shuffle, 0 <= seed < 2³².
      pad_id: the token where the mask is False.
      samples_per_prompt: responses to each prompt of a batch.
      buckets: widths; a batch takes the smallest that holds its longest prompt. None
        is one bucket, the longest prompt of all.
      share: which rows this process returns, from `row_sharding.row_share`.

    Returns:
      `Prompts` of NumPy arrays. `sample` keeps counting over the epochs, so that a
      repeated prompt is sampled with fresh randomness.

    Raises:
      InputError: there is no prompt, a prompt is empty or longer than the largest
        bucket, or `samples_per_prompt` does not divide `batch_size`.
    """
    if min(batch_size, samples_per_prompt) < 1 or batch_size % samples_per_prompt:
        raise InputError(
            f"expected a batch size that samples_per_prompt={samples_per_prompt}"
            f" divides, got {batch_size}; change one of them"
        )
    for row, tokens in enumerate(prompts):
        lengths.check_prompt(tokens, where=f"row {row} (from 0)")
    widths = _widths([len(tokens) for tokens in prompts], buckets)
    mine = share.of(batch_size)

    def collate(visits: Sequence[Visit]) -> Prompts:
        width = _width(max(len(prompts[visit.row]) for visit in visits), widths)
        samples = [
            (visit.row, visit.epoch * samples_per_prompt + k)
            for visit in visits
            for k in range(samples_per_prompt)
        ]
        index, sample = np.array([samples[place] for place in mine], np.int32).T
        tokens, mask = pad(
            [prompts[row] for row in index], width=width, pad_id=pad_id, left=True
        )
        return Prompts(tokens=tokens, mask=mask, index=index, sample=sample)

    return shuffled(
        len(prompts), batch_size // samples_per_prompt, seed=seed, collate=collate
    )


def sequence_batches(
    examples: Sequence[Text],
    *,
    batch_size: int,
    seed: int,
    pad_id: int,
    buckets: Sequence[int] | None = None,
    share: Share = row_sharding.WHOLE,
) -> Batches[Sequences]:
    """Batches right-padded examples; the language-model loss reads `response_mask`.

    Column 0 is never in `response_mask`: no token predicts it. Arguments and errors as
    in `prompt_batches`; widths are of prompt and response together.
    """
    sizes = [example.length for example in examples]
    widths, mine = _widths(sizes, buckets), share.of(batch_size)

    def collate(visits: Sequence[Visit]) -> Sequences:
        width = _width(max(sizes[visit.row] for visit in visits), widths)
        own_rows = [examples[visits[place].row] for place in mine]
        return _sequences(own_rows, width=width, pad_id=pad_id)

    return shuffled(len(examples), batch_size, seed=seed, collate=collate)


def preference_batches(
    pairs: Sequence[Pair],
    *,
    batch_size: int,
    seed: int,
    pad_id: int,
    buckets: Sequence[int] | None = None,
    share: Share = row_sharding.WHOLE,
) -> Batches[Preferences]:
    """Batches right-padded pairs; both sides have the same width.

    Arguments as in `prompt_batches`.

    Raises:
      InputError: no pairs, a margin on some pairs only, or a text longer than the
        largest bucket.
    """
    with_margin = sum(pair.margin is not None for pair in pairs)
    if with_margin not in (0, len(pairs)):
        raise InputError(
            f"expected a margin on all {len(pairs)} pairs or on none, got"
            f" {with_margin}; complete or drop them"
        )
    sizes = [p.length for p in pairs]
    widths, mine = _widths(sizes, buckets), share.of(batch_size)

    def collate(visits: Sequence[Visit]) -> Preferences:
        width = _width(max(sizes[visit.row] for visit in visits), widths)
        own_rows = [pairs[visits[place].row] for place in mine]
        chosen = [Example(pair.prompt, pair.chosen) for pair in own_rows]
        rejected = [Example(pair.prompt, pair.rejected) for pair in own_rows]
        margin: HostArray = None
        if with_margin:
            margin = np.array([pair.margin for pair in own_rows], np.float32)
        return Preferences(
            chosen=_sequences(chosen, width=width, pad_id=pad_id),
            rejected=_sequences(rejected, width=width, pad_id=pad_id),
            margin=margin,
        )

    return shuffled(len(pairs), batch_size, seed=seed, collate=collate)


def sequences_in_order(
    examples: Sequence[Text], *, batch_size: int, pad_id: int
) -> list[Sequences]:
    """Batches every example once, in order, for evaluation.

    Rows that fill up the last batch have a single token, so they add nothing to a loss.
    Of scores per row only the first `len(examples)` count.
    """
    width = max((example.length for example in examples), default=0)
    fillers = [Example((pad_id,), ())] * (-len(examples) % batch_size)
    rows = [*examples, *fillers]
    return [
        _sequences(rows[start : start + batch_size], width=width, pad_id=pad_id)
        for start in range(0, len(rows), batch_size)
    ]


def shuffled(
    num_rows: int,
    rows_per_step: int,
    *,
    seed: int,
    collate: Callable[[Sequence[Visit]], Batch],
) -> Batches[Batch]:
    """Makes the batches of the stream above; `collate` makes a batch of its rows."""
    import grain  # takes 0.25 s, which `--help` need not wait for

    stream = grain.MapDataset.range(num_rows).seed(seed).shuffle().repeat()
    visits = stream.map_with_index(lambda place, row: Visit(row, place // num_rows))
    return Batches(
        visits.batch(rows_per_step, batch_fn=collate),
        steps_per_epoch=-(-num_rows // rows_per_step),
    )


def longest(sizes: Sequence[int]) -> int:
    """Returns the largest size; InputError if there is no row."""
    if not sizes:
        raise InputError("expected at least one row of data, got none")
    return max(sizes)


def _widths(sizes: Sequence[int], buckets: Sequence[int] | None) -> Sequence[int]:
    most = longest(sizes)
    widths = (most,) if buckets is None else sorted(buckets)
    lengths.check(
        most,
        widths[-1],
        where=f"row {sizes.index(most)} (from 0)",
        holds=", the largest bucket",
        remedy="add a larger bucket",
    )
    return widths


def _width(longest: int, widths: Sequence[int]) -> int:
    return next(width for width in widths if width >= longest)


def _sequences(examples: Sequence[Text], *, width: int, pad_id: int) -> Sequences:
    tokens, mask = pad(
        [[*example.prompt, *example.response] for example in examples],
        width=width,
        pad_id=pad_id,
        left=False,
    )
    response_mask: HostArray = np.zeros(mask.shape, bool)
    response_mask[mask] = np.concatenate([example.trained for example in examples])
    return Sequences(tokens=tokens, mask=mask, response_mask=response_mask)


def pad(
    rows: Sequence[Tokens], *, width: int, pad_id: int, left: bool
) -> tuple[HostArray, HostArray]:
    """Pads rows; returns tokens i32[B, width] and the mask bool[B, width]."""
    sizes = np.array([len(row) for row in rows])[:, None]
    columns = np.arange(width)[None, :]
    mask = columns >= width - sizes if left else columns < sizes
    tokens = np.full(mask.shape, pad_id, np.int32)
    tokens[mask] = np.concatenate(rows)
    return tokens, mask
