"""How responses of uneven lengths are packed: made on the host from their lengths.

    rollout ──spans──> i32[B, 2] ──Packer──> RolloutPacking ──> the jitted programs
    minibatches(key) ──> i32[T, b] ──┘

The longest texts go first, each into the first row with room (first fit decreasing).
Rows are cut to one of a few sizes, chosen once from a sample of lengths; every size is
a branch of one program, so that a run compiles a program for packed rows and, where
lengths outgrow the sizes, one for padded rows. What an iteration is packed into is a
pure function of its lengths, its order and the sample: a resumed run packs as the run
did that it goes on with.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.batch import Rollout, RolloutPacking
from rlhf_jax.data import layout_arrays
from rlhf_jax.data.layout_arrays import Bins, Form, Part
from rlhf_jax.models.packing import SizedPacking

Array = jax.Array
HostArray = Any  # NumPy's
Kind = Literal["batch", "minibatch"]
DRAWS = 48  # batches drawn from a sample of lengths, to choose sizes by
QUANTILES = (0.4, 0.8, 1.0)  # of the packed rows that the draws needed
GAIN = 0.95  # of the padded rows: a size with more than these is no gain
MARGIN = 1.1  # of the states read of a row, where more rows are than were drawn
READS = 8  # columns that a head reads are a multiple of this


class Sizes(NamedTuple):
    """Of the parts of some rows; the branches of a program."""

    parts: int  # C, the most there are
    sizes: tuple[tuple[int, int], ...]  # (N/G, M), rising

    @property
    def rows(self) -> int:
        """Packed rows of a group of the largest size."""
        return self.sizes[-1][0]


def spans(rollout: Rollout) -> Array:
    """i32[B, 2], tokens of prompt and of response: all that packing needs to know."""
    response = rollout.response_mask.sum(axis=1, dtype=jnp.int32)
    whole = rollout.mask.sum(axis=1, dtype=jnp.int32)
    return jnp.stack([whole - response, response], axis=1)


class Packer:
    """Packs the rollouts of a run, and counts the sizes that it used.

    Attributes:
      batch, minibatch: the sizes; None where packing is no gain for the sample.
      used: how often which size was used, by "batch" or "minibatch" and its number;
        ("padded", 0) counts iterations that were left padded.
    """

    def __init__(self, form: Form, *, sample: HostArray) -> None:
        """Chooses the sizes.

        Args:
          form: of every batch.
          sample: i32[n, 2], `spans` of the first rollout, or of a histogram; in
            whole groups.

        Raises:
          InputError: a text of the sample is longer than a packed row.
        """
        self.form = form
        self.batch, self.minibatch = sizes_of(form, sample)
        self.used: collections.Counter[tuple[str, int]] = collections.Counter()

    def __call__(
        self, lengths: HostArray, order: HostArray, *, columns: int
    ) -> RolloutPacking | None:
        """How the rows of an iteration are packed.

        Args:
          lengths: i32[B, 2], `spans` of the rollout.
          order: i32[T, b], `minibatches` of its update.
          columns: S, of the rollout.

        Returns:
          NumPy arrays; None where padded rows are no more work.

        Raises:
          InputError: a text is longer than a packed row.
        """
        lengths = _in_groups(lengths, form=self.form)
        whole = self._parts("batch", lengths)
        steps = [self._parts("minibatch", lengths[rows]) for rows in order]
        if whole is None or None in steps:
            self.used["padded", 0] += 1
            return None
        batch, _ = self._made("batch", lengths, whole, columns=columns)
        made = [
            self._made("minibatch", lengths[rows], step, columns=columns)
            for rows, step in zip(order, steps, strict=True)
            if step is not None
        ]
        packings, members = zip(*made, strict=True)
        in_parts: HostArray = np.stack(members)
        return RolloutPacking(
            batch=jax.tree.map(lambda leaf: leaf[0], batch),
            minibatches=jax.tree.map(lambda *leaves: np.stack(leaves), *packings),
            members=in_parts,
        )

    def whole(self, lengths: HostArray, *, columns: int) -> SizedPacking | None:
        """How the rows of a batch are packed, for a model that no update reads.

        Args:
          lengths: i32[B, 2], `spans` of the rollout.
          columns: S, of the rows that the packing is of.

        Returns:
          NumPy arrays; None where padded rows are no more work.

        Raises:
          InputError: a text is longer than a packed row.
        """
        lengths = _in_groups(lengths, form=self.form)
        parts = self._parts("batch", lengths)
        if parts is None:
            self.used["padded", 0] += 1
            return None
        batch, _ = self._made("batch", lengths, parts, columns=columns)
        return jax.tree.map(lambda leaf: leaf[0], batch)

    def _parts(self, kind: Kind, lengths: HostArray) -> list[Part] | None:
        sizes = self.batch if kind == "batch" else self.minibatch
        return None if sizes is None else _parts(lengths, sizes=sizes, form=self.form)

    def _made(
        self, kind: Kind, lengths: HostArray, parts: list[Part], *, columns: int
    ) -> tuple[SizedPacking, HostArray]:
        """Every leaf [C, ...], and the members bool[C, b]."""
        sizes = self.batch if kind == "batch" else self.minibatch
        assert sizes is not None
        self.used.update((kind, part.size) for part in parts)
        arrays = layout_arrays.Arrays(self.form, columns=columns)
        made = [
            arrays(lengths, part, widest=sizes.sizes[-1])
            for part in _filled_up(parts, sizes.parts)
        ]
        packings, size, members = zip(*made, strict=True)
        number_of_size: HostArray = np.array(size, np.int32)
        of_parts: HostArray = np.stack(members)
        of_parts[0] |= ~of_parts.any(axis=0)  # no state of theirs is read
        stacked = SizedPacking(
            packing=jax.tree.map(lambda *leaves: np.stack(leaves), *packings),
            size=number_of_size,
            sizes=sizes.sizes,
        )
        return stacked, of_parts

    def describe(self) -> str:
        """A line on the sizes, for a person."""
        form, sizes = self.form, self.minibatch
        if self.batch is None or sizes is None:
            return "packing: rows stay padded, as packed ones would be no fewer"
        rows = sorted({rows * form.devices for rows, _ in sizes.sizes})
        *some, last = map(str, rows)
        counts = f"{', '.join(some)} or {last}" if some else last
        parts = "" if sizes.parts == 1 else f" in up to {sizes.parts} parts"
        rest = "" if form.max_tokens else "; what needs more stays padded"
        return (
            f"packing: minibatches of {form.minibatch} responses{parts} of {counts} "
            f"packed rows, {form.width} tokens each{rest}"
            + ("; a prompt stands once beside its group" * (form.group_size > 1))
        )

    def summary(self) -> dict[str, Any]:
        """Sizes as (packed rows of a device, columns read), and how often each came."""
        named = {"batch": self.batch, "minibatch": self.minibatch}
        return {
            **{name: list(x.sizes) for name, x in named.items() if x is not None},
            "used": {f"{kind} {n}": count for (kind, n), count in self.used.items()},
        }


def sizes_of(form: Form, sample: HostArray) -> tuple[Sizes | None, Sizes | None]:
    """The sizes for batches with lengths like a sample's, and for their minibatches.

    Some are quantiles of what drawn batches need. One lies between them and padded
    rows, for lengths that grow during a run. What outgrows it is left padded, or with
    `form.max_tokens` takes a size that holds anything.

    Args:
      form: of every batch.
      sample: i32[n, 2], tokens of prompts and of responses.

    Returns:
      Both; None each where packed rows would be no fewer than padded ones.

    Raises:
      InputError: a text of the sample is longer than a packed row.
    """
    rng = np.random.default_rng(0)
    batches, steps = [], []
    for _ in range(DRAWS):
        groups = rng.integers(
            len(sample) // form.group_size, size=form.rows // form.group_size
        )
        rows = sample.reshape(-1, form.group_size, 2)[groups].reshape(-1, 2)
        rows = _in_groups(rows, form=form)
        batches.append(layout_arrays.fill(rows, form=form))
        steps += [
            layout_arrays.fill(rows[part], form=form)
            for part in np.split(rng.permutation(form.rows), form.num_minibatches)
        ]
    of_batch = _sizes(form, batches, rows=form.rows, most=None)
    of_steps = _sizes(
        form, steps, rows=form.minibatch, most=form.rows_of_part(form.minibatch)
    )
    return of_batch, of_steps


def _sizes(
    form: Form, drawn: Sequence[Bins], *, rows: int, most: int | None
) -> Sizes | None:
    """Sizes for so many responses, of at most `most` packed rows in a group.

    Args:
      drawn: what like responses need.
      most: None is as many as there are responses.
    """
    devices = form.devices
    every = -(-rows // devices)
    limit = every if most is None else most
    needs = np.sort([-(-len(bins.texts) // devices) for bins in drawn])
    wanted = [-(-limit // 2), limit]
    if needs[-1] <= limit:
        wanted = [
            max(1, int(np.quantile(needs, share, method="higher")))
            for share in QUANTILES
        ]
        wanted.append(int(np.ceil(np.sqrt(wanted[-1] * every))))
    dealt = [
        part
        for bins in drawn
        for part in layout_arrays.deal(bins, rows=limit, parts=None, form=form)
    ]
    rows_dealt = sum(part.rows for part in dealt)
    density = sum(part.reads for part in dealt) / max(1, rows_dealt)
    sizes: list[tuple[int, int]] = []
    for count in sorted(set(wanted)):
        if count > limit or count * devices > GAIN * rows:
            continue
        reads = max((part.reads for part in dealt if part.rows <= count), default=0)
        if count >= needs[-1]:  # as full as others are
            reads = max(reads, int(MARGIN * density * count))
        reads = 1 + _up(reads, READS)
        sizes.append((count, max([reads, *(size[1] for size in sizes)])))
    if form.max_tokens is not None:  # whatever the lengths are
        widest = max([1 + limit * form.max_new_tokens, *(size[1] for size in sizes)])
        if not sizes or sizes[-1] != (limit, widest):
            sizes.append((limit, widest))
    return Sizes(-(-every // limit), tuple(sizes)) if sizes else None


def _in_groups(lengths: HostArray, *, form: Form) -> HostArray:
    """i32[B, 3], with the number of each row's group, which minibatches tear apart."""
    groups = np.arange(len(lengths)) // form.group_size
    return np.concatenate([lengths, groups[:, None]], axis=1)


def _parts(lengths: HostArray, *, sizes: Sizes, form: Form) -> list[Part] | None:
    """Parts of some rows, each with its size; None where they do not fit."""
    tried = [layout_arrays.fill(lengths, form=form)]
    if form.max_tokens is not None:
        tried.append(layout_arrays.alone(lengths, form=form))
    for bins in tried:
        least = max(1, -(-len(bins.texts) // (sizes.rows * form.devices)))
        for count in range(least, sizes.parts + 1):
            parts = layout_arrays.deal(bins, rows=sizes.rows, parts=count, form=form)
            held = [_size_of(part, sizes) for part in parts]
            if None not in held:
                return [
                    part._replace(size=size)
                    for part, size in zip(parts, held, strict=True)
                    if size is not None
                ]
    return None


def _size_of(part: Part, sizes: Sizes) -> int | None:
    for number, (rows, reads) in enumerate(sizes.sizes):
        if part.rows <= rows and part.reads < reads:
            return number
    return None


def _filled_up(parts: list[Part], count: int) -> list[Part]:
    """With parts of no responses, which cost nothing."""
    empty = Part([[] for _ in parts[0].groups], rows=0, reads=0, size=0)
    return parts + [empty] * (count - len(parts))


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
