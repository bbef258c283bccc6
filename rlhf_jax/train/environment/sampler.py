"""Episodes as a sampler of a run: a rollout with its scores."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

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
    """Draws an episode from every row of prompts, as `rollouts.queue.Draw` has it."""

    def __init__(
        self,
        programs: EpisodePrograms,
        *,
        pool: EnvironmentPool,
        encoder: TurnEncoder,
        decode: Callable[[list[int]], str],
        limits: Limits,
        states: Sequence[bytes],
        home: Mesh | None = None,
    ) -> None:
        """Draws nothing yet.

        Args:
          programs: whose columns hold a prompt and `limits.tokens`.
          decode: token ids -> text of a turn, for the environment.
          states: of the environment as episodes begin, by `Prompts.index`.
          home: where rollouts are wanted; None is the host, this process's rows.
        """
        self.programs, self._states, self._home = programs, states, home
        self._pool, self._encoder, self._decode = pool, encoder, decode
        self._limits = limits

    def __call__(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        key: Array,
        version: Array | None = None,
    ) -> Drawn:
        """An episode from every row of prompts.

        Args:
          prompts: Prompts[B, P], of several processes all rows or this one's, b.
          key: of this step; the sampler takes the first of the two keys split from it.
          version: i32[], of the policy; None stamps no token.

        Returns:
          Rollout[B, P + R] and Scores[B].

        Raises:
          StopError: the environment failed, and the pool is to stop then.
        """
        mine = row_sharding.local_rows(prompts)
        keys = self.programs.row_keys(key, index=mine.index, sample=mine.sample)
        with self.programs.holding(policy, key=key):
            ended = Play(
                device=self.programs,
                prompts=mine,
                states=self._states,
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
        leave_out = self._pool.on_failure == "leave_out"
        drawn = Drawn(rollout, ended.scores(leave_out=leave_out))
        if self._home is None:
            return drawn
        return row_sharding.put_computed(drawn, mesh=self._home)

    def free(self) -> None:
        """Lets the cache go, until the next call."""
        self.programs.free()
