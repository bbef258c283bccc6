"""Encodes the text between two sampled turns, which themselves are never re-encoded.

    prompt      <|im_start|>user⏎Hi<|im_end|>⏎<|im_start|>assistant⏎
    sampled     calc: 2+3<|im_end|>
    between     ⏎<|im_start|>user⏎5<|im_end|>⏎<|im_start|>assistant⏎
    sampled     It is 5.<|im_end|>

The text between is what the chat template writes after a turn of the assistant:

    rendered    ...assistant⏎MARK<|im_end|>⏎<|im_start|>user⏎5<|im_end|>⏎...assistant⏎
                                 |- stop --||--------------- between ----------------|

So an episode has exactly the ids that the model read and wrote, even if the template
would render earlier turns differently in a longer conversation (Qwen 3's drops their
thinking). Without a chat template the observation is encoded as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_jax.data import tokenization
from rlhf_jax.data.text import Question, TextContract, Written, chat, messages
from rlhf_jax.data.text.joining import OutOfRoom
from rlhf_jax.data.text.messages import OPENING
from rlhf_jax.functional.errors import InputError, located

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TurnEncoder:
    """Encodes prompts and observations of an environment by the text contract."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int],
        chat: bool,
    ) -> None:
        """Makes an encoder for episodes of messages or of plain text.

        Args:
          stop_ids: tokens that end a sampled turn.
          chat: whether the tokenizer's chat template renders the conversation; a text
            is then a message of the user.

        Raises:
          InputError: there is no chat template, or it does not end the assistant's
            turn with one of the stop ids.
        """
        self.contract = TextContract(tokenizer, stop_ids=stop_ids)
        self._chat = chat
        if chat:
            self._check_stop()

    def prompt(self, written: Written, *, where: str) -> list[int]:
        """Returns the ids of an episode's prompt, BOS included.

        Args:
          where: the row, for errors.

        Raises:
          InputError: messages without chat=True, or that the template rejects.
        """
        if self._chat:
            written = messages.of_user(written)
        else:
            _check_plain(written, where=where)
        (ids,) = self.contract.prompts([Question(written, where)])
        return ids

    def observation(
        self,
        written: Written,
        *,
        where: str = "an observation",
        room: int | None = None,
    ) -> list[int] | None:
        """Returns the ids between a sampled stop token and the next response.

        Args:
          where: the observation, for errors.
          room: the most ids; None is no limit.

        Returns:
          Ids, empty for an empty plain text; None if there are more than `room`.

        Raises:
          InputError: messages without chat=True, or that the template rejects after a
            turn of the assistant.
        """
        if not self._chat:
            _check_plain(written, where=where)
        question = Question(written, where)
        try:
            ids = self.contract.between(question, chat=self._chat, room=room)
        except OutOfRoom:
            return None
        return None if room is not None and len(ids) > room else ids

    def _check_stop(self) -> None:
        """Raises InputError unless the template ends the assistant's turn itself."""
        tokenizer, stop_ids = self.contract.tokenizer, self.contract.stop_ids
        turns = [OPENING, messages.of_assistant("\ue001"), *messages.of_user("\ue002")]
        with located("the chat template"):
            text = chat.render(tokenizer, turns)
            between = text.partition("\ue001")[2].partition("\ue002")[0]
            (ids,) = tokenization.encode(tokenizer, [between], special=False)
            chat.turn_size(tokenizer, ids, stop_ids=stop_ids, last=False)


def _check_plain(written: Written, *, where: str) -> None:
    if not isinstance(written, str):
        raise InputError(
            f"{where}: expected plain text, as this run has no chat template, got"
            f" the messages {written!r:.60}; run with chat on a tokenizer with a"
            " template, or let the environment write texts"
        )
