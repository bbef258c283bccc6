"""Demonstrations of several turns to tokens, as a run of episodes has them.

{"prompt": "3+4+5⏎", "turns": ["calc: 3+4", "⏎7⏎", "calc: 7+5", "⏎12⏎", "= 12"]}

prompt    3+4+5⏎
response  calc: 3+4<eos>⏎7⏎calc: 7+5<eos>⏎12⏎= 12<eos>
observed                ---              ----
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_jax.data import chat, json_lines, lengths, tokenization
from rlhf_jax.data.examples import Episode
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.lengths import Overlong
from rlhf_jax.data.turns.encoder import TurnEncoder

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

USER = [{"role": "user", "content": "Hi"}]  # to whom a turn responds, for its tokens


def encode_episodes(
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[Row],
    *,
    max_length: int,
    prompt: str = "prompt",
    turns: str = "turns",
    stop_ids: Sequence[int] | None = None,
    overlong: Overlong = "error",
    widest: int | None = None,
) -> list[Episode]:
    """Episodes of at most `max_length` tokens, whose responses are trained on.

    Args:
      prompt, turns: fields with the prompt, and with responses and observations in
        turn; texts, or a prompt and observations of messages for the chat template.
      stop_ids: tokens that end a response, of which the first is given to a text
        without one; None is the tokenizer's EOS.
      widest: tokens of the largest bucket or of a packed row; None is no such limit.

    Raises:
      InputError: as `encoding.encode_demonstrations`.
    """
    stops = tuple(stop_ids) if stop_ids else (tokenization.eos_token_id(tokenizer),)
    encoders: dict[bool, TurnEncoder] = {}
    episodes, places = [], []
    for number, row in enumerate(rows):
        where = json_lines.place(row, number)
        by_template = not isinstance(row[prompt], str)
        if by_template not in encoders:
            encoders[by_template] = TurnEncoder(
                tokenizer, stop_ids=stops, chat=by_template
            )
        encoder = encoders[by_template]
        response: list[int] = []
        observed: list[tuple[int, int]] = []
        for place, turn in enumerate(row[turns]):
            start = len(response)
            if place % 2:
                response += encoder.observation(turn, where=where)
                observed.append((start, len(response)))
            elif by_template:
                response += _written(tokenizer, turn, stop_ids=stops, where=where)
            else:
                response += _plain(tokenizer, turn, stop_ids=stops)
        asked = encoder.prompt(row[prompt], where=where)
        episodes.append(Episode(asked, response, tuple(observed)))
        places.append(where)
    fits = lengths.fits(
        [episode.length for episode in episodes],
        texts=[row[prompt] for row in rows],
        places=places,
        max_length=max_length,
        overlong=overlong,
        widest=widest,
    )
    return [episodes[i] for i in fits]


def _plain(
    tokenizer: PreTrainedTokenizerBase, text: str, *, stop_ids: Sequence[int]
) -> list[int]:
    (tokens,) = tokenization.encode(tokenizer, [text], special=False)
    return tokens if tokens and tokens[-1] in stop_ids else [*tokens, stop_ids[0]]


def _written(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    stop_ids: Sequence[int],
    where: str,
) -> list[int]:
    """A response as the template writes it, whatever stands before it."""
    texts = [
        chat.render(tokenizer, USER, where=where),
        chat.render_with_response(tokenizer, USER, text, where=where),
    ]
    asked, whole = tokenization.encode(tokenizer, texts, special=False)
    return chat.response_tokens(
        tokenizer, whole, prompt=asked, stop_ids=stop_ids, where=where
    )
