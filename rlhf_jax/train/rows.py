"""The rows of a file that a model responds to, as prompts or as starts of episodes.

rows of a file ──read──> rows, tokens ──batches──> draw ──> rollout, early scores
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches, encoding, files, json_lines
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.json_lines import Row, place
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import Question, Written, messages, read_question
from rlhf_jax.data.text.messages import PLACE
from rlhf_jax.functional import checks
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.train.build import Meshes
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.prompts import AskedPrompts
from rlhf_jax.train.rewards import RewardPools

if TYPE_CHECKING:
    from rlhf_jax.algorithms.flow.teacher import TeacherPrompts
    from rlhf_jax.data.turns import TurnEncoder
    from rlhf_jax.environments.pool import EnvironmentPool
    from rlhf_jax.environments.sampler import EpisodeSampler
    from rlhf_jax.train.rollouts.environment import OpenedEnvironment


class ReadRows(NamedTuple):
    """All rows of a file, and tokens of the prompts that leave room for a response."""

    rows: list[Row]
    written_prompts: list[Written]  # one per row: the prompt as text or messages
    tokens: dict[int, Tokens]  # {row number: prompt}, of prompts that leave room
    states: list[bytes] | None = None  # one per row: pickled starts of episodes
    # One per row: a teacher's prompt; None: the teacher reads the policy's prompts.
    of_teacher: list[Tokens] | None = None

    @property
    def prompts(self) -> list[Tokens]:
        """The prompts that leave room for a response."""
        return list(self.tokens.values())

    def teacher_prompts(self, *, pad_id: int) -> TeacherPrompts | None:
        """Returns the teacher's prompts, padded; None if it reads the policy's."""
        if self.of_teacher is None:
            return None
        # Only runs that distil need it.
        from rlhf_jax.algorithms.flow.teacher import TeacherPrompts

        width = max(map(len, self.of_teacher))
        return TeacherPrompts(
            *batches.pad(self.of_teacher, width=width, pad_id=pad_id, left=True)
        )

    def fitting(self, count: int | None = None) -> ReadRows:
        """Returns the first `count` rows that leave room, numbered from 0; or all."""
        numbers = list(self.tokens)[:count]

        def of(column: list[Any]) -> list[Any]:
            return [column[number] for number in numbers]

        return ReadRows(
            of(self.rows),
            of(self.written_prompts),
            dict(enumerate(self.prompts[:count])),
            None if self.states is None else of(self.states),
            None if self.of_teacher is None else of(self.of_teacher),
        )


class Responder:
    """Reads rows as prompts, or as starts of episodes in an environment."""

    def __init__(
        self,
        config: PolicyGradientConfig,
        *,
        start: Pretrained,
        meshes: Meshes,
        context: int,
        stack: contextlib.ExitStack,
    ) -> None:
        """Opens the environment, if there is one.

        Its processes start with the first row and end with `stack`.

        Args:
          context: length of the shortest context among all models, tokens.
        """
        self._config, self._start = config, start._replace(params=None)
        self._mesh = meshes.policy
        self._opened = None
        if config.sampler.environment is not None:
            # Imported here because other runs need no environment.
            from rlhf_jax.train.rollouts.environment import OpenedEnvironment

            self._opened = OpenedEnvironment(
                config.sampler.environment,
                pool=config.rewards,
                chat=config.data.chat,
                max_new_tokens=config.batch.max_new_tokens,
                start=start,
                mesh=config.placement.sampler.mesh_beside(meshes.policy),
                stack=stack,
            )
        self.room, more = config.batch.room(
            start.room(max_new_tokens=config.batch.max_new_tokens, context=context)
        )
        options = config.data
        self._limits = Limits(self.room, options.overlong, more=more)
        if options.buckets is not None and self._opened is None:
            widest = max(options.buckets, default=0)
            self._limits = dataclasses.replace(self._limits, widest=widest)
        checks.within(
            most=self.room,
            advice=f"the context of {context} has to hold --max-new-tokens too; lower "
            f"either",
            **{"--buckets": max(options.buckets or (0,))},
        )

    def read(self, source: str, *, pools: RewardPools, receipt: Receipt) -> ReadRows:
        """Returns the rows of a file that leave room for a response."""
        config = self._config
        return read_rows(
            source,
            opened=self._opened,
            options=config.data,
            teacher_field=config.teacher_field,
            start=self._start,
            limits=self._limits,
            pools=pools,
            judge=config.watch.judge,
            receipt=receipt,
        ).fitting()

    def episodes(
        self,
        data: ReadRows,
        recipe: PolicyGradient,
        *,
        rows: int,
        base: Frozen | None,
        greedy: bool | None = None,
    ) -> EpisodeSampler | None:
        """Calls `OpenedEnvironment.sampler`; None in a run without an environment."""
        if self._opened is None:
            return None
        return self._opened.sampler(
            recipe, begun=data, rows=rows, home=self._mesh, base=base, greedy=greedy
        )


def read_rows(
    source: str,
    *,
    opened: OpenedEnvironment | None,
    options: AskedPrompts,
    start: Pretrained,
    limits: Limits,
    pools: RewardPools,
    judge: str | None,
    teacher_field: str | None = None,
    receipt: Receipt,
) -> ReadRows:
    """Reads rows as prompts, or as starts of episodes, for the rewards and the judge.

    Args:
      opened: the environment; None reads prompts, by `read_prompts`.
      judge: the value of --judge.
    """
    if opened is not None:
        receipt.gives(f"--environment {opened.name}")
        read = read_begun(
            source,
            pool=opened.pool,
            encoder=opened.encoder,
            limits=limits,
            receipt=receipt,
        )
    else:
        read = read_prompts(
            source,
            options=options,
            teacher_field=teacher_field,
            start=start,
            limits=limits,
            receipt=receipt,
        )
    pools.check_answers(read.rows)
    pools.tell(receipt)
    if judge is not None and opened is None:
        receipt.gives(f"--judge {judge}")
    return read


def read_prompts(
    source: str,
    *,
    options: AskedPrompts,
    start: Pretrained,
    limits: Limits,
    teacher_field: str | None = None,
    receipt: Receipt,
) -> ReadRows:
    """Reads the rows of a file and encodes their prompts.

    Args:
      limits: on a prompt.
      teacher_field: field that a teacher reads; None reads the prompt.
      receipt: records every row, and the rows that are left out.
    """
    field = options.prompt_field
    rows = files.read_prompts(
        source, field=field, beside=teacher_field, receipt=receipt
    )
    if options.chat:  # texts become messages
        receipt.reads(*messages.OF_TEMPLATE)

    def encoded(asked: AskedPrompts, limits: Limits) -> tuple[list[Row], list[Tokens]]:
        return encoding.encode_prompts(
            start.contract(receipt),
            rows,
            limits=limits,
            field=asked.prompt_field,
            questions=[
                question_of(row, options=asked, where=place(row, number))
                for number, row in enumerate(rows)
            ],
        )

    fitting, tokens = encoded(options, limits)
    numbers = {id(row): number for number, row in enumerate(rows)}
    of_teacher = None
    if teacher_field is not None:
        asked = dataclasses.replace(options, prompt_field=teacher_field)
        # Of all rows: a row that the teacher cannot read is an error.
        every = dataclasses.replace(limits, overlong="error", widest=None)
        _, of_teacher = encoded(asked, every)
    return ReadRows(
        rows,
        [_put(row[field], options=options) for row in rows],
        dict(zip([numbers[id(row)] for row in fitting], tokens, strict=True)),
        of_teacher=of_teacher,
    )


def read_begun(
    source: str,
    *,
    pool: EnvironmentPool,
    encoder: TurnEncoder,
    limits: Limits,
    receipt: Receipt,
) -> ReadRows:
    """Reads the rows of a file and starts an episode of an environment from each.

    Args:
      source: JSONL, or hf:NAME:SPLIT; the environment reads the fields that it needs.
      limits, receipt: as in `read_prompts`.
    """
    located = json_lines.read_jsonl(source, receipt=receipt)
    rows, places = list[Row](located), [row.where for row in located]
    for where, row in zip(places, rows, strict=True):
        receipt.row(where, row)
    begun = pool.reset(rows)
    written = [started.prompt for started in begun]
    prompts = [
        encoder.prompt(prompt, where=where)
        for prompt, where in zip(written, places, strict=True)
    ]
    sizes = [len(tokens) for tokens in prompts]
    fitting = limits.fitting(sizes, texts=written, places=places, receipt=receipt)
    return ReadRows(
        rows,
        written,
        {number: prompts[number] for number in fitting},
        [started.state for started in begun],
    )


def _put(written: Written, *, options: AskedPrompts) -> Written:
    """Applies the template to a text, or to the last message of a conversation."""
    if not isinstance(written, str):
        *before, last = written
        text = options.template.replace(PLACE, last["content"])
        return [*before, last | {"content": text}]
    text = options.template.replace(PLACE, written)
    return [{"role": "user", "content": text}] if options.chat else text


def question_of(row: Row, *, options: AskedPrompts, where: str) -> Question:
    """Reads the prompt of a row, together with the template of the options."""
    prompt = read_question(
        row, field=options.prompt_field, where=where, chat=options.chat
    )
    if isinstance(prompt.written, str) and not options.chat:
        return prompt._replace(template=options.template)
    return prompt._replace(written=_put(prompt.written, options=options))
