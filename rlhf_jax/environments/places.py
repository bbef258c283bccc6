"""Assigns places to episodes, and parks those with a slow answer on the host.

    place 0    a a a E           b b b           a waits; b has the place meanwhile
    host             a a a E ........ answer     tokens, keys and values of a
    place 1                              a a a E o o ...

An episode returns to any place with exactly the bits that it had, so results do not
depend on which episodes waited. Only columns of the cache that it has used are kept.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.environments.answers import Answer
from rlhf_jax.environments.programs import EpisodePrograms
from rlhf_jax.models.caches import Caches, DeltaState
from rlhf_jax.models.generation.episode_places import Episodes

HostArray = Any
NOWHERE = -1
PATIENCE = 0.2  # seconds that a place waits for an answer while another could draw


@dataclasses.dataclass
class Episode:
    """An episode under way."""

    row: int
    place: int  # NOWHERE while it waits on the host
    state: bytes
    reading: list[int] | None  # tokens that must still be read; None if none
    prompt: int  # tokens of its prompt
    begins: bool = True  # none of its tokens has been read
    drawing: bool = False  # a turn is being drawn
    stopped: bool = True  # the last finished turn ended with a stop token
    size: int = 0  # tokens after the prompt, without the turn that is being drawn
    turns_size: int = 0  # tokens after the prompt up to the end of the last turn
    rewards: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    future: concurrent.futures.Future[Answer] | None = None
    submitted: float = 0.0  # `time.monotonic` when `future` was submitted, seconds
    parked: Episodes | None = None  # content of its place, while it has none
    # An episode with the same prompt that reads the prompt first. The columns that it
    # has read are copied to this one, except the last ones: reading those gives the
    # same bits as reading all.
    first: Episode | None = None

    @property
    def returns(self) -> bool:
        """Whether the episode needs a place to read its observation."""
        return self.place == NOWHERE and self.reading is not None


class Places:
    """The places of a device, and which of them are free."""

    def __init__(self, device: EpisodePrograms) -> None:
        """Starts with all places free."""
        self._device = device
        self.free = list(range(device.places))[::-1]

    def leave(self, episode: Episode) -> None:
        """Frees the place of an episode, if it has one."""
        if episode.place != NOWHERE:
            self.free.append(episode.place)
            episode.place = NOWHERE

    def exchange(self, live: Sequence[Episode], *, beginning: int) -> None:
        """Parks slow episodes whose places are needed, and brings others back.

        Args:
          live: episodes under way.
          beginning: number of episodes that have not begun.
        """
        back = [episode for episode in live if episode.returns]
        num_missing = len(back) + beginning - len(self.free)
        if num_missing > 0:
            self._park(live, count=num_missing)
        for episode in back[: len(self.free)]:
            episode.place = self.free.pop()
        size = self._device.arriving
        while slots := self.slots(
            episode
            for episode in back
            if episode.place != NOWHERE and episode.parked is not None
        ):
            rows = [(slot, episode.parked) for slot, episode in slots if episode.parked]
            self._device.put(_together(rows, size=size), place=self._array(slots))
            for _, episode in slots:
                episode.parked = None

    def _park(self, live: Sequence[Episode], *, count: int) -> None:
        since = time.monotonic() - PATIENCE
        slow = [
            episode
            for episode in live
            if episode.place != NOWHERE and episode.future and episode.submitted < since
        ][:count]
        while slots := self.slots(
            episode for episode in slow if episode.place != NOWHERE
        ):
            rows = self._device.take(place=self._array(slots))
            for slot, episode in slots:
                episode.parked = _parked(rows, slot)
                self.leave(episode)

    def share(self, episode: Episode) -> int:
        """Returns the replica that has an episode's place."""
        return episode.place * self._device.shares // self._device.places

    def slots(self, episodes: Iterable[Episode]) -> list[tuple[int, Episode]]:
        """Returns (row of the arrays, episode) for the episodes of one call."""
        size = self._device.arriving // self._device.shares
        taken = [0] * self._device.shares
        slots = []
        for episode in episodes:
            share = self.share(episode)
            if taken[share] < size:
                slots.append((share * size + taken[share], episode))
                taken[share] += 1
        return slots

    def _array(self, slots: Sequence[tuple[int, Episode]]) -> HostArray:
        """i32[A], the place of the episode in each slot; C without one."""
        place = np.full(self._device.arriving, self._device.places, np.int32)
        for slot, episode in slots:
            place[slot] = episode.place
        return place


def _parked(rows: Episodes, slot: int) -> Episodes:
    """Takes one row of what `take` returned, with the used columns of its cache."""
    row = jax.tree.map(lambda leaf: leaf[slot], rows)
    columns = int(row.length)
    caches = _of_columns(row.caches, lambda leaf: leaf[:, :columns])
    # Copies: views would keep all rows.
    return jax.tree.map(np.array, dataclasses.replace(row, caches=caches))


def _together(episodes: Sequence[tuple[int, Episodes]], *, size: int) -> Episodes:
    """Stacks parked episodes into rows for `EpisodePrograms.put`.

    Args:
      episodes: at least one (slot, episode).
      size: A, the number of slots; slots without an episode are zero.
    """
    columns = len(episodes[0][1].tokens)

    def widened(leaf: HostArray) -> HostArray:
        room = [(0, 0)] * leaf.ndim
        room[1] = 0, columns - leaf.shape[1]
        return np.pad(leaf, room)

    def rows(*parts: HostArray) -> HostArray:
        whole = np.zeros((size, *parts[0].shape), parts[0].dtype)
        for (slot, _), part in zip(episodes, parts, strict=True):
            whole[slot] = part
        return whole

    wide = [
        dataclasses.replace(episode, caches=_of_columns(episode.caches, widened))
        for _, episode in episodes
    ]
    return jax.tree.map(rows, *wide)


def _of_columns(caches: Caches, change: Callable[[HostArray], HostArray]) -> Caches:
    """Changes keys and values, [K, columns, ...]; a recurrent state has no columns."""
    return tuple(
        kept if isinstance(kept, DeltaState) else jax.tree.map(change, kept)
        for kept in caches
    )
