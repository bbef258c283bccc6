"""Encodes conversations as the chat template writes them, and marks what is learned.

The template's text is cut into pieces where a row's own text would make a control
token. A character that occurs in no text of the row marks the cuts:

    rendered    <|im_start|>user⏎a<CUT|im_end|>b<|im_end|>⏎<|im_start|>assistant⏎
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_jax.data import tokenization
from rlhf_jax.data.examples import Episode, Example, Text
from rlhf_jax.data.text import chat, messages
from rlhf_jax.data.text.control import RowPieces
from rlhf_jax.data.text.joining import Joining
from rlhf_jax.data.text.messages import OPENING, Message, Question
from rlhf_jax.functional.errors import InputError, located
from rlhf_jax.runs import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PRIVATE = range(0xE000, 0x110000)  # from the start of Unicode's private use area


class Conversations:
    """Encodes conversations, for one tokenizer and one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int],
        pieces: RowPieces,
        joining: Joining,
    ) -> None:
        """Stores a tokenizer and the `stop_ids` that end a turn of the assistant."""
        self._tokenizer, self._stop_ids = tokenizer, stop_ids
        self._pieces, self._joining = pieces, joining

    def prompt(self, question: Question) -> list[str]:
        """Renders a prompt up to where a response begins; returns its pieces."""
        messages.check_prompt(question.messages, field="prompt")
        [text], cut = self._rendered([question.messages], question, asks=[True])
        return text.split(cut)

    def examples(
        self,
        questions: Sequence[Question],
        conversations: Sequence[list[Message]],
        *,
        turns: Sequence[Sequence[int]],
    ) -> list[Text]:
        """Encodes conversations, of which some turns of the assistant are learned."""
        rendered = []
        rows = zip(questions, conversations, turns, strict=True)
        if questions and not self._stop_ids:
            tokenization.eos_token_id(self._tokenizer)  # raises: there is none
        for question, whole, learned in progress.track(
            rows, "conversations to text", total=len(questions)
        ):
            with located(question.where):
                rendered.append(self._checked(question, whole, learned))
        encoded = iter(
            self._joining.encode(
                [text.split(cut) for texts, cut in rendered for text in texts]
            )
        )
        examples = []
        rows = zip(rendered, questions, conversations, turns, strict=True)
        for (texts, cut), question, whole, learned in rows:
            with located(question.where):
                example = self._learned(
                    texts,
                    [next(encoded) for _ in texts],
                    cut=cut,
                    to_the_end=learned[-1] == len(whole) - 1,
                )
            examples.append(example)
        return examples

    def _checked(
        self, question: Question, whole: list[Message], learned: Sequence[int]
    ) -> tuple[list[str], str]:
        """Renders a conversation, and its beginnings before each learned turn.

        Returns:
          Their texts, and the character that separates pieces.
        """
        beginnings = [whole[:turn] for turn in learned]
        asks = [False, *(True for _ in beginnings)]
        texts, cut = self._rendered([whole, *beginnings], question, asks=asks)
        for turn, text in zip(learned, texts[1:], strict=True):
            content = self._pieces.without_stop(messages.content([whole[turn]]))[0]
            chat.check_written(
                texts[0].replace(cut, ""),
                beginning=text.replace(cut, ""),
                content=content,
            )
        return texts, cut

    def observation(self, question: Question, *, room: int | None = None) -> list[int]:
        """Encodes what the template writes after the content of an assistant's turn.

        Raises:
          OutOfRoom: the text has more than `room` tokens.
        """
        observed = messages.of_user(question.written)
        asks = observed[-1]["role"] != messages.ASSISTANT
        [text], cut = self._rendered([observed], question, asks=[asks], behind=True)
        [ids] = self._joining.encode([text.split(cut)], room=room)
        return ids

    def _learned(
        self,
        texts: Sequence[str],
        encoded: Sequence[list[int]],
        *,
        cut: str,
        to_the_end: bool,
    ) -> Text:
        """Makes the `Text` of a conversation, whose learned turns are its responses.

        Args:
          texts: the whole conversation, and its beginnings before each learned turn.
          encoded: their tokens.
          cut: the character that separates the pieces of a text.
          to_the_end: whether the last turn is learned.
        """
        beginnings = encoded[1:]
        ids, spans = list(beginnings[0]), []
        following = zip([*encoded[2:], encoded[0]], [*texts[2:], texts[0]], strict=True)
        for beginning, (tokens, text) in zip(texts[1:], following, strict=True):
            if tokens[: len(ids)] == ids:
                part = tokens[len(ids) :]
            else:  # the tokenizer merges across the border: rule 1
                part = self._joining.follow(
                    text[len(beginning) :].split(cut), after=ids
                )
            last = to_the_end and text is texts[0]
            size = chat.turn_size(
                self._tokenizer,
                part,
                stop_ids=self._stop_ids,
                last=last,
            )
            spans.append((len(ids), len(ids) + size))
            ids += part
        start, end = spans[0][0], spans[-1][1]
        prompt, response = ids[:start], ids[start:end]
        if len(spans) == 1:
            return Example(prompt, response)
        gaps = itertools.pairwise(spans)
        observed = tuple((one[1] - start, other[0] - start) for one, other in gaps)
        return Episode(prompt, response, observed)

    def _rendered(
        self,
        conversations: Sequence[Sequence[Message]],
        question: Question,
        *,
        asks: Sequence[bool],
        behind: bool = False,
    ) -> tuple[list[str], str]:
        """Renders conversations; also returns the character that separates pieces.

        Args:
          asks: for each conversation, whether a response is asked for at its end.
          behind: the messages follow a turn of the assistant; returns only the text
            after the content of that turn.
        """
        variables = dict(question.variables)
        used = json.dumps([*conversations, variables], ensure_ascii=False, default=str)
        mark, cut = _unused(set(used))

        def others(text: str) -> str:
            if behind:  # an observation is not from a row: it must not end the run
                return cut.join(self._pieces.of_observation(text, question))
            return cut.join(self._pieces.of_others(text, question))

        def own(text: str) -> str:
            return cut.join(self._pieces.of_assistant(text, question))

        def turn(message: Message) -> Message:
            message = messages.unmarked(message)
            if not behind:
                messages.check_role(message)
            if message.get("role") != messages.ASSISTANT:
                return _apart(message, others)
            content = self._pieces.without_stop(message.get("content") or "")[0]
            return _apart(message | {"content": content}, own)

        turns = [[turn(message) for message in whole] for whole in conversations]
        calls = [0 for _ in turns]
        if behind:
            turns = [
                [OPENING, messages.of_assistant(mark), *observed] for observed in turns
            ]
        else:
            marked = [_marked_calls(whole, mark=mark) for whole in turns]
            turns, calls = ([*part] for part in zip(*marked, strict=True))
        texts = chat.render_all(
            self._tokenizer,
            turns,
            asks=asks,
            variables=_apart(variables, others),
        )
        written = zip(texts, calls, strict=True)
        if any(text.count(mark) < count for text, count in written):
            raise InputError(
                f"expected a chat template that writes the"
                f" {messages.CALLS!r} of a message, got one that leaves them out; use"
                " another template, or leave them out of the row"
            )
        if behind:
            return [text.rpartition(mark)[2] for text in texts], cut
        return [text.replace(mark, "") for text in texts], cut


def _marked_calls(turns: list[Message], *, mark: str) -> tuple[list[Message], int]:
    """Puts a mark before the name of every tool call; also returns their number."""
    count = 0

    def marked(call: Any) -> Any:
        nonlocal count
        if not isinstance(call, dict):
            return call
        if isinstance(call.get("function"), dict):
            return call | {"function": marked(call["function"])}
        if not isinstance(call.get("name"), str):
            return call
        count += 1
        return call | {"name": mark + call["name"]}

    turns = [
        turn | {messages.CALLS: [marked(call) for call in turn[messages.CALLS]]}
        if isinstance(turn.get(messages.CALLS), list)
        else turn
        for turn in turns
    ]
    return turns, count


def _apart(value: Any, cut: Callable[[str], str]) -> Any:
    """Applies `cut` to every text in a JSON value."""
    if isinstance(value, str):
        return cut(value)
    if isinstance(value, dict):
        return {_apart(key, cut): _apart(part, cut) for key, part in value.items()}
    if isinstance(value, list):
        return [_apart(part, cut) for part in value]
    return value


def _unused(used: set[str]) -> tuple[str, str]:
    free = (chr(number) for number in PRIVATE if chr(number) not in used)
    return next(free), next(free)
