"""An environment in its processes, as a run has it: rows that begin, and a sampler."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from jax.sharding import Mesh

from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.lengths import Overlong
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.environments.episodes import Limits
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.generation.sampling import Shaping
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.train.config.rewards import Workers
from rlhf_jax.train.config.sampler import Episodes
from rlhf_jax.train.environment.named import make_environment
from rlhf_jax.train.environment.programs import EpisodePrograms, Sampled
from rlhf_jax.train.environment.rows import BegunRows, read_begun
from rlhf_jax.train.environment.sampler import EpisodeSampler


class OpenedEnvironment:
    """The environment of --environment, which answers until the run ends."""

    def __init__(
        self,
        options: Episodes,
        *,
        pool: Workers,
        chat: bool,
        max_new_tokens: int,
        start: Pretrained,
        mesh: Mesh | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """Processes start with the first row.

        Args:
          options: of --environment.
          pool: options of the processes that run it.
          chat: its texts are messages of the user, by the tokenizer's chat template.
          max_new_tokens: the room of an episode.
          start: whose tokenizer encodes and decodes; its params are not kept.
          mesh: of the sampler, whose devices along `tensor` draw episodes together;
            None is one device. Processes have each their own rows of a batch, and ask
            an environment of their own.
          stack: that ends the processes.

        Raises:
          InputError: there is no such environment, or a turn has no room.
        """
        turn_tokens = options.max_turn_tokens
        if turn_tokens is not None and turn_tokens > max_new_tokens:
            raise InputError(
                f"--environment: expected max_turn_tokens of at most the "
                f"{max_new_tokens} tokens of --max-new-tokens, the room of a whole "
                f"episode, got {turn_tokens}; lower it, or raise --max-new-tokens"
            )
        self._pool = stack.enter_context(
            EnvironmentPool(
                make_environment(options.name),
                num_workers=pool.num_workers,
                timeout=pool.timeout,
                on_failure=pool.on_failure,
            )
        )
        self._name = options.name
        self._encoder = TurnEncoder(start.tokenizer, stop_ids=start.stop_ids, chat=chat)
        self._decode = start._replace(params=None).decode
        self._limits = Limits(
            tokens=max_new_tokens,
            turn_tokens=max_new_tokens if turn_tokens is None else turn_tokens,
            turns=options.max_turns,
            seconds=options.seconds,
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
        recipe: PolicyGradient | Sampled,
        *,
        begun: BegunRows,
        rows: int,
        home: Mesh,
        states: Sequence[bytes] | None = None,
        base: Frozen | None = None,
        greedy: bool | None = None,
    ) -> EpisodeSampler:
        """What draws episodes that begin with these rows.

        Args:
          recipe: static.
          begun: of `read`.
          rows: of a batch.
          home: where rollouts are wanted.
          states: by `Prompts.index`; None are those of `begun`.
          base: the parameters that adapters adapt.
          greedy: the likeliest tokens, for evaluation only; False draws for one. It
            waits for all episodes, as its figures would depend on the clock. None
            trains.
        """
        limits = self._limits
        if greedy is not None:
            limits = limits._replace(seconds=None)
        programs = EpisodePrograms(
            recipe,
            columns=max(map(len, begun.prompts)) + limits.tokens,
            places=min(recipe.continuous_batching or rows, rows),
            chunk=self._chunk,
            mesh=self._mesh,
            base=base,
            shaping=Shaping(greedy=True) if greedy else None,
        )
        return EpisodeSampler(
            programs,
            pool=self._pool,
            encoder=self._encoder,
            decode=self._decode,
            limits=limits,
            states=begun.states if states is None else states,
            home=home,
        )
