"""The protocol by which the host's loop drives the device in a rollout of episodes."""

from __future__ import annotations

from typing import Any, Protocol

from rlhf_jax.models.generation.episode_places import Arrivals, Episodes

HostArray = Any


class Device(Protocol):
    """The compiled programs of the policy and the places (cache rows) of episodes."""

    @property
    def places(self) -> int:
        """C, the number of places."""
        ...

    @property
    def shares(self) -> int:
        """D, replicas of the policy; each has C / D consecutive places."""
        ...

    @property
    def arriving(self) -> int:
        """A, places that read in one call, A / D of each share."""
        ...

    @property
    def chunk(self) -> int:
        """N, columns that a place reads in one call."""
        ...

    @property
    def record(self) -> tuple[int, int] | None:
        """L and k, layers and experts of a token to record; None records none."""
        ...

    def read(self, arrivals: Arrivals) -> None:
        """Runs prompts and observations, and draws the first token of turns.

        Args:
          arrivals: NumPy arrays, share by share; keys are key data, u32[A, ...].
        """
        ...

    def copy(self, *, source: HostArray, place: HostArray, keys: HostArray) -> None:
        """Copies the prompts that A places have read to other places of their shares.

        Args:
          source: i32[A], places that have read the prompt, share by share.
          place: i32[A], places that get the copy; C is none.
          keys: u32[A, ...], key data of the rows that get the copy.
        """
        ...

    def take(self, *, place: HostArray) -> Episodes:
        """Copies A places to the host, with their caches.

        Args:
          place: i32[A], share by share; C is none.

        Returns:
          Episodes[A] of NumPy arrays; keys are key data, u32[A, ...].
        """
        ...

    def put(self, rows: Episodes, *, place: HostArray) -> None:
        """Writes rows that `take` returned to A places of any share.

        Args:
          rows: Episodes[A], from `take`, share by share.
          place: i32[A], the places; C is none.
        """
        ...

    def experts(self, *, place: int) -> HostArray:
        """Copies the record of a place to the host, i32[W, L, k].

        Columns from the place's `cached` on have no meaning.
        """
        ...

    def advance(self, *, until: HostArray, steps: int) -> Episodes:
        """Draws tokens; returns the places on the host, without caches and records.

        Args:
          until: i32[D]; returns once at most this many turns of each share are left.
          steps: the most tokens drawn in each place.
        """
        ...
