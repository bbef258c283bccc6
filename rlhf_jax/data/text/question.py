"""A prompt as its row gives it: a text or messages, and how they are to be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.text import messages
from rlhf_jax.data.text.messages import Message

Written = str | list[Message]  # a text, or messages for the chat template
PLACE = "{prompt}"  # where a row's text stands in a template of plain text


class Question(NamedTuple):
    """A prompt, with what its row says of how it is to be read."""

    written: Written
    where: str = "a prompt"
    """Its file and line, for errors."""
    variables: Mapping[str, Any] = {}  # nobody writes to it
    """What the chat template reads besides the messages: tools, documents, options."""
    control: tuple[str, ...] = ()
    """Control tokens that are tokens in this row's texts, by name."""
    template: str = PLACE
    """Of a plain prompt, with the row's text in place of {prompt}. It is the run's
    own, so that a control token in it is one."""

    @property
    def is_chat(self) -> bool:
        """Whether it is messages, for the chat template."""
        return not isinstance(self.written, str)

    @property
    def messages(self) -> list[Message]:
        """Of a conversation."""
        assert not isinstance(self.written, str)
        return self.written


def read_question(row: Row, *, field: str, where: str, chat: bool = False) -> Question:
    """The prompt in a field of a row, with the fields that say how to read it.

    Args:
      chat: whether a text is put as a message, too. Of a row without messages `tools`,
        `documents` and `chat_template_kwargs` may be anything: no template reads them.

    Raises:
      InputError: one of these fields is not what it should be; names file and line.
    """
    by_template = chat or not isinstance(row[field], str)
    variables = messages.variables(row, where=where) if by_template else {}
    names = messages.field(row, messages.CONTROL_TOKENS, where=where)
    return Question(row[field], where, variables, tuple(names or ()))
