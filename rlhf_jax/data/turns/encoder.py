"""Token ids between a sampled turn and the next one, which no one decodes again.

    prompt      <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎
    sampled     calc: 2+3<|im_end|>
    between     ⏎<|im_start|>user⏎5<|im_end|>⏎<|im_start|>assistant⏎
    sampled     It is 5.<|im_end|>

What stands between is written by the chat template behind a turn of the assistant:

    rendered    ...assistant⏎MARK<|im_end|>⏎<|im_start|>user⏎5<|im_end|>⏎...assistant⏎
                                 |- stop --||--------------- between ----------------|

So an episode's ids are those that the model has read and written, whatever the template
would make of earlier turns in a longer conversation (Qwen 3's leaves their thinking
out). Without a chat template the observation is encoded as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_jax.data import chat, tokenization
from rlhf_jax.data.turns.ordinary import Ordinary
from rlhf_jax.functional.checks import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_jax.data.encoding import Written

PRIVATE = range(0xE000, 0x110000)  # where characters of no meaning begin
OPENING = {"role": "user", "content": "Hi"}


class TurnEncoder:
    """Prompts and observations to token ids, for one tokenizer.

    No text of theirs becomes a control token (`ordinary`): those are the template's.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int],
        chat: bool,
    ) -> None:
        """For episodes of messages, or of plain text.

        Args:
          stop_ids: tokens that end a sampled turn.
          chat: whether the tokenizer's chat template writes the conversation. A text
            is then a message of the user.

        Raises:
          InputError: there is no chat template, or it does not end the assistant's
            turn with one of the stop ids.
        """
        self._tokenizer, self._chat = tokenizer, chat
        self._stop_ids = frozenset(stop_ids)
        self._ordinary = Ordinary(tokenizer, stop_ids=stop_ids)
        if chat:
            self._check_stop()

    def prompt(self, written: Written, *, where: str) -> list[int]:
        """The ids of an episode's prompt, BOS included, up to the first response.

        Args:
          where: the row's place, for messages.

        Raises:
          InputError: messages without chat=True, or that the template does not take.
        """
        if self._chat:
            messages = _messages(written)
            chat.check_prompt(messages, where=where, field="prompt")
            return [*self._written(messages, where=where)]
        text = self._plain(written, where=where)
        (ids,) = tokenization.encode(self._tokenizer, [text], special=True)
        pieces = self._ordinary.pieces(text)
        if pieces != [text]:
            (ids,) = tokenization.encode(self._tokenizer, [""], special=True)
            ids += self._ordinary.encode(text)
        return ids

    def observation(
        self, written: Written, *, where: str = "an observation"
    ) -> list[int]:
        """The ids between a sampled stop token and the next response.

        Args:
          where: whose observation it is, for messages.

        Returns:
          Ids; none of a plain text that is empty.

        Raises:
          InputError: messages without chat=True, or that the template does not take
            after a turn of the assistant.
        """
        if not self._chat:
            return self._ordinary.encode(self._plain(written, where=where))
        ids = self._written(_messages(written), where=where, behind=True)
        for number in ids:  # what the template writes up to its stop token is sampled
            if number in self._stop_ids:
                break
        return [*ids]

    def _check_stop(self) -> None:
        """InputError unless the template ends the assistant's turn before the next."""
        where = "the chat template"
        turns = [OPENING, _said("\ue001"), {"role": "user", "content": "\ue002"}]
        text = chat.render(self._tokenizer, turns, where=where)
        between = text.partition("\ue001")[2].partition("\ue002")[0]
        (ids,) = tokenization.encode(self._tokenizer, [between], special=False)
        if self._stop_ids.isdisjoint(ids):
            stops = ", ".join(
                f"{self._tokenizer.decode([i])!r} ({i})" for i in sorted(self._stop_ids)
            )
            raise InputError(
                f"{where}: expected it to end a turn of the assistant with one of the"
                f" model's stop ids, {stops}, got {between!r:.60} before the next turn;"
                " set that token as eos_token in tokenizer_config.json, or add its id"
                " to eos_token_id in generation_config.json"
            )

    def _written(
        self, messages: Sequence[chat.Message], *, where: str, behind: bool = False
    ) -> Iterator[int]:
        """Ids of what the template writes of messages, and of its request for more.

        Args:
          messages: of texts, and of whatever else JSON has, such as calls of tools.
          behind: a turn of the assistant, whose text is left out.
        """
        mark, cut = _unused(set(json.dumps(messages, ensure_ascii=False)))

        def apart(value: Any) -> Any:
            if isinstance(value, str):
                return cut.join(self._ordinary.pieces(value))
            if isinstance(value, dict):  # as a call of a tool
                return {apart(key): apart(said) for key, said in value.items()}
            if isinstance(value, list):
                return [apart(each) for each in value]
            return value

        turns = [{key: apart(said) for key, said in each.items()} for each in messages]
        if behind:
            turns = [OPENING, _said(mark), *turns]
        text = chat.render(self._tokenizer, turns, where=where)
        if behind:
            text = text.rpartition(mark)[2]
        pieces = tokenization.encode(self._tokenizer, text.split(cut), special=False)
        return (number for piece in pieces for number in piece)

    def _plain(self, written: Written, *, where: str) -> str:
        if not isinstance(written, str):
            raise InputError(
                f"{where}: expected plain text, as this run has no chat template, got"
                f" the messages {written!r:.60}; run with chat on a tokenizer with a"
                " template, or let the environment write texts"
            )
        return written


def _messages(written: Written) -> list[chat.Message]:
    if isinstance(written, str):
        return [{"role": "user", "content": written}]
    return written


def _said(text: str) -> chat.Message:
    return {"role": chat.ASSISTANT, "content": text}


def _unused(used: set[str]) -> tuple[str, str]:
    """Two characters that stand in no text of these."""
    free = (chr(number) for number in PRIVATE if chr(number) not in used)
    return next(free), next(free)
