"""Questions as the model is asked them, with answers that a verifier can check."""

from __future__ import annotations

from typing import Protocol

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import encoding, files, json_lines
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.json_lines import Row, place
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import Asked, Written, asked, messages
from rlhf_jax.roles.rewards import verifiers
from rlhf_jax.roles.rewards.verifiers import Verifier
from rlhf_jax.train.grpo.options import VerifiedConfig
from rlhf_jax.train.grpo.verifier import read_by_verifier


class PromptForm(Protocol):
    """Options of how a question is put to the model."""

    @property
    def template(self) -> str:
        """Prompt, with {question} in it."""
        ...

    @property
    def chat(self) -> bool:
        """Whether it is a message of the user."""
        ...


def put(question: Written, *, options: PromptForm) -> Written:
    """What the model is asked; of a conversation the last message is the question."""
    if not isinstance(question, str):
        *before, last = question
        text = options.template.replace("{question}", last["content"])
        return [*before, last | {"content": text}]
    text = options.template.replace("{question}", question)
    return [{"role": "user", "content": text}] if options.chat else text


def question(row: Row, *, field: str, options: PromptForm, where: str) -> Asked:
    """How a row's question is read: what of the prompt is its text."""
    each = asked(row, field=field, where=where, chat=options.chat)
    if isinstance(each.written, str) and not options.chat:
        return each._replace(template=options.template)
    return each._replace(written=put(each.written, options=options))


def read_questions(
    source: str,
    *,
    verifier: Verifier,
    start: Pretrained,
    options: VerifiedConfig,
    receipt: Receipt | None = None,
) -> tuple[list[Row], list[Tokens]]:
    """Rows whose questions leave room for a response, and what the model is asked.

    Args:
      receipt: is told of every row, of the fields that are read, and of rows that are
        left out.

    Raises:
      InputError: the verifier cannot read the right answer of a row, or a row has no
        question; names file and line.
    """
    if isinstance(verifier, verifiers.Readable):
        verifiers.check_answers(json_lines.read_located(source), verifier=verifier)
    field = options.question_field
    rows = [
        row | {"asked": put(row[field], options=options)}
        for row in files.read_prompts(source, field=field, receipt=receipt)
    ]
    if receipt is not None:
        read_by_verifier(receipt, options=options)
        if options.chat:  # texts are put as messages
            receipt.reads(*messages.OF_TEMPLATE)
    room, more = options.room(
        start.room(max_new_tokens=options.max_new_tokens),
        max_new_tokens=options.max_new_tokens,
    )
    return encoding.encode_prompts(
        start.tokenizer,
        rows,
        max_length=room,
        more=more,
        field="asked",
        questions=[
            question(row, field=field, options=options, where=place(row, number))
            for number, row in enumerate(rows)
        ],
        stop_ids=start.stop_ids,
        overlong=options.overlong,
        receipt=receipt,
    )
