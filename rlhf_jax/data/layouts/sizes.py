"""The width of packed rows and the few sizes of a run, chosen from some lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.data.layouts import arrays
from rlhf_jax.data.layouts.arrays import Bins, Form

HostArray = Any  # NumPy's
DRAWS = 48  # batches drawn from a sample of lengths, to choose sizes by
QUANTILES = (0.4, 0.8, 1.0)  # of the packed rows that the draws needed
SAVING = 1 / 6  # of the next larger size of a batch, which is only read forward
GAIN = 0.95  # of the padded tokens: a size with more than these is no gain
WIDTHS = (1.0, 1.25, 1.5, 1.75, 2.0)  # of a packed row to choose from, in padded ones
WIDTH_DRAWS = 8  # batches drawn to choose a width by
WIDTH_GAIN = 0.97  # of the tokens: a wider row that needs more than these is not chosen
MARGIN = 1.1  # of the states read of a row, where more rows are than were drawn
READS = 8  # columns that a head reads are a multiple of this


class Sizes(NamedTuple):
    """Of the parts of some rows; the branches of a program.

    Those beyond the expected ones are a reserve for lengths that grow: the program that
    has a branch for them, too, is compiled, and asks for its memory, when a batch first
    needs it.
    """

    parts: int  # C, the most there are
    sizes: tuple[tuple[int, int], ...]  # (N/G, M), rising
    expected: int  # so many of `sizes` hold what was drawn

    @property
    def rows(self) -> int:
        """Packed rows of a group of the largest size."""
        return self.sizes[-1][0]


def best_form(forms: Sequence[Form], sample: HostArray) -> Form:
    """The form whose minibatches take fewest tokens; a wider row must be worth it.

    Where prompts fill half of a padded row, no two texts stand in a packed one of its
    width. Wider rows cost attention more where its logits are held whole.

    Args:
      forms: alike but for the width, the narrowest first.
      sample: i32[n, 2], as `Packer` takes it.
    """

    def tokens(form: Form) -> int:
        of_steps = [
            arrays.fill(part, form=form)
            for _, parts in _drawn(form, sample, count=WIDTH_DRAWS)
            for part in parts
        ]
        return sum(up(len(bins.texts), form.devices) * form.width for bins in of_steps)

    best, *others = forms
    least = tokens(best)
    for form in others:
        needed = tokens(form)
        if needed < WIDTH_GAIN * least:
            best, least = form, needed
    return best


def _drawn(
    form: Form, sample: HostArray, *, count: int
) -> Iterator[tuple[HostArray, list[HostArray]]]:
    """So many batches with lengths of a sample, and the minibatches of each."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        groups = rng.integers(
            len(sample) // form.group_size, size=form.rows // form.group_size
        )
        rows = sample.reshape(-1, form.group_size, 2)[groups].reshape(-1, 2)
        rows = in_groups(rows, form=form)
        order = np.split(rng.permutation(form.rows), form.num_minibatches)
        yield rows, [rows[part] for part in order]


def sizes_of(form: Form, sample: HostArray) -> tuple[Sizes | None, Sizes | None]:
    """The sizes for batches with lengths like a sample's, and for their minibatches.

    Some are quantiles of what drawn batches need. One lies between them and padded
    rows, for lengths that grow during a run: the reserve. What outgrows it is left
    padded. With `form.max_tokens` one size holds anything, and all are expected: what
    a device has no memory for is to be known at the start.

    Args:
      form: of every batch.
      sample: i32[n, 2], tokens of prompts and of responses.

    Returns:
      Both; None each where packed rows would be no fewer than padded ones.

    Raises:
      InputError: a text of the sample is longer than a packed row.
    """
    batches, steps = [], []
    for rows, parts in _drawn(form, sample, count=DRAWS):
        batches.append(arrays.fill(rows, form=form))
        steps += [arrays.fill(part, form=form) for part in parts]
    of_batch = _sizes(form, batches, rows=form.rows, most=None, saving=SAVING)
    of_steps = _sizes(
        form, steps, rows=form.minibatch, most=form.rows_of_part(form.minibatch)
    )
    return of_batch, of_steps


def _sizes(
    form: Form,
    drawn: Sequence[Bins],
    *,
    rows: int,
    most: int | None,
    saving: float = 0.0,
) -> Sizes | None:
    """Sizes for so many responses, of at most `most` packed rows in a group.

    Args:
      drawn: what like responses need.
      most: None is as many as there are responses.
      saving: the least share of the next larger size for which one is worth a branch.
    """
    devices = form.devices
    every = -(-rows // devices)
    limit = every if most is None else most
    needs = np.sort([-(-len(bins.texts) // devices) for bins in drawn])
    row_counts, reserve = [-(-limit // 2), limit], []
    if needs[-1] <= limit:
        row_counts = [
            max(1, int(np.quantile(needs, share, method="higher")))
            for share in QUANTILES
        ]
        padded = every / form.packed_share(1, rows=1)
        reserve = [int(np.ceil(np.sqrt(row_counts[-1] * padded)))]
    dealt = [
        part
        for bins in drawn
        for part in arrays.deal(bins, rows=limit, parts=None, form=form)
    ]
    rows_dealt = sum(part.rows for part in dealt)
    density = sum(part.reads for part in dealt) / max(1, rows_dealt)
    sizes: list[tuple[int, int]] = []

    def gains(count: int) -> bool:
        shorter = form.packed_share(count * devices, rows=rows) <= GAIN
        return count <= limit and shorter

    counts = [*_apart(filter(gains, row_counts), saving), *filter(gains, reserve)]
    for count in sorted({*counts}):
        reads = max((part.reads for part in dealt if part.rows <= count), default=0)
        if count >= needs[-1]:  # as full as others are
            reads = max(reads, int(MARGIN * density * count))
        reads = 1 + up(reads, READS)
        sizes.append((count, max([reads, *(size[1] for size in sizes)])))
    # A reserve of a row more would soon be needed.
    expected = sum(count <= row_counts[-1] + 1 for count, _ in sizes)
    if form.max_tokens is not None:  # whatever the lengths are
        widest = max([1 + limit * form.max_new_tokens, *(size[1] for size in sizes)])
        if not sizes or sizes[-1] != (limit, widest):
            sizes.append((limit, widest))
        expected = len(sizes)
    return Sizes(-(-every // limit), tuple(sizes), expected) if sizes else None


def _apart(row_counts: Iterable[int], saving: float) -> list[int]:
    """Those that save so much of the next larger one, which is kept."""
    kept: list[int] = []
    for count in sorted({*row_counts}, reverse=True):
        if not kept or count <= (1 - saving) * kept[-1]:
            kept.append(count)
    return kept


def in_groups(lengths: HostArray, *, form: Form) -> HostArray:
    """i32[B, 3], with the number of each row's group, which minibatches tear apart."""
    groups = np.arange(len(lengths)) // form.group_size
    return np.concatenate([lengths, groups[:, None]], axis=1)


def up(count: int, multiple: int) -> int:
    """The least multiple that is no less than a count."""
    return -(-count // multiple) * multiple
