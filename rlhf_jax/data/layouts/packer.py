"""Plans on the host how responses of different lengths are packed into rows.

    rollout ──spans──> i32[B, 2] ──Packer──> RolloutPacking ──> the jitted programs
    minibatches(key) ──> i32[T, b] ──┘

The longest texts go first, each into the first row with room (first-fit decreasing).
The number of packed rows is rounded up to one of a few sizes, which are chosen once
from a sample of lengths. Every size is a branch of one program, so a run compiles one
program for packed rows and, if lengths outgrow the sizes, one for padded rows. The
packing of an iteration is a pure function of its lengths, its order and the sample, so
a resumed run packs as the original run did.
"""

from __future__ import annotations

import collections
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.algorithms.batch import Rollout, RolloutPacking
from rlhf_jax.data.layouts.arrays import Form, Part, alone, deal, fill, packing_of
from rlhf_jax.data.layouts.sizes import Sizes, in_groups, sizes_of
from rlhf_jax.models.packing import SizedPacking

Array = jax.Array
HostArray = Any  # NumPy's
Kind = Literal["batch", "minibatch"]


def spans(rollout: Rollout) -> Array:
    """i32[B, 2]: tokens of each prompt and of each response, the input of packing.

    The response of an episode is everything after its prompt. Observed tokens are
    packed with it; masks exclude their log-probs, as in padded rows.
    """
    sampled = rollout.response_mask.sum(axis=1, dtype=jnp.int32)
    response = sampled + rollout.observed.sum(axis=1, dtype=jnp.int32)
    whole = rollout.mask.sum(axis=1, dtype=jnp.int32)
    return jnp.stack([whole - response, response], axis=1)


