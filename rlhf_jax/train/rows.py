"""The rows of a file that a model responds to: as prompts, or as episodes begin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import encoding, files, json_lines, lengths
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.json_lines import Row, place
from rlhf_jax.data.lengths import Overlong
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import Question, Written, messages, read_question
from rlhf_jax.data.text.messages import PLACE
from rlhf_jax.train.config.prompts import AskedPrompts

if TYPE_CHECKING:
    from rlhf_jax.data.turns import TurnEncoder
    from rlhf_jax.environments.pool import EnvironmentPool


class ReadRows(NamedTuple):
    """All rows of a file, and those of them that leave room for a response."""

    rows: list[Row]
    written_prompts: list[Written]  # of each row, as it was written
    tokens: dict[int, Tokens]  # of the prompts that leave room, by their row
    states: list[bytes] | None = None  # of an environment as episodes begin, pickled

    @property
    def prompts(self) -> list[Tokens]:
        """The prompts that leave room."""
        return list(self.tokens.values())

    def fitting(self, count: int | None = None) -> ReadRows:
        """The first of the rows that leave room, numbered from 0; None is all."""
        numbers = list(self.tokens)[:count]

        def of(column: list[Any]) -> list[Any]:
            return [column[number] for number in numbers]

        return ReadRows(
            of(self.rows),
            of(self.written_prompts),
            dict(enumerate(self.prompts[:count])),
            None if self.states is None else of(self.states),
        )


def read_prompts(
    source: str,
    *,
    options: AskedPrompts,
    start: Pretrained,
    room: int,
    more: str,
    widest: int | None = None,
    receipt: Receipt,
) -> ReadRows:
    """The rows of a file, as the model is asked them.

    Args:
      room: tokens that a prompt may have.
      more: how a prompt may be longer, for the errors.
      widest: tokens of the largest bucket; None is no bucket.
      receipt: is told of every row, and of those that are left out.
    """
    field = options.prompt_field
    rows = files.read_prompts(source, field=field, receipt=receipt)
    if options.chat:  # texts are put as messages
        receipt.reads(*messages.OF_TEMPLATE)
    fitting, tokens = encoding.encode_prompts(
        start.tokenizer,
        rows,
        max_length=room,
        more=more,
        field=field,
        questions=[
            _question(row, options=options, where=place(row, number))
            for number, row in enumerate(rows)
        ],
        stop_ids=start.stop_ids,
        overlong=options.overlong,
        widest=widest,
        receipt=receipt,
    )
    numbers = {id(row): number for number, row in enumerate(rows)}
    return ReadRows(
        rows,
        [_put(row[field], options=options) for row in rows],
        dict(zip([numbers[id(row)] for row in fitting], tokens, strict=True)),
    )


def read_begun(
    source: str,
    *,
    pool: EnvironmentPool,
    encoder: TurnEncoder,
    room: int,
    more: str,
    overlong: Overlong,
    receipt: Receipt,
) -> ReadRows:
    """The rows of a file as an environment begins them, once, when data is loaded.

    Args:
      source: JSONL, or hf:NAME:SPLIT; the environment reads the fields that it needs.
      room, more, receipt: as `read_prompts` takes them.
    """
    rows = [row for _, row in json_lines.read_located(source, receipt=receipt)]
    places = [place(row, number) for number, row in enumerate(rows)]
    for where, row in zip(places, rows, strict=True):
        receipt.row(where, row)
    begun = pool.reset(rows)
    written = [started.prompt for started in begun]
    prompts = [
        encoder.prompt(prompt, where=where)
        for prompt, where in zip(written, places, strict=True)
    ]
    fitting = lengths.fits(
        [len(tokens) for tokens in prompts],
        texts=written,
        places=places,
        max_length=room,
        overlong=overlong,
        widest=None,
        more=more,
        receipt=receipt,
    )
    return ReadRows(
        rows,
        written,
        {number: prompts[number] for number in fitting},
        [started.state for started in begun],
    )


def _put(written: Written, *, options: AskedPrompts) -> Written:
    """What the model is asked; of a conversation the last message is the prompt."""
    if not isinstance(written, str):
        *before, last = written
        text = options.template.replace(PLACE, last["content"])
        return [*before, last | {"content": text}]
    text = options.template.replace(PLACE, written)
    return [{"role": "user", "content": text}] if options.chat else text


def _question(row: Row, *, options: AskedPrompts, where: str) -> Question:
    """How a row's prompt is read: what of what is asked is its text."""
    prompt = read_question(
        row, field=options.prompt_field, where=where, chat=options.chat
    )
    if isinstance(prompt.written, str) and not options.chat:
        return prompt._replace(template=options.template)
    return prompt._replace(written=_put(prompt.written, options=options))
