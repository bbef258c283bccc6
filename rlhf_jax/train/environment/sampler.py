"""Episodes as a sampler of a run: a rollout with its scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.devices import row_sharding
from rlhf_jax.environments.episodes import Limits, Play
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.environment.programs import EpisodePrograms

Array = jax.Array
Params = Any


class Drawn(NamedTuple):
    """Episodes and what they were worth."""

    rollout: Rollout
    scores: Scores


class EpisodeSampler:
    """Draws an episode from every row of prompts."""

    def __init__(
        self,
        programs: EpisodePrograms,
        *,
        pool: EnvironmentPool,
        encoder: TurnEncoder,
        decode: Callable[[list[int]], str],
        limits: Limits,
    ) -> None:
        """Draws nothing yet.

        Args:
          programs: whose columns hold a prompt and `limits.tokens`.
          pool: that answers turns.
          encoder: of observations.
          decode: token ids -> text of a turn, for the environment.
          limits: of an episode.
        """
        self.programs = programs
        self._pool, self._encoder, self._decode = pool, encoder, decode
        self._limits = limits

    def __call__(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        states: Sequence[bytes],
        key: Array,
        version: Array | None = None,
    ) -> Drawn:
        """An episode from every row of prompts.

        Args:
          policy: the policy's parameters, or its adapters.
          prompts: Prompts[B, P], of several processes all rows or this one's, b.
          states: of the environment, by `prompts.index`.
          key: of this step; the sampler takes the first of the two keys split from it.
          version: i32[], of the policy; None stamps no token.

        Returns:
          Rollout[b, P + R] and Scores[b] of NumPy arrays, of this process's rows.

        Raises:
          StopError: the environment failed, and the pool is to stop then.
        """
        mine = row_sharding.local_rows(prompts)
        keys = self.programs.row_keys(key, index=mine.index, sample=mine.sample)
        with self.programs.holding(policy, key=key):
            ended = Play(
                device=self.programs,
                prompts=mine,
                states=states,
                keys=keys,
                pool=self._pool,
                encoder=self._encoder,
                decode=self._decode,
                stop_ids=self.programs.stop_ids,
                limits=self._limits,
            ).run()
        rollout = ended.rollout
        if version is not None:
            stamped = np.where(rollout.response_mask, int(version), 0)
            rollout = dataclasses.replace(rollout, version=stamped.astype(np.int32))
        return Drawn(rollout, ended.scores())

    def free(self) -> None:
        """Lets the cache go, until the next call."""
        self.programs.free()
