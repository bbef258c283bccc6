"""Messages of a conversation: their format, their marks, and which are learned.

    {"role": "user", "content": "Hi"}
    {"role": "assistant", "content": "Hello", "weight": 0}

A turn of the assistant with the weight 0 is not learned.

Errors do not name the row: callers put its file and line before them (`located`).

Besides messages a row may hold further inputs of the chat template: `tools`,
`documents`, and options in `chat_template_kwargs`. A `Question` is a prompt with these
settings of its row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rlhf_jax.data.json_lines import Row
from rlhf_jax.functional.errors import InputError, located

Message = dict[str, Any]  # role, content, and other fields that the template reads
AssistantTurns = Literal["last", "all", "marked"]
ASSISTANT = "assistant"
OPENING = {"role": "user", "content": "Hi"}  # precedes a turn that is rendered alone
CALLS = "tool_calls"  # field of a message: the assistant's calls of tools
MARKS = ("weight", "train", "loss_mask")  # fields of a message: whether it is learned
TOOLS, DOCUMENTS, OPTIONS = "tools", "documents", "chat_template_kwargs"
CONTROL_TOKENS = "control_tokens"  # field of a row: tokens that it asks for by name
OF_TEMPLATE = (TOOLS, DOCUMENTS, OPTIONS)  # fields of a row that a template reads
OF_TOKENS = frozenset("<>[]|")  # characters at the ends of control tokens
FIELDS: dict[str, tuple[Any, type, str, str]] = {  # types, description, example
    TOOLS: (list, dict, "a list of objects", '[{"name": "add"}]'),
    DOCUMENTS: (list, dict, "a list of objects", '[{"text": "A"}]'),
    OPTIONS: (dict, object, "an object", '{"enable_thinking": false}'),
    CONTROL_TOKENS: (list | tuple, str, "a list of tokens", '["<|im_start|>"]'),
}
TEMPLATE_ARGUMENTS = (  # of `render_jinja_template`; no option may have such a name
    *("messages", "conversations", "chat_template", "add_generation_prompt", TOOLS),
    *(DOCUMENTS, "continue_final_message", "return_assistant_tokens_mask"),
)
Written = str | list[Message]  # a text, or messages for the chat template
PLACE = "{prompt}"  # placeholder of a row's text in `--template`


def variables_of(row: Row) -> dict[str, Any]:
    """Collects a row's inputs of the chat template other than messages.

    These are the fields `tools` and `documents`, and the options in
    `chat_template_kwargs`, such as {"enable_thinking": false}.

    Raises:
      InputError: a field has the wrong type, or an option has the name of another
        argument of the template.
    """
    values = {name: field_of(row, name) for name in OF_TEMPLATE}
    options = values.pop(OPTIONS) or {}
    for name in options:
        if name in TEMPLATE_ARGUMENTS:
            raise InputError(
                f"expected options of the chat template in {OPTIONS!r}, got"
                f" {name!r}, which it is given anyway; leave it out"
            )
    fields = {name: value for name, value in values.items() if value}
    return fields | {name: v for name, v in options.items() if v is not None}


def field_of(row: Row, name: str) -> Any:
    """Returns a row's value of one of `FIELDS`; None if the row does not have it.

    Raises:
      InputError: the value has the wrong type.
    """
    value = row.get(name)
    outer, inner, expected, example = FIELDS[name]
    parts = value if isinstance(value, list | tuple) else ()
    fits = isinstance(value, outer) and all(isinstance(part, inner) for part in parts)
    if value is not None and not fits:
        raise InputError(
            f"expected {expected} in {name!r}, such as {example}, got"
            f" {value!r:.60}; correct the row, or rename the field"
        )
    return value


def of_assistant(text: str) -> Message:
    """Makes a message of the assistant."""
    return {"role": ASSISTANT, "content": text}


def as_turn(response: str | list[Message]) -> list[Message]:
    """Returns a response as messages; a text becomes one message of the assistant."""
    return [of_assistant(response)] if isinstance(response, str) else response


def plain(response: str | list[Message], *, field: str = "response") -> str:
    """Returns the response to a plain prompt; InputError unless it is a text."""
    if not isinstance(response, str):
        raise InputError(
            f"expected text in {field!r}, as its prompt is one, got messages;"
            " give both as messages, or leave out the prompt where they hold it"
        )
    return response


def of_user(written: str | list[Message]) -> list[Message]:
    """Returns messages; a text becomes one message of the user."""
    if isinstance(written, str):
        return [{"role": "user", "content": written}]
    return written


def unmarked(message: Message) -> Message:
    """Removes a message's `MARKS`."""
    return {key: value for key, value in message.items() if key not in MARKS}


def mark(message: Message) -> bool | None:
    """Whether a message is marked as learned; None if it has no mark.

    Raises:
      InputError: its marks are not 0 or 1, or they differ.
    """
    marks = {key: message[key] for key in MARKS if message.get(key) is not None}
    values = [*marks.values()]
    if any(value not in (0, 1) or value != values[0] for value in values):
        raise InputError(
            f"expected 0 or 1 in the marks of a message, and the same in all,"
            f" got {marks!r:.80}; a turn is learned or it is not"
        )
    return bool(values[0]) if values else None


