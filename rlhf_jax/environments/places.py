"""Who has which place, and who waits for a slow answer on the host.

    place 0    a a a E           b b b           a: waits; b has the place meanwhile
    host             a a a E ........ answer     its tokens, and its keys and values
    place 1                              a a a E o o ...

An episode comes back to any place with the bits that it left with, so that nothing
depends on who waited where. Only the columns that it has are kept.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import numpy as np

from rlhf_jax.environments.answers import Answer
from rlhf_jax.environments.device import Device
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
    reading: list[int] | None  # tokens that are still to be read; None reads nothing
    prompt: int  # tokens of its prompt
    begins: bool = True  # nothing of it has been read
    drawing: bool = False  # a turn is under way
    stopped: bool = True  # the turn that ended last has a stop token
    size: int = 0  # tokens behind the prompt, without those that are being drawn
    turns_size: int = 0  # tokens behind it up to the end of the turn that ended last
    rewards: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    future: concurrent.futures.Future[Answer] | None = None
    submitted: float = 0.0  # time of the turn that `future` answers, seconds
    parked: Episodes | None = None  # what stood in its place, while it has none
    # An episode of the same prompt, which reads it first. What it has read is copied to
    # this one, but for the last columns: to read those gives the bits of reading all.
    first: Episode | None = None

    @property
    def returns(self) -> bool:
        """Whether it waits for a place, to read in it."""
        return self.place == NOWHERE and self.reading is not None


class Places:
    """The places of a device."""

    def __init__(self, device: Device) -> None:
        """All are free."""
        self._device = device
        self.free = list(range(device.places))[::-1]

    def leave(self, episode: Episode) -> None:
        """Frees the place of an episode, if it has one."""
        if episode.place != NOWHERE:
            self.free.append(episode.place)
            episode.place = NOWHERE

    def exchange(self, live: Sequence[Episode], *, beginning: int) -> None:
        """Takes slow episodes from places that others need, and brings others back.

        Args:
          live: episodes under way.
          beginning: episodes that have not begun.
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
        """Number of the replica that has its place."""
        return episode.place * self._device.shares // self._device.places

    def slots(self, episodes: Iterable[Episode]) -> list[tuple[int, Episode]]:
        """The first that one call takes, each with its number in the call's arrays."""
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
        """i32[A]: the places of episodes, by their slots."""
        place = np.full(self._device.arriving, self._device.places, np.int32)
        for slot, episode in slots:
            place[slot] = episode.place
        return place


def _parked(rows: Episodes, slot: int) -> Episodes:
    """One of the rows of `Device.take`, without columns of the cache that it lacks."""
    columns = int(rows.length[slot])
    row = jax.tree.map(
        lambda leaf: np.array(leaf[slot]), dataclasses.replace(rows, caches=())
    )
    caches = jax.tree.map(lambda leaf: np.array(leaf[slot, :, :columns]), rows.caches)
    return dataclasses.replace(row, caches=caches)


def _together(episodes: Sequence[tuple[int, Episodes]], *, size: int) -> Episodes:
    """The rows of `Device.put`: parked episodes, each with its slot.

    Args:
      episodes: at least one.
      size: A, slots; those of no episode have no meaning.
    """
    columns = episodes[0][1].tokens.shape[0]

    def rows(leaf: Any, *parts: Any, of_cache: bool) -> Any:
        shape = leaf.shape
        if of_cache:
            shape = (shape[0], columns, *shape[2:])
        whole = np.zeros((size, *shape), leaf.dtype)
        for (slot, _), part in zip(episodes, (leaf, *parts), strict=True):
            if of_cache:
                whole[slot, :, : part.shape[1]] = part
            else:
                whole[slot] = part
        return whole

    caches = [episode.caches for _, episode in episodes]
    others = [dataclasses.replace(episode, caches=()) for _, episode in episodes]
    return dataclasses.replace(
        jax.tree.map(lambda *parts: rows(*parts, of_cache=False), *others),
        caches=jax.tree.map(lambda *parts: rows(*parts, of_cache=True), *caches),
    )
