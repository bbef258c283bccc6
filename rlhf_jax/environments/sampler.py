"""The sampler of episodes, which plays one from every row of prompts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Request, Rollout
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.devices import row_sharding
from rlhf_jax.environments.episodes import Limits, Play
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.environments.programs import EpisodePrograms
from rlhf_jax.roles.rewards.scores import Scores

Params = Any


class EndedEpisodes(NamedTuple):
    """Episodes and their scores."""

    rollout: Rollout
    scores: Scores


@dataclasses.dataclass(frozen=True)
class EpisodeSampler:
    """Draws an episode from every row of prompts."""

    programs: EpisodePrograms  # with columns for a prompt and `limits.tokens`
    _: dataclasses.KW_ONLY
    pool: EnvironmentPool
    encoder: TurnEncoder
    decode: Callable[[list[int]], str]  # decodes a turn for the environment
    limits: Limits
    states: Sequence[bytes]  # pickled starts of episodes, by `Prompts.index`
    home: Mesh | None = None  # of rollouts; None: this process's rows, on the host

    def __call__(self, policy: Params, request: Request) -> EndedEpisodes:
        """Draws an episode from every row of prompts.

        Args:
          request: Prompts[B, P], of which one of several processes may pass only its
            own rows; the first of the two keys split from the key is taken.

        Returns:
          Rollout[B, P + R] and Scores[B].

        Raises:
          StopError: the environment failed, with --on-failure stop.
        """
        mine = row_sharding.local_rows(request.prompts)
        key, version = request.key, request.version
        keys = self.programs.row_keys(key, index=mine.index, sample=mine.sample)
        with self.programs.holding(policy, key=key):
            ended = Play(self, prompts=mine, keys=keys).run()
        rollout = ended.rollout
        if version is not None:
            stamped = np.where(rollout.response_mask, int(version), 0)
            rollout = dataclasses.replace(rollout, version=stamped.astype(np.int32))
        leave_out = self.pool.on_failure == "leave_out"
        drawn = EndedEpisodes(rollout, ended.scores(leave_out=leave_out))
        if self.home is None:
            return drawn
        home, mine = self.home, row_sharding.unshared(drawn, mesh=self.home)
        return row_sharding.put_computed(lambda: mine, mesh=home)
