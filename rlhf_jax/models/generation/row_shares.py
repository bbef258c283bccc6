"""Continuous batching by itself on each share of the rows, where a mesh has several.

    data=2, tensor=2       rows 0 to 3           rows 4 to 7
    devices 0 and 1        pool of N/2 pages
    devices 2 and 3                              pool of N/2 pages

A page has one owner, and any row may have any page. So the devices of a share have a
pool, places and a queue of their own. A share of one device asks nothing of the others,
and waits for them at the end.

The axes within a share, as `tensor`, share heads and vocabulary as everywhere. XLA may
then make one operation of what the devices of all shares exchange. So all shares make
every step together, and draw on while one of them waits for room.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from rlhf_jax.functional.errors import refuse
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation import continuous_batching, page_table
from rlhf_jax.models.generation.places import Responses
from rlhf_jax.models.generation.sampling import Draw

Array = jax.Array
Params = Any

AXIS = "data"  # of a mesh: its devices have all weights, and rows of their own


def respond(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    keys: Array,
    places: int,
    max_new_tokens: int,
    draw: Draw,
    group_size: int,
    record_experts: bool = False,
) -> Responses:
    """`continuous_batching.respond`, on a mesh with a pool of pages for every share.

    `places` and `model.cache_pages` are those of all shares together. Samples are those
    of one pool: a draw depends on its row's key alone.

    Raises:
      InputError: as `check_shares`, or as `continuous_batching.respond`.
    """
    mesh = jax.sharding.get_abstract_mesh()
    shares, pages = dict(mesh.shape).get(AXIS, 1), model.cache_pages
    # An exchange may be one operation of all shares, which would wait for it.
    together = AXIS if mesh.size > shares else None
    own = functools.partial(
        continuous_batching.respond,
        max_new_tokens=max_new_tokens,
        draw=draw,
        group_size=group_size,
        record_experts=record_experts,
    )
    auto = AxisType.Auto in mesh.axis_types and AXIS not in mesh.manual_axes
    if pages is None or shares == 1 or not auto:
        return own(
            params, model=model, tokens=tokens, mask=mask, keys=keys, places=places
        )
    rows, prompt = tokens.shape
    check_shares(shares, rows=rows, places=places, pages=pages, group_size=group_size)
    model = dataclasses.replace(model, cache_pages=pages // shares)
    page_table.arrivals_at_most(  # refuses too few, of all shares together
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
            params,
            model=model,
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
    return split(params, tokens, mask, keys)


def check_shares(
    shares: int, *, rows: int, places: int, pages: int, group_size: int
) -> None:
    """Checks that shares of the rows can have places and pages of their own.

    Raises:
      InputError: `shares` does not divide one of them, or a group has fewer places
        than rows in a share.
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
