"""Renders conversations with a chat template.

    prompt    [{"role": "user", "content": "Hi"}]
    response  [{"role": "assistant", "content": "Hello"}], or "Hello"

    tokens    <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎Hello<|im_end|>
              |------------------- prompt -----------------------|-- response --|

The template writes all tokens, BOS included, so the tokenizer adds none. A response
ends where a sampled one does, with the first of the model's stop ids. Text that the
template writes after it (⏎ here) belongs to the next turn and is not learned.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from rlhf_jax.data import tokenization
from rlhf_jax.data.text import templates
from rlhf_jax.data.text.messages import ASSISTANT, TOOLS, Message
from rlhf_jax.functional.checks import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# Templates write today's date, by a variable (Llama 3) or a function, so prompts would
# change from day to day. This date is the default of Llama's template.
DATE = "26 Jul 2024"
CONTINUED = "continue_final_message"  # argument of `render_jinja_template`
FIXED = f"{{% macro strftime_now(format) %}}{DATE}{{% endmacro %}}"


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    *,
    continued: bool = False,
) -> str:
    """Renders a conversation; asks for a response unless the last message is one.

    Args:
      continued: whether the last message is unfinished, so that no token ends it.

    Raises:
      InputError: there is no template, or it rejects the messages.
    """
    asks = messages[-1]["role"] != ASSISTANT and not continued
    variables = {CONTINUED: True} if continued else {}
    [text] = render_all(tokenizer, [messages], asks=[asks], variables=variables)
    return text


def render_all(
    tokenizer: PreTrainedTokenizerBase,
    conversations: Sequence[Sequence[Message]],
    *,
    asks: Sequence[bool],
    variables: Mapping[str, Any],
) -> list[str]:
    """Renders conversations of one row.

    Args:
      asks: for each, whether the template asks for a response at the end.
      variables: further inputs of the template, from `messages.variables_of`.

    Raises:
      InputError: as `render`.
    """
    if tokenizer.chat_template is None:
        raise InputError(
            "expected a tokenizer with a chat template, as the row holds"
            " messages, got one without; save the template as chat_template.jinja"
            " beside tokenizer.json, name a tokenizer that has one with --tokenizer, or"
            " give texts instead of messages"
        )
    try:
        template = tokenizer.get_chat_template(tools=variables.get(TOOLS))
    except ValueError:  # several with names, and none of them is the default
        template = None
    if not isinstance(template, str):
        raise InputError(
            f"expected chat_template in tokenizer_config.json to be a text, or"
            f" texts by name with a default, got {tokenizer.chat_template!r:.40};"
            " correct it, or name another tokenizer with --tokenizer"
        )
    for name in {*variables} - {CONTINUED}:
        if name not in _names(template):
            raise InputError(
                f"expected a chat template that reads {name!r}, which the row gives it,"
                " got one that does not; use another template, or leave the field out"
            )
    try:
        return templates.write(
            FIXED + template,
            # As in `apply_chat_template`: templates test for absent keys, not null.
            [
                [
                    {key: value for key, value in message.items() if value is not None}
                    for message in messages
                ]
                for messages in conversations
            ],
            add_generation_prompt=asks,
            variables={
                **tokenizer.special_tokens_map,
                "date_string": DATE,
                **variables,
            },
        )
    except templates.TemplateError as error:
        roles = ", ".join(message["role"] for message in conversations[0])
        raise InputError(
            f"expected messages that the tokenizer's chat template takes, got"
            f" the roles {roles:.200}, of which it says: {error}; change the messages,"
            " or the template"
        ) from error


@functools.lru_cache
def _names(template: str) -> frozenset[str]:
    """Returns the names that a template may read, not texts or fields of others."""
    try:
        tokens = [
            (kind, value)
            for _, kind, value in jinja2.Environment(autoescape=False).lex(template)
            if kind != "whitespace"
        ]
    except jinja2.TemplateError:  # reported when the template is rendered
        return frozenset(re.findall(r"\w+", template))
    before = [("", ""), *tokens]
    return frozenset(
        value
        for (kind, value), last in zip(tokens, before, strict=False)
        if kind == "name" and last != ("operator", ".")
    )


def check_written(whole: str, *, beginning: str, content: str) -> None:
    """Raises InputError unless the template writes a turn as it asks for one.

    Args:
      whole: the text of the conversation.
      beginning: the text before the turn, with the request for the turn.
      content: the content of the turn.
    """
    if not whole.startswith(beginning):
        at = len(os.path.commonprefix([whole, beginning]))  # noqa: RUF071
        raise InputError(
            "expected the conversation with its response to begin as its prompt does, "
            f"got {whole[at:]!r:.60} where the chat template asks for a response with "
            f"{beginning[at:]!r:.60}; use a template that writes a conversation with "
            "its response as it writes the prompt, and a turn as it asks for one"
        )
    turn = content.strip()
    first, line_end, others = turn.partition("\n")
    if line_end and beginning.endswith(first + line_end):
        turn = others.strip()  # a template may ask for a turn with "<think>" (Qwen 3.5)
    if turn not in whole[len(beginning) :]:
        raise InputError(
            f"expected a chat template that writes the whole response, got one"
            f" that leaves out a part of {content!r:.60}; use a template that keeps it,"
            " or leave that part out of the response"
        )


def turn_size(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    *,
    stop_ids: Sequence[int],
    last: bool,
) -> int:
    """Counts the tokens of a turn of the assistant, up to its first stop token.

    Args:
      tokens: the tokens from the turn on.
      stop_ids: tokens that end a response.
      last: whether nothing but white space may follow.

    Raises:
      InputError: the turn does not end with a stop token, or contains another one.
    """
    end = next((i for i, token in enumerate(tokens, 1) if token in stop_ids), None)
    if end is None:
        raise InputError(
            f"expected the chat template to end a response with one of the"
            f" model's stop ids, {shown(tokenizer, stop_ids)}, got"
            f" {tokenization.decode(tokenizer, tokens[-4:])!r} at the end of it, after"
            " which no sampled response would stop; set that token as eos_token in"
            " tokenizer_config.json, or add its id to eos_token_id in"
            " generation_config.json"
        )
    later = [token for token in tokens[end:] if token not in stop_ids]
    rest = tokenization.decode(tokenizer, later)
    if last and rest.strip():
        raise InputError(
            f"expected a stop id at the end of a response alone, got"
            f" {shown(tokenizer, tokens[end - 1 : end])} before {rest!r:.60}; remove"
            " it from the response, or use a template that writes it at the end alone"
        )
    return end


def shown(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """Formats tokens for an error: their texts and ids."""
    return ", ".join(f"{tokenization.decode(tokenizer, [i])!r} ({i})" for i in ids)
