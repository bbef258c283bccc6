"""Chooses the width of packed rows and the few sizes of a run, from sample lengths."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.data.layouts import arrays
from rlhf_jax.data.layouts.arrays import Bins, Form

HostArray = Any  # NumPy's
DRAWS = 48  # batches drawn from the sample to choose the sizes
QUANTILES = (0.4, 0.8, 1.0)  # of the packed rows that the drawn batches need
# A size of a batch must save this share of the next larger size. A batch is only
# computed forward, so smaller savings are not worth a branch.
SAVING = 1 / 6
GAIN = 0.95  # a size must have at most this share of the padded tokens
WIDTHS = (1.0, 1.25, 1.5, 1.75, 2.0)  # widths to choose from, relative to padded rows
WIDTH_DRAWS = 8  # batches drawn to choose the width
WIDTH_GAIN = 0.97  # a wider row must need less than this share of the tokens
MARGIN = 1.1  # factor on the average states per row, for sizes as large as any drawn
READS = 8  # the number of columns that a head reads is a multiple of this


class Sizes(NamedTuple):
    """The sizes to which parts are padded; each is a branch of the program.

    Sizes beyond the expected ones are a reserve for lengths that grow. The program with
    branches for the reserve is compiled, and allocates its memory, when a batch first
    needs it.
    """

    parts: int  # C, the most parts of a batch
    sizes: tuple[tuple[int, int], ...]  # (N/G, M), ascending
    expected: int  # the first `expected` of `sizes` hold all batches that were drawn

    @property
    def rows(self) -> int:
        """Packed rows of a group of the largest size."""
        return self.sizes[-1][0]


def best_form(forms: Sequence[Form], sample: HostArray) -> Form:
    """Chooses the form whose minibatches take the fewest tokens.

    Rows wider than padded ones help where prompts fill half of a row, because no two
    texts then fit into a row of the same width. A wider row must save 1 - `WIDTH_GAIN`
    of the tokens, as it makes attention dearer where all its logits are in memory.

    Args:
      forms: differ in the width only, narrowest first.
      sample: i32[n, 2], as for `Packer`.
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
    """Draws `count` batches of lengths from a sample, each with its minibatches."""
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
    """Chooses the sizes of batches and of minibatches, from a sample of lengths.

    Most sizes are quantiles of the packed rows that drawn batches need. The reserve, a
    size between these and padded rows, is for lengths that grow during a run; batches
    that outgrow it stay padded. With `form.max_tokens` the largest size holds any
    batch, and all sizes are expected, so that a lack of memory shows at the start.

    Args:
      form: the settings that all batches share.
      sample: i32[n, 2], tokens of prompts and of responses.

    Returns:
      The sizes of batches and of minibatches; None where packing saves nothing.

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
    """Chooses sizes for `rows` responses.

    Args:
      drawn: packed rows of batches of that many responses.
      most: the most packed rows of a group; None is one per response.
      saving: the share of the next larger size that a size must save.
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
        if count >= needs[-1]:  # as large as any drawn: others may read more states
            reads = max(reads, int(MARGIN * density * count))
        reads = 1 + up(reads, READS)
        sizes.append((count, max([reads, *(size[1] for size in sizes)])))
    # A reserve of just one row more would soon be needed: it is expected, too.
    expected = sum(count <= row_counts[-1] + 1 for count, _ in sizes)
    if form.max_tokens is not None:  # the largest size holds any lengths
        widest = max([1 + limit * form.max_new_tokens, *(size[1] for size in sizes)])
        if not sizes or sizes[-1] != (limit, widest):
            sizes.append((limit, widest))
        expected = len(sizes)
    return Sizes(-(-every // limit), tuple(sizes), expected) if sizes else None


def _apart(row_counts: Iterable[int], saving: float) -> list[int]:
    """Keeps the counts that save at least `saving` of the next larger one kept."""
    kept: list[int] = []
    for count in sorted({*row_counts}, reverse=True):
        if not kept or count <= (1 - saving) * kept[-1]:
            kept.append(count)
    return kept


def in_groups(lengths: HostArray, *, form: Form) -> HostArray:
    """i32[B, 3], `lengths` with the group of each row, which shuffling would lose."""
    groups = np.arange(len(lengths)) // form.group_size
    return np.concatenate([lengths, groups[:, None]], axis=1)


def up(count: int, multiple: int) -> int:
    """Rounds a count up to a multiple."""
    return -(-count // multiple) * multiple
