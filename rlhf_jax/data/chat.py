"""Conversations as messages, and the tokens that a chat template makes of them.

    prompt    [{"role": "user", "content": "Hi"}]
    response  [{"role": "assistant", "content": "Hello"}], or "Hello"

    tokens    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Hello<|im_end|>
              |------------------- prompt -----------------------|-- response --|

The tokens are the template's, BOS included, so the tokenizer adds none. A response ends
where a sampled one does, with the first of the model's stop ids: what the template
writes after it (⏎ here) begins the next turn, and no model is asked to write that.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlhf_jax.data import templates
from rlhf_jax.functional.checks import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, Any]  # role and content, and whatever else the template reads
ASSISTANT = "assistant"
# Templates write today's date, by a variable (Llama 3) or by a function: tomorrow the
# same run would read other prompts. This is what Llama's falls back to.
DATE = "26 Jul 2024"
FIXED = f"{{% macro strftime_now(format) %}}{DATE}{{% endmacro %}}"


def check_messages(value: list[Any], *, where: str, field: str) -> None:
    """InputError unless every message has a role and a content, both texts."""
    if not value:
        raise InputError(
            f"{where}: expected text or messages in {field!r}, got an empty list;"
            " remove the row"
        )
    for message in value:
        for key in ("role", "content"):
            if not isinstance(message, dict) or not isinstance(message.get(key), str):
                raise InputError(
                    f'{where}: expected messages as {{"role": "user", "content": '
                    f'"Hi"}} in {field!r}, got {message!r:.60}, whose {key} is no text'
                )


def check_prompt(messages: Sequence[Message], *, where: str, field: str) -> None:
    """InputError unless the last turn is another's than the assistant's."""
    if messages[-1]["role"] == ASSISTANT:
        raise InputError(
            f"{where}: expected messages that wait for the assistant in {field!r}, got"
            " its turn as the last one; move that turn to the field of the response"
        )


def check_response(messages: Sequence[Message], *, where: str, field: str) -> None:
    """InputError unless it is one message of the assistant."""
    roles = [message["role"] for message in messages]
    if roles != [ASSISTANT]:
        raise InputError(
            f"{where}: expected text or one message of the assistant in {field!r}, got"
            f" {', '.join(roles)}; its earlier turns belong to the prompt"
        )


def check_turns(turns: Any, *, where: str, by_template: bool) -> None:
    """InputError unless turns are responses with observations between them.

    Args:
      by_template: whether the prompt is of messages, so that observations may be.
    """
    if not isinstance(turns, list) or len(turns) % 2 == 0:
        count = f"{len(turns)} of them" if isinstance(turns, list) else repr(turns)
        raise InputError(
            f"{where}: expected a list in 'turns' that begins and ends with a response,"
            f" with an observation between each two, got {count:.60}; correct the row"
        )
    for number, turn in enumerate(turns):
        observed = number % 2 == 1
        if observed and by_template and isinstance(turn, list):
            check_messages(turn, where=where, field="turns")
        elif not isinstance(turn, str):
            kinds = "text or messages" if observed and by_template else "text"
            what = "an observation" if observed else "a response"
            raise InputError(
                f"{where}: expected {kinds} as turn {number} (from 0) of 'turns',"
                f" {what}, got {turn!r:.60}; correct the row"
            )


def content(text: str | list[Message]) -> str:
    """What a text says, or the last of its messages."""
    return text if isinstance(text, str) else text[-1]["content"]


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], *, where: str
) -> str:
    """The template's text; it asks for a response unless the last message is one.

    Raises:
      InputError: there is no template, or it does not take such messages.
    """
    if tokenizer.chat_template is None:
        raise InputError(
            f"{where}: expected a tokenizer with a chat template, as the row holds"
            " messages, got one without; save the template as chat_template.jinja"
            " beside tokenizer.json, name a tokenizer that has one with --tokenizer, or"
            " give texts instead of messages"
        )
    try:
        template = tokenizer.get_chat_template()
    except ValueError:  # several with names, and none of them is the default
        template = None
    if not isinstance(template, str):
        raise InputError(
            f"{where}: expected chat_template in tokenizer_config.json to be a text, or"
            f" texts by name with a default, got {tokenizer.chat_template!r:.40};"
            " correct it, or name another tokenizer with --tokenizer"
        )
    try:
        return templates.write(
            FIXED + template,
            # As `apply_chat_template` has it: templates know absent keys, not null.
            [
                {key: value for key, value in message.items() if value is not None}
                for message in messages
            ],
            add_generation_prompt=messages[-1]["role"] != ASSISTANT,
            variables={**tokenizer.special_tokens_map, "date_string": DATE},
        )
    except templates.TemplateError as error:
        roles = ", ".join(message["role"] for message in messages)
        raise InputError(
            f"{where}: expected messages that the tokenizer's chat template takes, got"
            f" the roles {roles:.200}, of which it says: {error}; change the messages,"
            " or the template"
        ) from error


def render_with_response(
    tokenizer: PreTrainedTokenizerBase,
    prompt: Sequence[Message],
    response: str | list[Message],
    *,
    where: str,
) -> str:
    """The template's text of the conversation with the assistant's turn.

    Raises:
      InputError: there is no template, it does not take such messages, or it leaves
        out a part of the response.
    """
    said = content(response)
    turn = (
        [{"role": ASSISTANT, "content": response}]
        if isinstance(response, str)
        else response
    )
    text = render(tokenizer, [*prompt, *turn], where=where)
    if said.strip() not in text:
        raise InputError(
            f"{where}: expected a chat template that writes the whole response, got one"
            f" that leaves out a part of {said!r:.60}; use a template that keeps it, or"
            " leave that part out of the response"
        )
    return text


def response_tokens(
    tokenizer: PreTrainedTokenizerBase,
    whole: list[int],
    *,
    prompt: Sequence[int],
    stop_ids: Sequence[int],
    where: str,
) -> list[int]:
    """The response's part of a conversation, up to its first stop id.

    Args:
      whole, prompt: tokens of the conversation with the response, and of the prompt.
      stop_ids: tokens that end a response.

    Raises:
      InputError: the whole does not begin with the prompt, or the response's turn does
        not end with a stop id.
    """
    response = list(whole[len(prompt) :])
    if [*prompt, *response] != list(whole):
        parts = next(i for i, token in enumerate(prompt) if [token] != whole[i : i + 1])
        raise InputError(
            f"{where}: expected the conversation with its response to begin with the"
            f" tokens of its prompt, got {tokenizer.decode(whole[parts:])!r:.60} where"
            f" the chat template asks for a response with"
            f" {tokenizer.decode(prompt[parts:])!r:.60}; begin the response with a word"
            " if it begins with white space, or else use a template that writes a"
            " conversation with its response as it writes the prompt, and a turn as it"
            " asks for one"
        )
    end = next((i for i, token in enumerate(response, 1) if token in stop_ids), None)
    if end is None:
        raise InputError(
            f"{where}: expected the chat template to end a response with one of the"
            f" model's stop ids, {_shown(tokenizer, stop_ids)}, got"
            f" {tokenizer.decode(response[-4:])!r} at the end of it, after which no"
            " sampled response would stop; set that token as eos_token in"
            " tokenizer_config.json, or add its id to eos_token_id in"
            " generation_config.json"
        )
    later = [token for token in response[end:] if token not in stop_ids]
    rest = str(tokenizer.decode(later))
    if rest.strip():
        raise InputError(
            f"{where}: expected a stop id at the end of a response alone, got"
            f" {_shown(tokenizer, response[end - 1 : end])} before {rest!r:.60}; remove"
            " it from the response, or use a template that writes it at the end alone"
        )
    return response[:end]


def _shown(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return ", ".join(f"{tokenizer.decode([i])!r} ({i})" for i in ids)
