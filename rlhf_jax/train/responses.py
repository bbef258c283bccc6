"""What the policy responds to, and who draws: prompts of a file, or episodes.

rows of a file ──read──> rows, tokens ──batches──> draw ──> rollout, early scores
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import encoding, files, json_lines
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.json_lines import Row, place
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import Question, Written, messages, read_question
from rlhf_jax.data.text.question import PLACE
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.train.build import Meshes
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.prompts import AskedPrompts
from rlhf_jax.train.config.rewards import Environment
from rlhf_jax.train.environment.opened import OpenedEnvironment
from rlhf_jax.train.environment.rows import BegunRows
from rlhf_jax.train.environment.sampler import EpisodeSampler
from rlhf_jax.train.rewards import Early, RewardPools

Array = jax.Array
Params = Any
# A rollout, and what processes or an environment computed of its scores, or will.
Drawn = tuple[Rollout, Early | Callable[[], Early]]


class Data(NamedTuple):
    """Rows that the policy responds to; entry n of each list is of row n."""

    rows: list[Row]
    tokens: Sequence[Tokens]  # of the prompts
    written_prompts: Sequence[Written]  # the prompts as they were written
    begun: BegunRows | None = None  # by an environment

    def first(self, count: int) -> Data:
        """The first rows of these."""
        return Data(
            self.rows[:count],
            self.tokens[:count],
            self.written_prompts[:count],
            None if self.begun is None else self.begun.first(count),
        )


class Responder:
    """Reads rows as the model is asked them, in an environment or alone."""

    def __init__(
        self,
        config: PolicyGradientConfig,
        *,
        start: Pretrained,
        meshes: Meshes,
        context: int,
        stack: contextlib.ExitStack,
    ) -> None:
        """Processes of an environment start with the first row.

        Args:
          start: whose tokenizer encodes and decodes; its params are not kept.
          context: tokens that every model reads at once.
          stack: that ends the processes.

        Raises:
          InputError: there is no such environment, or no room for a prompt.
        """
        self._config, self._start = config, start._replace(params=None)
        self._mesh = meshes.policy
        self._opened = None
        if config.sampler.environment is not None:
            self._opened = OpenedEnvironment(
                config.sampler.environment,
                pool=config.rewards,
                chat=config.data.chat,
                max_new_tokens=config.batch.max_new_tokens,
                start=start,
                mesh=config.placement.sampler.mesh_beside(meshes.policy),
                stack=stack,
            )
        self.room, self._more = config.batch.room(
            start.room(max_new_tokens=config.batch.max_new_tokens, context=context)
        )
        widest = max(config.data.buckets or (0,))
        if widest > self.room:
            raise InputError(
                f"--buckets: expected at most {self.room} tokens, the context of "
                f"{context} less --max-new-tokens, got {widest}; lower either"
            )

    def read(self, source: str, *, pools: RewardPools, receipt: Receipt) -> Data:
        """The rows of a file that leave room for a response.

        Args:
          pools: whose rewards read fields of the rows.
          receipt: is told of every row, of the fields that are read, and of rows that
            are left out.

        Raises:
          InputError: a verifier cannot read the right answer of a row, a row has no
            prompt, or no prompt fits; names file and line.
        """
        config, options = self._config, self._config.data
        pools.check_answers(lambda: json_lines.read_located(source))
        if self._opened is not None:
            begun = self._opened.read(
                source,
                room=self.room,
                more=self._more,
                overlong=options.overlong,
                receipt=receipt,
            )
            pools.tell(receipt)
            return Data(begun.rows, begun.prompts, begun.written_prompts, begun)
        field = options.prompt_field
        rows = files.read_prompts(source, field=field, receipt=receipt)
        pools.tell(receipt)
        for spec in [config.watch.judge] if config.watch.judge else []:
            receipt.gives(f"--judge {spec}")
        if options.chat:  # texts are put as messages
            receipt.reads(*messages.OF_TEMPLATE)
        questions = [
            question(row, options=options, where=place(row, number))
            for number, row in enumerate(rows)
        ]
        written = {id(row): put(row[field], options=options) for row in rows}
        rows, tokens = encoding.encode_prompts(
            self._start.tokenizer,
            rows,
            max_length=self.room,
            more=self._more,
            field=field,
            questions=questions,
            stop_ids=self._start.stop_ids,
            overlong=options.overlong,
            widest=None if options.buckets is None else max(options.buckets, default=0),
            receipt=receipt,
        )
        return Data(rows, tokens, [written[id(row)] for row in rows])

    def episodes(
        self,
        data: Data,
        recipe: PolicyGradient,
        *,
        rows: int,
        base: Frozen | None,
        greedy: bool | None = None,
    ) -> EpisodeSampler | None:
        """What draws episodes that begin with these rows; None draws responses.

        Args:
          recipe: static.
          rows: of a batch.
          base: the parameters that adapters adapt.
          greedy: for evaluation, which waits for all episodes; None trains.
        """
        if self._opened is None:
            return None
        assert data.begun is not None  # of `read`
        return self._opened.sampler(
            recipe,
            begun=data.begun,
            rows=rows,
            home=self._mesh,
            base=base,
            greedy=greedy,
        )


def environment_reward(config: PolicyGradientConfig) -> str | None:
    """The name of the reward that an environment gives, if the run reads it."""
    names = [
        source.name
        for source in config.sources
        if isinstance(source.source, Environment)
    ]
    return names[0] if names else None


def put(written: Written, *, options: AskedPrompts) -> Written:
    """What the model is asked; of a conversation the last message is the prompt."""
    if not isinstance(written, str):
        *before, last = written
        text = options.template.replace(PLACE, last["content"])
        return [*before, last | {"content": text}]
    text = options.template.replace(PLACE, written)
    return [{"role": "user", "content": text}] if options.chat else text


def question(row: Row, *, options: AskedPrompts, where: str) -> Question:
    """How a row's prompt is read: what of what is asked is its text."""
    prompt = read_question(
        row, field=options.prompt_field, where=where, chat=options.chat
    )
    if isinstance(prompt.written, str) and not options.chat:
        return prompt._replace(template=options.template)
    return prompt._replace(written=put(prompt.written, options=options))
