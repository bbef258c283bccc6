"""Collects episodes that have ended into a rollout and its scores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.environments.places import Episode
from rlhf_jax.models.experts import OWN
from rlhf_jax.models.generation.episode_places import Episodes
from rlhf_jax.roles.rewards.scores import Scores

HostArray = Any
# Reasons why an episode ended before its environment was done.
EARLY = ("failed", "timed_out", "truncated", "out_of_turns", "out_of_room", "late")
TURNS = "turns"


class Finished(NamedTuple):
    """B rows of NumPy arrays, filled as episodes end."""

    rollout: Rollout
    first: int  # P, the first column after the prompts
    total: HostArray  # f32[B], reward units
    turns: HostArray  # f32[B, S], as `Scores.turns`
    turn_ends: HostArray  # bool[B, S], as `Scores.turn_ends`
    # f32[B] each: 1 or 0 for names of EARLY; the number of TURNS; the counts
    parts: dict[str, HostArray]

    def keep(
        self,
        episode: Episode,
        episodes: Episodes,
        place: Any,
        *,
        experts: HostArray | None,
    ) -> None:
        """Writes an episode into its row.

        Args:
          episodes: the episodes of all places, or a single parked one.
          place: index of the episode in `episodes`; () for a single one.
          experts: i32[W, L, k], recorded for its tokens; None if not recorded. The last
            token has been drawn, but not run: it has no experts.
        """
        rollout: Any = self.rollout
        row, first = episode.row, self.first
        start, size = episode.prompt, episode.turns_size
        columns, here = slice(start, start + size), slice(first, first + size)
        sampled = episodes.sampled[place][columns]
        rollout.tokens[row, here] = episodes.tokens[place][columns]
        rollout.mask[row, here] = True
        rollout.response_mask[row, here] = sampled
        logprobs, entropy = episodes.logprobs[place], episodes.entropy[place]
        rollout.old_logprobs[row, here] = np.where(sampled, logprobs[columns], 0)
        rollout.entropy[row, here] = np.where(sampled, entropy[columns], 0)
        if experts is not None:
            ran = min(start + size, int(episodes.cached[place]))
            rollout.experts[row, first - start :][:ran] = experts[:ran]
        last = int(np.flatnonzero(sampled)[-1])
        for number, reward in episode.rewards:
            self.turn_ends[row, first + number] = True
            if number < last:  # the reward of the last turn is the rest of `total`
                self.turns[row, first + number] = reward
        self.total[row] = sum(reward for _, reward in episode.rewards)
        self.parts[TURNS][row] = len(episode.rewards)

    def scores(self, *, leave_out: bool) -> Scores:
        """Returns the scores; parts are logged as `reward/NAME`.

        Args:
          leave_out: whether to leave out episodes whose environment failed. Episodes
            that never began are always left out.
        """
        left_out: Any = ~np.asarray(self.rollout.response_mask).any(axis=1)
        if leave_out:
            failed = self.parts["failed"] + self.parts["timed_out"]
            left_out = left_out | (failed > 0)
        return Scores(
            total=self.total,
            parts=self.parts,
            turns=self.turns,
            turn_ends=self.turn_ends,
            left_out=left_out,
        )


def none(
    prompts: Prompts,
    *,
    size: int,
    counts: Sequence[str] = (),
    record: tuple[int, int] | None = None,
) -> Finished:
    """Makes rows with prompts only, to be filled by `Finished.keep`.

    Args:
      prompts: Prompts[B, P], of NumPy arrays.
      size: R, columns after the prompts.
      counts: names of the environment's counts.
      record: L and k, layers and experts of a token to record; None records none.
    """
    rows, columns = prompts.tokens.shape
    room = ((0, 0), (0, size))
    shape = (rows, columns + size)
    arrays: dict[str, HostArray] = {
        "tokens": np.pad(np.where(prompts.mask, prompts.tokens, 0), room),
        "mask": np.pad(prompts.mask, room),
        "response_mask": np.zeros(shape, bool),
        "old_logprobs": np.zeros(shape, np.float32),
        "entropy": np.zeros(shape, np.float32),
        "index": np.asarray(prompts.index),
        "sample": np.asarray(prompts.sample),
    }
    if record is not None:
        arrays["experts"] = np.full((*shape, *record), OWN, np.int32)
    return Finished(
        Rollout(**arrays),
        first=columns,
        total=np.zeros(rows, np.float32),
        turns=np.zeros(shape, np.float32),
        turn_ends=np.zeros(shape, bool),
        parts={name: np.zeros(rows, np.float32) for name in (*EARLY, TURNS, *counts)},
    )
