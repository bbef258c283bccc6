"""Packed rows for a model, padded rows for the maths: where each token is in both.

    padded rows [B, S]        packed row [N, W]       read by a head [G, M]

    ·  a  b  c  ·             a  b  d  e  g  ·        about    -  b  c  f  g
    d  e  f  g  ·    source   1  1  2  2  2  0        states   a  b  e  f  -
    (prompts a and d e)       segments

A model runs on packed rows: texts side by side, with segments. A head reads only the
states that predict a response token, so that it computes nothing for prompts, and its
per-token outputs return to their padded columns. Losses, GAE, whitening and statistics
see only padded rows.

The last token of a text (c, g) predicts nothing: its state is left out unless the
finished response has a value. State j of a head's row predicts token j + 1, as
everywhere.

Every map is a gather, and so is its transpose, by the inverse indices: a scatter of
hidden states is slow on every backend.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.models import axes, decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.experts import OWN, Routing

Array = jax.Array
Params = Any
Tree = TypeVar("Tree")
NONE = -1  # an empty index


@flax.struct.dataclass
class Packing:
    """Maps the tokens of padded rows [B, S] to packed rows [N, W], and back.

    The packed rows form G groups of N/G neighbours, one per device that shares rows,
    and a head reads M columns of each group. `data.layouts` makes it on the host.
    """

    source: Array  # i32[N, W], the padded token b·S + t in this place, or NONE
    segments: Array  # i32[N, W], the text of its row, from 1; 0 in empty places
    # i32[N, W], the segment of the prompt that responses of a group share, or 0; None
    # if every text has its own prompt.
    prefixes: Array | None
    # i32[G, M], the place in its group whose state predicts column m + 1, or NONE.
    states: Array
    columns: Array  # i32[G, N/G·W], the column m that reads this state, or NONE
    about: Array  # i32[G, M], the padded token b·S + t of column m, or NONE
    places: Array  # i32[B, S], the column g·M + m about this token, or NONE

    def pack(self, x: Array) -> Array:
        """Moves an array of padded rows to packed rows, without a gradient.

        Returns:
          [N, W], 0 in empty places.
        """
        # Tokens and masks have no gradient.
        return jax.lax.stop_gradient(_gather(x.reshape(-1), self.source))

    def pack_experts(self, experts: Array) -> Array:
        """Experts of packed tokens, i32[N, W, L, k], from i32[B, S, L, k]."""
        flat = experts.reshape(-1, *experts.shape[2:])
        return jnp.where(
            (self.source >= 0)[..., None, None],
            flat[jnp.maximum(self.source, 0)],
            OWN,
        )

    def unpack_experts(self, experts: Array) -> Array:
        """The inverse of `pack_experts`; `OWN` at tokens that are not packed."""
        rows, columns = self.places.shape
        empty = jnp.full((rows * columns, *experts.shape[2:]), OWN, experts.dtype)
        # A token that several responses share is packed once, for its first row.
        at = jnp.where(self.source >= 0, self.source, rows * columns)
        padded = empty.at[at.reshape(-1)].set(
            experts.reshape(-1, *experts.shape[2:]), mode="drop"
        )
        return padded.reshape(rows, columns, *experts.shape[2:])

    def read(self, hidden: Array) -> Array:
        """Reads the states that predict a response token out of packed rows.

        Args:
          hidden: floats[N, W, D].

        Returns:
          floats[G, M, D]; state j predicts the token of column j + 1, and is 0 if that
          is empty.
        """
        groups = self.states.shape[0]
        of_groups = hidden.reshape(groups, -1, hidden.shape[-1])
        # A group is on one device, so that no state moves to another.
        return axes.rows_apart(_read(of_groups, self.states, self.columns))

    def unpack(self, x: Array) -> Array:
        """Moves per-token outputs of a head to their padded columns.

        Args:
          x: floats[G, M], where column m is about the token `about[:, m]`.

        Returns:
          floats[B, S]; 0 where the head computed nothing.
        """
        return _spread(x, self.places, self.about)


@flax.struct.dataclass
class SizedPacking:
    """A packing that is run at one of a few sizes, so that few places are empty.

    Its arrays have the largest size; `size` is the smallest that holds all tokens, and
    a program has a branch for each size.
    """

    packing: Packing  # at the largest size
    size: Array  # i32[], which of `sizes`
    # (N/G, M) of each size, increasing: packed rows and columns of a group.
    sizes: tuple[tuple[int, int], ...] = flax.struct.field(pytree_node=False)

    def at_its_size(self) -> SizedPacking:
        """The packing with only its own size, for a program that runs once.

        Not under `jit`, as it reads the value of `size`.
        """
        own = self.sizes[int(self.size)]
        return SizedPacking(self.cut(*own), jnp.zeros_like(self.size), (own,))

    def cut(self, rows: int, reads: int) -> Packing:
        """The packing at a size that holds all its tokens.

        Args:
          rows: N/G.
          reads: M.
        """
        whole = self.packing
        groups, widest = whole.states.shape
        width = whole.source.shape[1]

        def first(x: Array) -> Array:
            of_groups = x.reshape(groups, -1, width)[:, :rows]
            return of_groups.reshape(-1, width)

        group, column = jnp.divmod(whole.places, widest)
        # Places are g·M + m: another M renumbers them.
        places = jnp.where(whole.places >= 0, group * reads + column, NONE)
        return Packing(
            source=first(whole.source),
            segments=first(whole.segments),
            prefixes=None if whole.prefixes is None else first(whole.prefixes),
            states=whole.states[:, :reads],
            columns=whole.columns[:, : rows * width],
            about=whole.about[:, :reads],
            places=places,
        )


def at_size(
    packing: SizedPacking | None, function: Callable[[Packing | None], Tree]
) -> Tree:
    """Calls function(packing at its size), with one branch of the program per size.

    Take gradients inside `function`: outside, they would keep what every branch needs.

    Args:
      packing: None calls the function with None.
      function: returns arrays whose shapes do not depend on the size.
    """
    if packing is None:
        return function(None)

    def at(size: tuple[int, int]) -> Tree:
        return function(packing.cut(*size))

    branches = [functools.partial(at, size) for size in packing.sizes]
    if len(branches) == 1:
        return branches[0]()
    # Shapes are static: all sizes are compiled, and one runs.
    return jax.lax.switch(packing.size, branches)


class Texts(NamedTuple):
    """Texts as a head reads them: padded rows as they are, or read from packed rows.

    `tokens`, `mask` and `first_column` align with `hidden_states`; `padded` moves the
    outputs of a head back to padded rows.
    """

    tokens: Array  # i32[B, S]; packed i32[G, M]
    mask: Array  # bool, of the shape of tokens
    first_column: int  # the first column that is computed
    rows: Array  # i32[B, S], the padded tokens
    packing: Packing | None
    segments: Array | None = None  # i32[B, S], of several texts in a padded row

    def hidden_states(
        self, params: Params, *, model: ModelConfig, experts: Array | None = None
    ) -> Array:
        """Hidden states after the final norm, [*tokens.shape, D] in `model.dtype`.

        Args:
          experts: i32[B, S, L, k] of the padded rows, as in `decoder.hidden_states`.
        """
        inputs = self._inputs(experts)
        hidden = decoder.hidden_states(params, model=model, **inputs)
        return hidden if self.packing is None else self.packing.read(hidden)

    def hidden_and_routing(
        self, params: Params, *, model: ModelConfig, experts: Array | None = None
    ) -> tuple[Array, Routing]:
        """`hidden_states` of a mixture, and its routing, `chosen` in padded rows."""
        inputs = self._inputs(experts)
        hidden, routing = decoder.hidden_and_routing(params, model=model, **inputs)
        if self.packing is None:
            return hidden, routing
        chosen = self.packing.unpack_experts(routing.chosen)
        return self.packing.read(hidden), dataclasses.replace(routing, chosen=chosen)

    def _inputs(self, experts: Array | None) -> dict[str, Any]:
        if self.packing is None:
            return {
                "tokens": self.tokens,
                "mask": self.mask,
                "segments": self.segments,
                "first_column": self.first_column - 1,
                "experts": experts,
            }
        return {
            "tokens": self.packing.pack(self.rows),
            "mask": self.packing.source >= 0,
            "segments": self.packing.segments,
            "prefixes": self.packing.prefixes,
            "experts": None if experts is None else self.packing.pack_experts(experts),
        }

    def padded(self, x: Array) -> Array:
        """Moves per-token numbers f32, shaped as `tokens`, to their columns [B, S]."""
        return x if self.packing is None else self.packing.unpack(x)


def texts_of(
    tokens: Array,
    mask: Array,
    *,
    first_column: int = 1,
    packing: Packing | None = None,
    segments: Array | None = None,
) -> Texts:
    """Rows as a head reads them.

    Args:
      mask: bool[B, S], True at tokens; ignored with a packing.
      first_column: columns before it are not computed and are 0; ignored with a
        packing, which knows its responses.
      packing: of these rows; None leaves them padded.
      segments: i32[B, S], texts packed into one row (`decoder.hidden_states`); None is
        one text per row. Not read with a packing, which has its own.

    Raises:
      ValueError: the packing is of rows of another shape.
    """
    if packing is None:
        return Texts(tokens, mask, first_column, tokens, None, segments)
    if packing.places.shape != tokens.shape:
        raise ValueError(
            f"packing: expected that of {tokens.shape} rows and columns, got one of "
            f"{packing.places.shape}; make one for these rows"
        )
    read = _gather(tokens.reshape(-1), packing.about)
    return Texts(read, jnp.ones(read.shape, bool), 1, tokens, packing)


def _gather(x: Array, indices: Array) -> Array:
    """x[indices], 0 where an index is NONE."""
    # The host made the indices: the device need not check bounds.
    values = x.at[jnp.maximum(indices, 0)].get(mode="promise_in_bounds")
    return jnp.where(indices >= 0, values, jnp.zeros_like(values))


def _rows_at(x: Array, indices: Array) -> Array:
    """Rows of [G, places, D] at i32[G, M], 0 where an index is NONE."""
    at = jnp.maximum(indices, 0)[..., None]
    rows = jnp.take_along_axis(x, at, axis=1, mode="promise_in_bounds")
    return jnp.where((indices >= 0)[..., None], rows, jnp.zeros_like(rows))


@jax.custom_vjp
def _read(hidden: Array, states: Array, columns: Array) -> Array:
    del columns
    return _rows_at(hidden, states)


_read.defvjp(
    lambda hidden, states, columns: (_rows_at(hidden, states), columns),
    lambda columns, cotangent: (_rows_at(cotangent, columns), None, None),
)


@jax.custom_vjp
def _spread(x: Array, places: Array, about: Array) -> Array:
    del about
    return _gather(x.reshape(-1), places)


_spread.defvjp(
    lambda x, places, about: (_gather(x.reshape(-1), places), about),
    lambda about, cotangent: (_gather(cotangent.reshape(-1), about), None, None),
)
