"""Assigns texts to packed rows, these to parts and groups, and makes index arrays.

Parts are computed one after the other; a group is the share of a part on one device.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.data.packing import first_fit
from rlhf_jax.functional import checks
from rlhf_jax.models.packing import NONE, Packing

HostArray = Any  # NumPy's


@dataclasses.dataclass(frozen=True)
class Form:
    """The settings of a run's packing that do not depend on lengths."""

    rows: int  # B, padded rows of a batch
    num_minibatches: int
    max_new_tokens: int  # R, response columns
    width: int  # W, tokens of a packed row
    columns: int | None = None  # S, columns of padded rows; None is W
    devices: int = 1  # G, the devices that share the rows, one group each
    after_stop: bool = False  # the state after the last token has a value
    # A reward model: only the state after the last token is read. Rows, and R, have
    # one column more.
    ends: bool = False
    max_tokens: int | None = None  # tokens per device of a part; None makes one part
    may_pad: bool = True  # padded rows take no more memory than max_tokens
    # Neighbouring rows that share a prompt, which a packed row then holds only once.
    group_size: int = 1

    def __post_init__(self) -> None:
        checks.within(
            least=self.width,
            advice="a packed row has as many tokens; raise it, or pack narrower rows",
            **{"max_tokens_per_device of --packing": self.max_tokens},
        )

    @property
    def minibatch(self) -> int:
        """b, the responses of an optimizer step."""
        return self.rows // self.num_minibatches

    def packed_share(self, packed: int, *, rows: int) -> float:
        """Tokens of `packed` packed rows, divided by those of `rows` padded rows."""
        columns = self.width if self.columns is None else self.columns
        return packed * self.width / (rows * columns)

    def rows_of_part(self, rows: int) -> int | None:
        """The most packed rows per device in a part of `rows` responses."""
        if self.max_tokens is None:
            return None
        return min(self.max_tokens // self.width, -(-rows // self.devices))


class Bins(NamedTuple):
    """An assignment of texts to packed rows."""

    texts: list[list[int]]  # the texts of each packed row, as indices of `lengths`
    reads: list[int]  # the number of states that are read of each packed row


class Part(NamedTuple):
    """Packed rows that are computed together, by device."""

    groups: list[list[list[int]]]  # the texts of each packed row of each group
    rows: int  # the most packed rows of a group
    reads: int  # the most states that are read of a group
    size: int = 0  # index in `Sizes.sizes` of the size that holds the part


class Needed(NamedTuple):
    """The tokens of each row that a model runs, and the states read; i32[b] each."""

    size: HostArray  # tokens that the model runs; 0 if no state is read
    first: HostArray  # index in its text of the first token that a state predicts
    reads: HostArray  # the number of consecutive states that are read


def needed(lengths: HostArray, *, form: Form) -> Needed:
    """Computes which tokens of each row a model runs and which states are read.

    The last token predicts nothing, so it is run only if the state after it has a
    value. No state predicts the first token of a text.

    Args:
      lengths: i32[b, 3]: tokens of the prompt, tokens of the response, group.
    """
    prompt, response = lengths[:, 0], lengths[:, 1]
    if form.ends:
        whole = prompt + response
        return Needed(whole, whole, np.minimum(whole, 1))
    after = (response > 0) & (response < form.max_new_tokens) & form.after_stop
    size, first = prompt + response - 1 + after, np.maximum(prompt, 1)
    reads = np.where(response > 0, np.maximum(size + 1 - first, 0), 0)
    return Needed(np.where(reads > 0, size, 0), first, reads)


def fill(lengths: HostArray, *, form: Form) -> Bins:
    """Packs texts by first fit, longest first; leaves out texts without a read state.

    Raises:
      InputError: a text is longer than a packed row.
    """
    sizes, _, reads = needed(lengths, form=form)
    checks.within(
        least=sizes.max(initial=0),
        advice="the longest row has as many tokens; make packed rows wider, or leave "
        "it out",
        **{"width of --packing": form.width},
    )
    if form.group_size == 1:
        ranked = [int(row) for row in np.argsort(-sizes, kind="stable") if sizes[row]]
        places = first_fit([int(sizes[row]) for row in ranked], width=form.width)
        texts = [[ranked[place] for place in row] for row in places]
    else:
        texts = _fill_groups(lengths, sizes, width=form.width)
    return Bins(texts, [int(reads[row].sum()) for row in texts])


def shared(lengths: HostArray) -> HostArray:
    """i32[b], the tokens that each row shares with its group: the prompt but the last.

    The last token of a prompt is repeated with each response: its state predicts the
    first token of the response, and every state is read once.
    """
    return np.maximum(lengths[:, 0] - 1, 0)


def _fill_groups(
    lengths: HostArray, sizes: HostArray, *, width: int
) -> list[list[int]]:
    """Packs groups, largest first; texts join a row that holds their prompt, if any."""
    prefix, groups = shared(lengths), lengths[:, 2]
    totals = {
        int(group): int(sizes[groups == group].sum()) for group in np.unique(groups)
    }
    room = np.full(len(lengths) + 1, width)
    texts: list[list[int]] = []
    for group in sorted(totals, key=lambda g: -totals[g]):
        members = np.flatnonzero((groups == group) & (sizes > 0))
        beside: list[int] = []  # packed rows that hold the prompt
        for row in sorted(members.tolist(), key=lambda r: -sizes[r]):
            own = int(sizes[row] - prefix[row])
            place = next((at for at in beside if room[at] >= own), None)
            if place is None:
                own = int(sizes[row])
                place = int(np.argmax(room >= own))
                if place == len(texts):
                    texts.append([])
                beside.append(place)
            texts[place].append(row)
            room[place] -= own
    return texts


def alone(lengths: HostArray, *, form: Form) -> Bins:
    """Gives every text of which a state is read a packed row of its own."""
    sizes, _, reads = needed(lengths, form=form)
    used = np.flatnonzero(sizes)
    return Bins([[int(row)] for row in used], [int(reads[row]) for row in used])


def deal(bins: Bins, *, rows: int, parts: int | None, form: Form) -> list[Part]:
    """Deals packed rows to parts and groups, balancing the states that are read.

    With the least number of parts all but the last are full; with more parts than
    needed the rows are shared evenly.

    Args:
      rows: the most packed rows of a group.
      parts: number of parts; None is the least that holds all packed rows.
    """
    devices, count = form.devices, len(bins.texts)
    least = max(1, -(-count // (rows * devices)))
    parts = least if parts is None else parts
    full = rows * devices if parts == least else -(-count // parts)
    capacities = [min(full, max(0, count - full * part)) for part in range(parts)]
    dealt = []
    for numbers in _spread(range(count), bins.reads, capacities):
        rows_per_device = -(-len(numbers) // devices)
        groups = _spread(numbers, bins.reads, [rows_per_device] * devices)
        dealt.append(
            Part(
                [[bins.texts[number] for number in group] for group in groups],
                rows=rows_per_device,
                reads=max(sum(bins.reads[n] for n in group) for group in groups),
            )
        )
    return dealt


def _spread(
    numbers: Sequence[int], loads: Sequence[int], capacities: Sequence[int]
) -> list[list[int]]:
    """Assigns numbers to places: the largest load first, to the least loaded place."""
    heap = [(0.0, place) for place, room in enumerate(capacities) if room]
    placed: list[list[int]] = [[] for _ in capacities]
    for number in sorted(numbers, key=lambda n: -loads[n]):
        load, place = heapq.heappop(heap)
        placed[place].append(number)
        if len(placed[place]) < capacities[place]:
            more = loads[number] / capacities[place]
            heapq.heappush(heap, (load + more, place))
    return placed


def packing_of(
    part: Part,
    lengths: HostArray,
    *,
    form: Form,
    columns: int,
    widest: tuple[int, int],
) -> tuple[Packing, int, HostArray]:
    """Makes the index arrays of a part.

    Args:
      lengths: i32[b, 3], as for `needed`.
      columns: S, columns of the padded rows.
      widest: (N/G, M), the largest size.

    Returns:
      The packing, padded to the largest size; the index of the part's own size; and
      bool[b], the rows of which the part reads a state.
    """
    (per_group, reads), width = widest, form.width
    sizes, firsts, counts = needed(lengths, form=form)
    pieces = np.array(
        [
            (group, at, *piece)
            for group, packed_rows in enumerate(part.groups)
            for at, in_row in enumerate(packed_rows)
            for piece in _pieces(in_row, lengths, sizes, form=form)
        ],
        np.int64,
    ).reshape(-1, 8)
    first = columns - form.max_new_tokens - lengths[:, 0]  # column of first tokens
    of_group, at, row, start, count, begin, segment, before = pieces.T
    piece, token = _owners_and_places(count)
    place = (of_group * per_group + at)[piece] * width + begin[piece] + token
    source: HostArray = np.full(form.devices * per_group * width, NONE, np.int32)
    source[place] = (row * columns + first[row] + start)[piece] + token
    segments: HostArray = np.zeros(len(source), np.int32)
    segments[place] = segment[piece]
    prefixes: HostArray = np.zeros(len(source), np.int32)
    prefixes[place] = before[piece]

    # States are read only from the pieces that end their texts, not from prompts.
    ends = start + count == sizes[row]
    of_group, at, rows, start, begin = (
        x[ends] for x in (of_group, at, row, start, begin)
    )
    first = first[rows]
    text, read = _owners_and_places(counts[rows])
    token = firsts[rows][text] + read  # the token that the state predicts
    group = of_group[text]
    column = 1 + np.arange(len(text))
    column -= np.searchsorted(group, np.arange(form.devices))[group]
    state = at[text] * width + (begin - start)[text] + token - 1
    padded = rows[text] * columns + first[text] + token
    shape = form.devices, reads
    about: HostArray = np.full(shape, NONE, np.int32)
    states: HostArray = np.full(shape, NONE, np.int32)
    about[group, column] = padded
    states[group, column - 1] = state
    inverse: HostArray = np.full((form.devices, per_group * width), NONE, np.int32)
    inverse[group, state] = column - 1
    places: HostArray = np.full(len(lengths) * columns, NONE, np.int32)
    places[padded] = group * reads + column
    members = np.zeros(len(lengths), bool)
    members[rows] = True
    packing = Packing(
        source=source.reshape(-1, width),
        segments=segments.reshape(-1, width),
        prefixes=None if form.group_size == 1 else prefixes.reshape(-1, width),
        states=states,
        columns=inverse,
        about=about,
        places=places.reshape(len(lengths), columns),
    )
    return packing, part.size, members


def _pieces(
    texts: list[int], lengths: HostArray, sizes: HostArray, *, form: Form
) -> list[tuple[int, ...]]:
    """Lists the pieces of a packed row, from left to right.

    Returns:
      For each: the row of its text, its first token there, its number of tokens,
      its column in the packed row, its segment, and its shared prompt's, or 0.
    """
    prefix = shared(lengths)
    pieces, begin, segment, prompt, group = [], 0, 0, 0, None
    for row in texts:
        start = 0
        if form.group_size > 1 and prefix[row]:
            start = int(prefix[row])
            if lengths[row, 2] != group:
                segment += 1
                pieces.append((row, 0, start, begin, segment, 0))
                begin, prompt = begin + start, segment
        before = prompt if start else 0
        group = lengths[row, 2]
        segment += 1
        count = int(sizes[row]) - start
        pieces.append((row, start, count, begin, segment, before))
        begin += count
    return pieces


def _owners_and_places(counts: HostArray) -> tuple[HostArray, HostArray]:
    """Counts (2, 3) give owners (0, 0, 1, 1, 1) and places (0, 1, 0, 1, 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]