class Packer:
    """Packs the rollouts of a run, and counts how often each size is used.

    Attributes:
      batch, minibatch: the sizes; None if packing saves nothing for the sample.
      used: {(kind, index of the size): count}, kind "batch" or "minibatch";
        ("padded", 0) counts iterations that stayed padded.
    """

    def __init__(self, form: Form, *, sample: HostArray) -> None:
        """Chooses the sizes.

        Args:
          form: the settings that all batches share.
          sample: i32[n, 2], lengths like those of the run, in whole groups: `spans` of
            the first rollout, or drawn from a histogram.

        Raises:
          InputError: a text of the sample is longer than a packed row.
        """
        self.form = form
        self.batch, self.minibatch = sizes_of(form, sample)
        self.used: collections.Counter[tuple[str, int]] = collections.Counter()

    def __call__(
        self, lengths: HostArray, order: HostArray, *, columns: int
    ) -> RolloutPacking | None:
        """Packs the rows of an iteration.

        Args:
          lengths: i32[B, 2], `spans` of the rollout.
          order: i32[T, b], `minibatches` of its update.
          columns: S, columns of the rollout.

        Returns:
          NumPy arrays; None if the rows should stay padded.

        Raises:
          InputError: a text is longer than a packed row.
        """
        lengths = in_groups(lengths, form=self.form)
        steps: list[tuple[Kind, HostArray]] = [
            ("minibatch", lengths[rows]) for rows in order
        ]
        made = self._made([("batch", lengths), *steps], columns=columns)
        if made is None:
            return None
        (batch, _), *of_steps = made
        packings, members = zip(*of_steps, strict=True)
        in_parts: HostArray = np.stack(members)
        return RolloutPacking(
            batch=jax.tree.map(lambda leaf: leaf[0], batch),
            minibatches=jax.tree.map(lambda *leaves: np.stack(leaves), *packings),
            members=in_parts,
        )

    def whole(self, lengths: HostArray, *, columns: int) -> SizedPacking | None:
        """Packs the rows of a batch for a model that takes no part in the update.

        Args:
          lengths: i32[B, 2], `spans` of the rollout.
          columns: S, columns of the padded rows.

        Returns:
          NumPy arrays; None if the rows should stay padded.

        Raises:
          InputError: a text is longer than a packed row.
        """
        lengths = in_groups(lengths, form=self.form)
        made = self._made([("batch", lengths)], columns=columns)
        return None if made is None else jax.tree.map(lambda leaf: leaf[0], made[0][0])

    def _made(
        self, batches: list[tuple[Kind, HostArray]], *, columns: int
    ) -> list[tuple[SizedPacking, HostArray]] | None:
        """Packs batches and minibatches of some lengths; None if one stays padded.

        The reserve sizes have branches too if one of them needs it. This depends on the
        batch alone, so a resumed run uses the same programs as the original run.

        Returns:
          For each the packings of all C parts, leaves [C, ...], and members bool[C, b].
        """
        form, of_kind = self.form, {"batch": self.batch, "minibatch": self.minibatch}
        todo: list[tuple[Kind, HostArray, Sizes, list[Part]]] = []
        for kind, lengths in batches:
            sizes = of_kind[kind]
            parts = None if sizes is None else _parts(lengths, sizes=sizes, form=form)
            if sizes is None or parts is None:
                self.used["padded", 0] += 1
                return None
            todo.append((kind, lengths, sizes, parts))
        reserve = any(
            part.size >= sizes.expected for *_, sizes, parts in todo for part in parts
        )
        result = []
        for kind, lengths, sizes, parts in todo:
            self.used.update((kind, part.size) for part in parts)
            branches = sizes.sizes if reserve else sizes.sizes[: sizes.expected]
            made = [
                packing_of(
                    part, lengths, form=form, columns=columns, widest=branches[-1]
                )
                for part in _filled_up(parts, sizes.parts)
            ]
            packings, size, members = zip(*made, strict=True)
            number_of_size: HostArray = np.array(size, np.int32)
            of_parts: HostArray = np.stack(members)
            of_parts[0] |= ~of_parts.any(axis=0)  # rows without a read state
            stacked = SizedPacking(
                packing=jax.tree.map(lambda *leaves: np.stack(leaves), *packings),
                size=number_of_size,
                sizes=branches,
            )
            result.append((stacked, of_parts))
        return result

    def describe(self) -> str:
        """Describes the sizes in one line for the terminal."""
        form, sizes = self.form, self.minibatch
        if self.batch is None or sizes is None:
            return "packing: rows stay padded, as packed ones would be no fewer"
        expected = sizes.sizes[: sizes.expected]
        rows = sorted({rows * form.devices for rows, _ in expected})
        *some, last = map(str, rows)
        counts = f"{', '.join(some)} or {last}" if some else last
        parts = "" if sizes.parts == 1 else f" in up to {sizes.parts} parts"
        rest = "" if form.max_tokens is not None else "; what needs more stays padded"
        if sizes.expected < len(sizes.sizes):
            more = sizes.sizes[-1][0] * form.devices
            rest = f"; longer ones take {more}, compiled when needed, or stay padded"
        return (
            f"packing: minibatches of {form.minibatch} responses{parts} of {counts} "
            f"packed rows, {form.width} tokens each{rest}"
            + ("; a prompt stands once beside its group" * (form.group_size > 1))
        )

    def summary(self) -> dict[str, Any]:
        """Sizes as (packed rows per device, columns read), and their counts."""
        named = {"batch": self.batch, "minibatch": self.minibatch}
        return {
            **{name: list(x.sizes) for name, x in named.items() if x is not None},
            "used": {f"{kind} {n}": count for (kind, n), count in self.used.items()},
        }


def _parts(lengths: HostArray, *, sizes: Sizes, form: Form) -> list[Part] | None:
    """Divides rows into parts and picks the size of each; None if they do not fit."""
    tried = [fill(lengths, form=form)]
    share = form.packed_share(len(tried[0].texts), rows=len(lengths))
    if share > 1 and form.may_pad:
        return None
    if form.max_tokens is not None:
        tried.append(alone(lengths, form=form))
    for bins in tried:
        least = max(1, -(-len(bins.texts) // (sizes.rows * form.devices)))
        for count in range(least, sizes.parts + 1):
            parts = deal(bins, rows=sizes.rows, parts=count, form=form)
            fitting = [_size_of(part, sizes) for part in parts]
            if None not in fitting:
                return [
                    part._replace(size=size)
                    for part, size in zip(parts, fitting, strict=True)
                    if size is not None
                ]
    return None


def _size_of(part: Part, sizes: Sizes) -> int | None:
    for number, (rows, reads) in enumerate(sizes.sizes):
        if part.rows <= rows and part.reads < reads:
            return number
    return None


def _filled_up(parts: list[Part], count: int) -> list[Part]:
    """Appends empty parts, which cost nothing, up to `count` parts."""
    empty = Part([[] for _ in parts[0].groups], rows=0, reads=0, size=0)
    return parts + [empty] * (count - len(parts))
