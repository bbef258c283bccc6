"""Episodes of the evaluated models, and how they ended."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Prompts, Request, Rollout
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices import row_sharding
from rlhf_jax.environments.finished import EARLY
from rlhf_jax.environments.programs import Sampled
from rlhf_jax.environments.sampler import EpisodeSampler
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.evaluate.options import Config
from rlhf_jax.train.rollouts.environment import OpenedEnvironment
from rlhf_jax.train.rows import ReadRows

Array = jax.Array
BY_ENVIRONMENT = "by_environment"  # the end of an episode that nothing cut


class Played:
    """Plays episodes that begin with the held-out rows."""

    def __init__(
        self,
        options: Config,
        *,
        opened: OpenedEnvironment,
        begun: ReadRows,
        start: Pretrained,
        mesh: Mesh,
    ) -> None:
        """Compiles nothing yet; `begun` are rows begun by the environment `opened`."""
        self._options, self._opened, self._begun = options, opened, begun
        self._start, self._mesh = start, mesh
        self._samplers: dict[tuple[ModelConfig, bool], EpisodeSampler] = {}

    def __call__(
        self, model: Frozen, prompts: Prompts, *, key: Array, greedy: bool
    ) -> tuple[Rollout, Scores]:
        """Plays an episode from every row of prompts, made by `programs.prompts_of`.

        Raises:
          StopError: the environment failed, with --on-failure stop.
        """
        shape = frozen.shape_of(model, policy=self._start.model)
        if (shape, greedy) not in self._samplers:
            self._samplers[shape, greedy] = self._opened.sampler(
                Sampled(shape, self._start.stop_ids, self._options.temperature),
                begun=self._begun,
                rows=len(prompts.index),
                home=self._mesh,
                greedy=greedy,
            )
        sampler = self._samplers[shape, greedy]
        mine = row_sharding.own_rows(prompts, mesh=self._mesh)
        rollout, scores = sampler(frozen.read(model), Request(mine, key))
        sampler.programs.free()  # one cache at a time
        return rollout, scores


def ends(scores: Scores) -> Sequence[str]:
    """Returns how each episode ended: `BY_ENVIRONMENT`, or one of `EARLY`."""
    names = np.full(len(scores.total), BY_ENVIRONMENT, object)
    for name in EARLY:
        names[np.asarray(scores.parts[name], bool)] = name
    return names.tolist()