def learned_turns(messages: Sequence[Message], *, which: AssistantTurns) -> list[int]:
    """Returns the indices of the messages of a conversation that are learned.

    Args:
      messages: the conversation; its last message is the assistant's.
      which: which turns of the assistant are learned without a mark: "last", "all", or
        "marked" for none.

    Raises:
      InputError: a message of another role is marked as learned, or none is learned.
    """
    learned = []
    for number, message in enumerate(messages):
        marked = mark(message)
        own = message["role"] == ASSISTANT
        if marked and not own:
            raise InputError(
                f"expected turns of the assistant to be marked as learned,"
                f" got one of {message['role']!r:.40}; no model writes it"
            )
        if marked is None:
            last = number == len(messages) - 1
            marked = own and (which == "all" or (which == "last" and last))
        if marked:
            learned.append(number)
    if not learned:
        raise InputError(
            f"expected a turn of the assistant that is learned, got none, by"
            f" the marks of the row and where {which!r} turns are learned without one;"
            " mark one, or remove the row"
        )
    return learned


def check_unmarked(messages: Sequence[Message]) -> None:
    """Raises InputError if marks ask to learn other turns than the response."""
    *before, response = messages
    earlier = any(mark(message) for message in before)
    if earlier or mark(response) is False:
        got = "an earlier turn that is marked" if earlier else "one that is marked not"
        raise InputError(
            f"expected the response to be learned and no earlier turn, as of"
            f" pairs, labelled responses and episodes, got {got} to be; leave out the"
            " mark, or remove the row"
        )


def check_messages(value: list[Any], *, field: str) -> None:
    """Raises InputError unless every message has a role and a content, both texts."""
    if not value:
        raise InputError(
            f"expected text or messages in {field!r}, got an empty list; remove the row"
        )
    for message in value:
        for key in ("role", "content"):
            if key == "content" and _calls_tools(message):
                continue
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise InputError(
                    f"expected messages as"
                    ' {"role": "user", "content": "Hi"}'
                    f" in {field!r}, got {message!r:.60}, whose {key} is not a text"
                )


def check_role(message: Message) -> None:
    """Raises InputError for a role with characters of `OF_TOKENS`.

    Templates write "<|" + role + "|>", so such a role could end one control token and
    begin another.
    """
    role = message.get("role")
    if isinstance(role, str) and not OF_TOKENS.isdisjoint(role):
        raise InputError(
            f"expected a role without {' '.join(sorted(OF_TOKENS))}, such as"
            f" 'user', got {role!r:.60}; correct the row"
        )


def check_prompt(messages: Sequence[Message], *, field: str) -> None:
    """Raises InputError if the last message is the assistant's."""
    if messages[-1]["role"] == ASSISTANT:
        raise InputError(
            f"expected messages that wait for the assistant in {field!r}, got"
            " its turn as the last one; move that turn to the field of the response"
        )


def check_response(messages: Sequence[Message], *, field: str) -> None:
    """Raises InputError unless the messages are one message of the assistant."""
    roles = [message["role"] for message in messages]
    if roles != [ASSISTANT]:
        raise InputError(
            f"expected text or one message of the assistant in {field!r}, got"
            f" {', '.join(roles)}; its earlier turns belong to the prompt"
        )


def check_turns(turns: Any, *, by_template: bool) -> None:
    """Raises InputError unless responses and observations alternate in `turns`.

    Args:
      by_template: whether the prompt is a conversation, so that observations may be
        messages.
    """
    if not isinstance(turns, list) or len(turns) % 2 == 0:
        count = f"{len(turns)} of them" if isinstance(turns, list) else repr(turns)
        raise InputError(
            f"expected a list in 'turns' that begins and ends with a response,"
            f" with an observation between each two, got {count:.60}; correct the row"
        )
    for number, turn in enumerate(turns):
        observed = number % 2 == 1
        if observed and by_template and isinstance(turn, list):
            check_messages(turn, field="turns")
        elif not isinstance(turn, str):
            kinds = "text or messages" if observed and by_template else "text"
            what = "an observation" if observed else "a response"
            raise InputError(
                f"expected {kinds} as turn {number} (from 0) of 'turns',"
                f" {what}, got {turn!r:.60}; correct the row"
            )


def content(text: str | list[Message]) -> str:
    """Returns a text, or the content of the last message ("" if it has none)."""
    return text if isinstance(text, str) else text[-1].get("content") or ""


def _calls_tools(message: Any) -> bool:
    """Whether a message of the assistant calls a tool instead of having a content."""
    return (
        isinstance(message, dict)
        and message.get("role") == ASSISTANT
        and message.get("content") is None
        and bool(message.get(CALLS))
    )


class Question(NamedTuple):
    """A prompt, with the settings of its row."""

    written: Written
    where: str = "a prompt"
    """File and line, for errors."""
    variables: Mapping[str, Any] = {}  # never modified
    """Further inputs of the chat template: tools, documents, options."""
    control: tuple[str, ...] = ()
    """Names of control tokens that are tokens in this row's texts."""
    template: str = PLACE
    """`--template` of a plain prompt, in which {prompt} stands for the row's text. The
    user of the run wrote it, so control tokens in it are tokens."""

    @property
    def is_chat(self) -> bool:
        """Whether the prompt is a conversation, which the chat template renders."""
        return not isinstance(self.written, str)

    @property
    def messages(self) -> list[Message]:
        """The messages of a conversation."""
        assert not isinstance(self.written, str)
        return self.written


def read_question(row: Row, *, field: str, where: str, chat: bool = False) -> Question:
    """Reads the prompt in a field of a row, with the row's settings.

    Args:
      chat: whether a text becomes a message, too. Otherwise `tools`, `documents` and
        `chat_template_kwargs` of a row with a text are ignored.

    Raises:
      InputError: one of these fields has the wrong type; names file and line.
    """
    by_template = chat or not isinstance(row[field], str)
    with located(where):
        variables = variables_of(row) if by_template else {}
        names = field_of(row, CONTROL_TOKENS)
    return Question(row[field], where, variables, tuple(names or ()))
