"""The device's part of a rollout of episodes, as the host's loop calls it."""

from __future__ import annotations

from typing import Any, Protocol

from rlhf_jax.models.generation.episode_places import Arrivals, Episodes

HostArray = Any


class Device(Protocol):
    """What runs the policy: compiled programs and the places that they keep."""

    @property
    def places(self) -> int:
        """C."""
        ...

    @property
    def shares(self) -> int:
        """D, replicas of the policy, each with C / D places that follow each other."""
        ...

    @property
    def arriving(self) -> int:
        """A, places that read at a time, A / D of each share."""
        ...

    @property
    def chunk(self) -> int:
        """N, columns that they read at a time."""
        ...

    def read(self, arrivals: Arrivals) -> None:
        """Runs prompts and observations, and draws the first token of turns.

        Args:
          arrivals: of NumPy arrays, share by share; its keys are their data,
            u32[A, ...].
        """
        ...

    def copy(self, *, source: HostArray, place: HostArray, keys: HostArray) -> None:
        """Copies what A places have read of a prompt to others of the same share.

        Args:
          source: i32[A], places that have read it, share by share.
          place: i32[A], places that get it; C is none.
          keys: u32[A, ...], data of the keys of the rows that get it.
        """
        ...

    def take(self, *, place: HostArray) -> Episodes:
        """Copies of A places on the host, with their caches.

        Args:
          place: i32[A], share by share; C is none.

        Returns:
          Episodes[A], of NumPy arrays; its keys are their data, u32[A, ...].
        """
        ...

    def put(self, rows: Episodes, *, place: HostArray) -> None:
        """Writes what was taken to A places, of the same share or another.

        Args:
          rows: Episodes[A], as `take` returns it, share by share.
          place: i32[A], the places; C is none.
        """
        ...

    def advance(self, *, until: HostArray, steps: int) -> Episodes:
        """Draws on; returns the places on the host, without their caches.

        Args:
          until: i32[D], turns of each share that may still go on when it returns.
          steps: tokens that it draws at most, in each place.
        """
        ...
