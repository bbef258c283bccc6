"""An environment in its processes, as a run has it: rows that begin, and a sampler."""

from __future__ import annotations

import contextlib
from typing import Any

import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.lengths import Overlong
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.devices import processes, row_sharding
from rlhf_jax.environments.episodes import Limits
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.functional.checks import StopError
from rlhf_jax.models.generation.sampling import Shaping
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.environment.options import EnvironmentConfig, make_environment
from rlhf_jax.train.environment.programs import EpisodePrograms, EpisodeRecipe
from rlhf_jax.train.environment.rows import BegunRows, read_begun
from rlhf_jax.train.environment.sampler import EpisodeSampler

Array = jax.Array
Params = Any


class OpenedEnvironment:
    """The environment of --environment, which answers until the run ends."""

    def __init__(
        self,
        options: EnvironmentConfig,
        *,
        max_new_tokens: int,
        start: Pretrained,
        mesh: Mesh | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """Processes start with the first row.

        Args:
          options: with an environment.
          max_new_tokens: the room of an episode.
          start: whose tokenizer encodes and decodes; its params are not kept.
          mesh: of the sampler, whose devices along `tensor` draw episodes together;
            None is one device. Processes have each their own rows of a batch, and ask
            an environment of their own.
          stack: that ends the processes.

        Raises:
          InputError: there is no such environment.
        """
        assert options.environment is not None
        self._pool = stack.enter_context(
            EnvironmentPool(
                make_environment(options.environment),
                num_workers=options.num_workers,
                timeout=options.timeout,
                on_failure=options.on_failure,
            )
        )
        self._name = options.environment
        self._encoder = TurnEncoder(
            start.tokenizer, stop_ids=start.stop_ids, chat=options.chat
        )
        self._decode = start._replace(params=None).decode
        self._limits = Limits(
            tokens=max_new_tokens,
            turn_tokens=options.max_turn_tokens or max_new_tokens,
            turns=options.max_turns,
            seconds=options.episodes_timeout,
        )
        self._chunk, self._mesh = options.observation_chunk, mesh

    def read(
        self,
        source: str,
        *,
        room: int,
        more: str,
        overlong: Overlong,
        receipt: Receipt | None = None,
    ) -> BegunRows:
        """The rows of a file, as the environment begins with them.

        Args:
          source, room, more, overlong, receipt: those of `read_begun`.

        Raises:
          InputError: the environment cannot begin with a row, or no prompt fits.
        """
        if receipt is not None:
            receipt.gives(f"--environment {self._name}")
        return read_begun(
            source,
            pool=self._pool,
            encoder=self._encoder,
            room=room,
            more=more,
            overlong=overlong,
            receipt=receipt,
        )

    def sampler(
        self,
        recipe: EpisodeRecipe,
        *,
        begun: BegunRows,
        rows: int,
        base: Frozen | None = None,
        shaping: Shaping | None = None,
    ) -> EpisodeSampler:
        """What draws episodes that begin with these rows.

        Args:
          recipe: static.
          begun: of `read`.
          rows: of a batch.
          base: the parameters that adapters adapt.
          shaping: for evaluation only, which waits for all episodes, as its figures
            would depend on the clock.
        """
        limits = self._limits
        if shaping is not None:
            limits = limits._replace(seconds=None)
        programs = EpisodePrograms(
            recipe,
            columns=max(map(len, begun.prompts)) + limits.tokens,
            places=min(recipe.continuous_batching or rows, rows),
            chunk=self._chunk,
            mesh=self._mesh,
            base=base,
            shaping=shaping,
        )
        return EpisodeSampler(
            programs,
            pool=self._pool,
            encoder=self._encoder,
            decode=self._decode,
            limits=limits,
        )


def require_some(scores: Scores, *, environment: str) -> None:
    """Stops a run of whose first batch no response was answered.

    Args:
      scores: of the first batch of episodes.
      environment: of --environment, for the message.

    Raises:
      StopError: the environment failed in every episode.
    """
    failed = processes.whole(scores.parts["failed"])
    failed = failed + processes.whole(scores.parts["timed_out"])
    if failed.all():
        raise StopError(
            f"--environment {environment}: expected an answer to some response of the "
            f"first batch, got none for {failed.size} of {failed.size} (the warning "
            f"above says why); mend its step(state, response)"
        )


class EpisodeDraw:
    """A draw of a run, or of its queue: episodes with their scores."""

    def __init__(
        self, sampler: EpisodeSampler, *, begun: BegunRows, mesh: Mesh
    ) -> None:
        """Draws nothing yet.

        Args:
          sampler: of the environment.
          begun: rows, which `Prompts.index` points into.
          mesh: where rollouts are wanted.
        """
        self._sampler, self._states, self._mesh = sampler, begun.states, mesh

    def __call__(
        self, policy: Params, *, prompts: Prompts, key: Array, version: Array
    ) -> tuple[Rollout, Scores]:
        """An episode from every row of prompts, as `rollouts.queue.Draw` has it."""
        drawn = self._sampler(
            policy, prompts=prompts, states=self._states, key=key, version=version
        )
        return row_sharding.put_computed(drawn, mesh=self._mesh)
