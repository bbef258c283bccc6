"""Continuous batching on a mesh: each share of the rows runs by itself.

    data=2, tensor=2       rows 0 to 3           rows 4 to 7
    devices 0 and 1        pool of N/2 pages
    devices 2 and 3                              pool of N/2 pages

Any row of a pool may own any page. So the devices of a share have their own pool,
places and queue. A share of one device needs no other until the end.

The axes within a share, such as `tensor`, share heads and vocabulary as everywhere. XLA
may merge the exchanges of all shares into one operation. So all shares take every step
together, and go on drawing while one of them waits for free places.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from rlhf_jax.functional.errors import refuse
from rlhf_jax.models.generation import continuous_batching, page_table
from rlhf_jax.models.generation.places import Responses
from rlhf_jax.models.generation.sampling import Decoder, Draw

Array = jax.Array
Params = Any

AXIS = "data"  # mesh axis whose devices have all weights, and their own rows


def respond(
    decoder: Decoder,
    *,
    tokens: Array,
    mask: Array,
    keys: Array,
    places: int,
    max_new_tokens: int,
    draw: Draw,
    group_size: int,
) -> Responses:
    """`continuous_batching.respond`, on a mesh with a pool of pages for every share.

    `places` and the model's `cache_pages` count all shares together. Samples equal
    those of one pool, as a draw depends only on its row's key.

    Raises:
      InputError: as `check_shares`, or as `continuous_batching.respond`.
    """
    mesh, model = jax.sharding.get_abstract_mesh(), decoder.model
    shares, pages = dict(mesh.shape).get(AXIS, 1), model.cache_pages
    # XLA may merge the exchanges of all shares, which then must take equal steps.
    together = AXIS if mesh.size > shares else None
    own = functools.partial(
        continuous_batching.respond,
        max_new_tokens=max_new_tokens,
        draw=draw,
        group_size=group_size,
    )
    auto = AxisType.Auto in mesh.axis_types and AXIS not in mesh.manual_axes
    if pages is None or shares == 1 or not auto:
        return own(decoder, tokens=tokens, mask=mask, keys=keys, places=places)
    rows, prompt = tokens.shape
    check_shares(shares, rows=rows, places=places, pages=pages, group_size=group_size)
    model = dataclasses.replace(model, cache_pages=pages // shares)
    page_table.arrivals_at_most(  # raises if all shares together have too few
        pages // shares,
        size=model.page_size,
        prompt=prompt,
        new=max_new_tokens,
        group_size=group_size,
        shares=shares,
    )
    by_row = PartitionSpec(AXIS)

    def of_share(params: Params, tokens: Array, mask: Array, keys: Array) -> Responses:
        return own(
            Decoder(params, model, record=decoder.record),
            tokens=tokens,
            mask=mask,
            keys=keys,
            places=places // shares,
            axis=together,
        )

    split = jax.shard_map(
        of_share,
        mesh=mesh,
        in_specs=(PartitionSpec(), by_row, by_row, by_row),
        out_specs=by_row,
        axis_names={AXIS},
        check_vma=False,
    )
    return split(decoder.params, tokens, mask, keys)


def check_shares(
    shares: int, *, rows: int, places: int, pages: int, group_size: int
) -> None:
    """Checks that the shares can have their own rows, places and pages.

    Raises:
      InputError: `shares` does not divide one of them, or a share has fewer places than
        a group has rows.
    """
    refuse(_faults(shares, rows=rows, places=places, pages=pages, group=group_size))


def _faults(
    shares: int, *, rows: int, places: int, pages: int, group: int
) -> Iterator[str]:
    for name, number in {
        "prompts": rows // group,
        "continuous_batching": places,
        "cache_pages": pages,
    }.items():
        if number % shares:
            yield (
                f"{name}: expected a multiple of {shares}, as each share of the rows "
                f"on a mesh with data={shares} has pages of its own, got {number}; "
                f"change it, or choose another mesh for sampling"
            )
    if places < group * shares:
        yield (
            f"continuous_batching: expected at least {group * shares} places, as "
            f"a prompt has {group} rows in each of {shares} shares, got {places}; "
            f"give more, or choose another mesh for sampling"
        )
