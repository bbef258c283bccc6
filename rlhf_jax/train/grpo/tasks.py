"""What a run's responses are drawn for: questions with a verifier, or episodes."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.receipts import Receipts, items
from rlhf_jax.data.text import Written
from rlhf_jax.devices import processes, row_sharding
from rlhf_jax.models.generation.sampling import Shaping
from rlhf_jax.train.environment.opened import EpisodeDraw, OpenedEnvironment
from rlhf_jax.train.grpo.options import VerifiedConfig
from rlhf_jax.train.grpo.programs import Programs, accuracy
from rlhf_jax.train.grpo.questions import read_questions
from rlhf_jax.train.grpo.verifier import make_verifier
from rlhf_jax.train.rollouts.queue import Draw
from rlhf_jax.verification.pool import PooledReward, VerifierPool

Array = jax.Array
Params = Any


class Task(Protocol):
    """Rows to train on, and how a batch of them becomes a rollout."""

    measured: str
    """What `measure` returns, for the summary."""

    @property
    def rows(self) -> list[Row]:
        """To train on, as they were read."""
        ...

    @property
    def prompts(self) -> Sequence[Tokens]:
        """Of the rows."""
        ...

    @property
    def asked(self) -> Sequence[Written]:
        """The prompts as they were written."""
        ...

    @property
    def held_out(self) -> Any:
        """What is measured on, as JSON holds it."""
        ...

    @property
    def reward(self) -> PooledReward | None:
        """Of rollouts that are drawn without scores."""
        ...

    def draw(self, programs: Programs) -> Draw:
        """What draws a rollout, with its scores where they come with it."""
        ...

    def draw_ahead(self, programs: Programs) -> Draw:
        """The same for a queue, always with scores."""
        ...

    def measure(self, policy: Params, *, programs: Programs) -> float:
        """On the held-out rows, greedily."""
        ...


class QuestionTask:
    """One response to each question, and a verifier."""

    measured = "accuracy"

    def __init__(
        self,
        options: VerifiedConfig,
        *,
        start: Pretrained,
        stack: contextlib.ExitStack,
        receipts: Receipts | None = None,
    ) -> None:
        """Reads the questions; processes start with the first response.

        Args:
          start: whose tokenizer encodes and decodes.
          stack: that ends the processes.
          receipts: are told of both sources.

        Raises:
          InputError: as `read_questions` and `make_verifier`.
        """
        verifier = make_verifier(options)
        receipts = Receipts() if receipts is None else receipts
        data = receipts.source("--data", options.data)
        held_out = receipts.source("--held-out", options.held_out)
        (self.rows, self.prompts), self.held_out = (
            read_questions(
                each.source,
                verifier=verifier,
                start=start,
                options=options,
                receipt=each,
            )
            for each in (data, held_out)
        )
        self.asked = [row["asked"] for row in self.rows]
        count = options.eval_rows
        data.use("training", items.of_prompts(self.prompts))
        held_out.keep(count, reason=f"after the first {count} (--eval-rows)")
        held_out.use("held out", items.of_prompts(self.held_out[1][:count]))
        self._pool = stack.enter_context(
            VerifierPool(
                verifier,
                num_workers=options.num_workers,
                timeout=options.timeout,
                on_failure=options.on_failure,
            )
        )
        self.reward: PooledReward | None = self._pool.reward(
            decode=start.decode, rows=self.rows, asked=self.asked
        )
        self._start, self._options = start._replace(params=None), options

    def draw(self, programs: Programs) -> Draw:
        """What draws rollouts, which are to be verified."""

        def sampled(policy: Params, **of_step: Any) -> tuple[Rollout, None]:
            return programs.sample(policy, **of_step), None

        return sampled

    def draw_ahead(self, programs: Programs) -> Draw:
        """What draws rollouts that are verified while the next one is drawn."""
        assert self.reward is not None
        return functools.partial(programs.draw, reward=self.reward)

    def measure(self, policy: Params, *, programs: Programs) -> float:
        """Share of the held-out questions whose greedy response is right."""
        return accuracy(
            policy,
            self.held_out,
            programs=programs,
            pool=self._pool,
            start=self._start,
            options=self._options,
        )


class EpisodeTask:
    """Episodes of several turns in an environment."""

    measured = "held_out_score"
    reward: PooledReward | None = None

    def __init__(
        self,
        options: VerifiedConfig,
        *,
        start: Pretrained,
        algorithm: PolicyGradient,
        mesh: Mesh,
        stack: contextlib.ExitStack,
        receipts: Receipts | None = None,
    ) -> None:
        """Has the environment begin with every row.

        Args:
          start: whose tokenizer encodes and decodes.
          algorithm: static.
          mesh: of the policy.
          stack: that ends the processes.
          receipts: are told of both sources.

        Raises:
          InputError: the environment cannot begin with a row, or no prompt fits.
        """
        opened = OpenedEnvironment(
            options,
            max_new_tokens=options.max_new_tokens,
            start=start,
            mesh=options.placement.sampler.mesh_beside(mesh),
            stack=stack,
        )
        room, more = options.room(
            start.room(max_new_tokens=options.max_new_tokens),
            max_new_tokens=options.max_new_tokens,
        )
        receipts = Receipts() if receipts is None else receipts
        data = receipts.source("--data", options.data)
        held_out = receipts.source("--held-out", options.held_out)
        self._begun, self._held_out = (
            opened.read(
                each.source,
                room=room,
                more=more,
                overlong=options.overlong,
                receipt=each,
            )
            for each in (data, held_out)
        )
        count = min(len(self._held_out.rows), options.eval_rows)
        self._held_out = self._held_out.first(count)
        data.use("training", items.of_prompts(self._begun.prompts))
        held_out.keep(count, reason=f"after the first {count} (--eval-rows)")
        held_out.use("held out", items.of_prompts(self._held_out.prompts))
        self._pad_id, self._mesh = start.pad_id, mesh
        self._share = row_sharding.row_share(mesh)
        blocks = self._share.count  # of rows, which divide every batch
        self._size = min(options.batch_size, -(-count // blocks) * blocks)
        self._draw = EpisodeDraw(
            opened.sampler(algorithm, begun=self._begun, rows=options.batch_size),
            begun=self._begun,
            mesh=mesh,
        )
        self._greedy = opened.sampler(
            algorithm,
            begun=self._held_out,
            rows=self._size,
            shaping=Shaping(greedy=True),
        )

    @property
    def rows(self) -> list[Row]:
        """To train on."""
        return self._begun.rows

    @property
    def prompts(self) -> Sequence[Tokens]:
        """As the environment began with the rows."""
        return self._begun.prompts

    @property
    def asked(self) -> Sequence[Written]:
        """The prompts as the environment wrote them."""
        return self._begun.asked

    @property
    def held_out(self) -> Any:
        """Rows and prompts."""
        return self._held_out[:2]

    def draw(self, programs: Programs) -> Draw:
        """What draws episodes, which are scored."""
        del programs
        return self._draw

    draw_ahead = draw

    def measure(self, policy: Params, *, programs: Programs) -> float:
        """Mean score of the held-out rows, with the most likely token everywhere."""
        del programs
        count = len(self._held_out.rows)
        asked = batches.prompt_batches(
            self._held_out.prompts,
            batch_size=self._size,
            seed=0,
            pad_id=self._pad_id,
            share=self._share,
        )
        drawn = [
            self._greedy(
                policy,
                prompts=asked[number],
                states=self._held_out.states,
                key=jax.random.key(0),  # greedy responses need none
            )
            for number in range(-(-count // self._size))
        ]
        self._greedy.free()  # of its cache, until the end of the run
        scores = processes.whole(
            [
                row_sharding.put_computed(each.scores.total, mesh=self._mesh)
                for each in drawn
            ]
        )
        # The last batch is filled with rows of the first ones.
        return float(np.concatenate(scores)[:count].mean())


def make_task(
    options: VerifiedConfig,
    *,
    start: Pretrained,
    algorithm: PolicyGradient,
    mesh: Mesh,
    stack: contextlib.ExitStack,
    receipts: Receipts | None = None,
) -> Task:
    """The task of a run, by its options."""
    if options.environment is None:
        return QuestionTask(options, start=start, stack=stack, receipts=receipts)
    return EpisodeTask(
        options,
        start=start,
        algorithm=algorithm,
        mesh=mesh,
        stack=stack,
        receipts=receipts,
    )
