"""Texts into packed rows, these into parts and groups, and the index arrays of each."""

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
    """What of a run's packing does not depend on lengths."""

    rows: int  # B, of a batch
    num_minibatches: int
    max_new_tokens: int  # R, response columns
    width: int  # W, tokens of a packed row
    columns: int | None = None  # S, of padded rows; None is as many as W
    devices: int = 1  # that share rows: the groups
    after_stop: bool = False  # the state after the last token has a value
    # Only the state after the last token is read, as a reward model does, whatever
    # stands before it; rows have one column more, and so has R.
    ends: bool = False
    max_tokens: int | None = None  # of a part, on each device; None has one part
    may_pad: bool = True  # padded rows take no more memory than max_tokens
    # Neighbouring rows that hold one prompt, which then stands once in a packed row.
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
        """Tokens of so many packed rows, relative to those of `rows` padded ones."""
        columns = self.width if self.columns is None else self.columns
        return packed * self.width / (rows * columns)

    def rows_of_part(self, rows: int) -> int | None:
        """Packed rows that a device has of a part of so many responses, at most."""
        if self.max_tokens is None:
            return None
        return min(self.max_tokens // self.width, -(-rows // self.devices))


class Bins(NamedTuple):
    """Texts, by packed row."""

    texts: list[list[int]]  # rows of the lengths
    reads: list[int]  # states that are read of each packed row


class Part(NamedTuple):
    """Packed rows that are computed together, by device."""

    groups: list[list[list[int]]]  # texts of each packed row of each group
    rows: int  # packed rows of the group with most
    reads: int  # states that are read of the group with most
    size: int = 0  # number of the size that holds it


class Needed(NamedTuple):
    """What a model needs of each row; i32[b] each."""

    size: HostArray  # tokens of its text that are run; 0 where nothing is read
    first: HostArray  # the first of its tokens that a state is read for, from 0
    reads: HostArray  # how many, one after the other


def needed(lengths: HostArray, *, form: Form) -> Needed:
    """What a model needs of each row.

    The last token predicts nothing, unless the state after it has a value. The first
    one of a text is predicted by nothing.

    Args:
      lengths: i32[b, 3], tokens of prompts and of responses, and the group.
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
    """First fit, the longest first; texts of which nothing is read are left out.

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
    """Tokens of each row that others of its group have too: the prompt but the last.

    The last token of a prompt stands with each response, whose first token its state
    predicts, so that every state is read once.
    """
    return np.maximum(lengths[:, 0] - 1, 0)


def _fill_groups(
    lengths: HostArray, sizes: HostArray, *, width: int
) -> list[list[int]]:
    """Groups with most tokens first, each beside its own where there is room."""
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
    """A packed row for each text of which something is read."""
    sizes, _, reads = needed(lengths, form=form)
    used = np.flatnonzero(sizes)
    return Bins([[int(row)] for row in used], [int(reads[row]) for row in used])


def deal(bins: Bins, *, rows: int, parts: int | None, form: Form) -> list[Part]:
    """Packed rows by part and group, the states that are read spread evenly.

    All parts but the last are full, or all alike where there are more than it takes.

    Args:
      rows: of a group, at most.
      parts: None is as few as hold the packed rows.
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
    """Numbers by place: the largest load first, to the place that has least."""
    heap = [(0.0, place) for place, room in enumerate(capacities) if room]
    placed: list[list[int]] = [[] for _ in capacities]
    for number in sorted(numbers, key=lambda n: -loads[n]):
        load, place = heapq.heappop(heap)
        placed[place].append(number)
        if len(placed[place]) < capacities[place]:
            more = loads[number] / capacities[place]
            heapq.heappush(heap, (load + more, place))
    return placed


class Arrays:
    """Parts to index arrays, for padded rows of S columns."""

    def __init__(self, form: Form, *, columns: int) -> None:
        self._form, self._columns = form, columns

    def __call__(
        self, lengths: HostArray, part: Part, *, widest: tuple[int, int]
    ) -> tuple[Packing, int, HostArray]:
        """The packing of a part, its size and its members.

        Args:
          lengths: i32[b, 3], tokens of prompts and of responses of all rows, and
            their groups.
          part: of some of them.
          widest: N/G and M of the largest size.

        Returns:
          Arrays at the largest size, the number of the size, bool[b].
        """
        form, columns = self._form, self._columns
        (per_group, reads), width = widest, form.width
        sizes, firsts, counts = needed(lengths, form=form)
        pieces = np.array(
            [
                (group, at, *piece)
                for group, packed_rows in enumerate(part.groups)
                for at, in_row in enumerate(packed_rows)
                for piece in self._pieces(in_row, lengths, sizes)
            ],
            np.int64,
        ).reshape(-1, 8)
        first = columns - form.max_new_tokens - lengths[:, 0]  # column of a text
        of_group, at, row, start, count, begin, segment, before = pieces.T
        piece, token = _owners_and_places(count)
        place = (of_group * per_group + at)[piece] * width + begin[piece] + token
        source: HostArray = np.full(form.devices * per_group * width, NONE, np.int32)
        source[place] = (row * columns + first[row] + start)[piece] + token
        segments: HostArray = np.zeros(len(source), np.int32)
        segments[place] = segment[piece]
        prefixes: HostArray = np.zeros(len(source), np.int32)
        prefixes[place] = before[piece]

        # States are read of the pieces that end their texts.
        ends = start + count == sizes[row]
        of_group, at, rows, start, begin = (
            x[ends] for x in (of_group, at, row, start, begin)
        )
        first = first[rows]
        text, read = _owners_and_places(counts[rows])
        token = firsts[rows][text] + read  # that is predicted
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
        self, texts: list[int], lengths: HostArray, sizes: HostArray
    ) -> list[tuple[int, ...]]:
        """What stands in a packed row, from left to right.

        Returns:
          Of each piece: the row whose text it is of, its first token there, how many,
          where it begins, its segment, and the segment of its prompt or 0.
        """
        prefix = shared(lengths)
        pieces, begin, segment, prompt, group = [], 0, 0, 0, None
        for row in texts:
            start = 0
            if self._form.group_size > 1 and prefix[row]:
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
    """For counts 2, 3: (0, 0, 1, 1, 1) and (0, 1, 0, 1, 2)."""
    owner = np.repeat(np.arange(len(counts)), counts)
    starts = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - starts[owner]
