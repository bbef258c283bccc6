"""The text contract: the only place where text becomes tokens and tokens become text.

    prompt      [BOS] Q: 2+2? A:       the tokenizer's prefix, but no suffix
    response    4 EOS                  the tokens that follow in "Q: 2+2? A: 4"

Every trainer, reward, verifier, environment and evaluation follows these rules:

1. Tokens decode to the text that was written. A prompt has the tokens that it has
   alone, as when a response to it is sampled. A response has those of prompt +
   response past the prompt's. Where the tokenizer merges across the border (the prompt
   ends in " ", the response begins with "4", and " 4" is one token), the prompt keeps
   its own tokens, and the response has those that continue it.
2. BOS and stop tokens are never duplicated. A prompt has at most one BOS, and none of
   the tokens that the tokenizer appends. A response ends with one stop token and holds
   no other. A stop token that is written at the end of a response counts as this one,
   and a BOS written at the beginning of a plain prompt as that one, unless the BOS is
   also a stop token and the tokenizer does not prepend it.
3. Text never becomes a control token (`control`), unless the row asks for the token by
   name. In a response, tags such as <think> and </think> are tokens.
4. A reward reads a response up to its stop token, found by token id, without padding,
   BOS and stop tokens, but with every other special token.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlhf_jax.data import tokenization
from rlhf_jax.data.examples import Example, Text
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import messages
from rlhf_jax.data.text.control import Control, RowPieces
from rlhf_jax.data.text.joining import Joining
from rlhf_jax.data.text.messages import OPENING, PLACE, Message, Question, Written
from rlhf_jax.functional.errors import InputError, located
from rlhf_jax.runs import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_jax.data.text.conversations import Conversations


class TextContract:
    """Turns texts into tokens, for one tokenizer and one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int] | None = None,
        receipt: Receipt | None = None,
    ) -> None:
        """Makes the contract of a tokenizer.

        Args:
          stop_ids: tokens that end a response; a response without one gets the first.
            None is the tokenizer's EOS.
          receipt: of the rows; notes those whose texts contain that of a control
            token.
        """
        self.tokenizer, self.receipt = tokenizer, receipt
        eos = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(
            stop_ids if stop_ids else [eos] if isinstance(eos, int) else []
        )
        self._pieces = RowPieces(tokenizer, stop_ids=self.stop_ids, receipt=receipt)
        self._joining = Joining(tokenizer, control=self.control)

    @functools.cached_property
    def _conversations(self) -> Conversations:
        # Imported late, here and below: plain texts need no chat template.
        from rlhf_jax.data.text.conversations import Conversations

        return Conversations(
            self.tokenizer,
            stop_ids=self.stop_ids,
            pieces=self._pieces,
            joining=self._joining,
        )

    @property
    def control(self) -> Control:
        """The control tokens."""
        return self._pieces.control

    @property
    def prefix(self) -> list[int]:
        """The tokens that the tokenizer prepends to a text, such as BOS."""
        return self._joining.prefix

    def prompts(self, questions: Sequence[Question]) -> list[list[int]]:
        """Returns the tokens of prompts, BOS included, up to where a response begins.

        Raises:
          InputError: the chat template rejects the messages, or a row asks for a token
            that the tokenizer does not have; names file and line.
        """
        pieces, heads = [], []
        for question in progress.track(
            questions, "prompts to text", total=len(questions)
        ):
            with located(question.where):
                head, body = (
                    ([], self._conversations.prompt(question))
                    if question.is_chat
                    else self._plain_prompt(question)
                )
            heads.append(head)
            pieces.append(body)
        encoded = self._joining.encode(pieces)
        return [[*head, *ids] for head, ids in zip(heads, encoded, strict=True)]

    def responses(
        self,
        questions: Sequence[Question],
        written: Sequence[Written],
        *,
        prompts: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """Returns the tokens of responses, each with one stop token at its end.

        Args:
          written: the responses: texts, or one message of the assistant if the prompt
            is a conversation.
          prompts: the tokens of the prompts, from `prompts`.

        Raises:
          InputError: a plain text contains a stop token before its end; the chat
            template does not end a response with a stop token, or leaves out a part of
            it; or the prompt is a text and the response messages.
        """
        plain = [i for i, question in enumerate(questions) if not question.is_chat]
        of_plain = self._plain_responses(
            [questions[i] for i in plain],
            [written[i] for i in plain],
            prompts=[prompts[i] for i in plain],
        )
        responses = dict(zip(plain, of_plain, strict=True))
        chats = self._chats(questions, written, turns=[None] * len(questions))
        responses |= {i: [*example.response] for i, example in chats.items()}
        return [responses[i] for i in range(len(questions))]

    def examples(
        self,
        questions: Sequence[Question],
        written: Sequence[Written],
        *,
        turns: Sequence[Sequence[int] | None],
    ) -> list[Text]:
        """Encodes prompts with their responses, and marks the tokens that are learned.

        Args:
          written: the responses, as for `responses`.
          turns: for each conversation the indices of the messages that are learned;
            None for a plain text, and to learn a conversation's last turn only.

        Raises:
          InputError: as `prompts` and `responses`.
        """
        plain = [i for i, question in enumerate(questions) if not question.is_chat]
        asked = [questions[i] for i in plain]
        prompts = self.prompts(asked)
        responses = self.responses(asked, [written[i] for i in plain], prompts=prompts)
        texts: dict[int, Text] = dict(
            zip(plain, map(Example, prompts, responses), strict=True)
        )
        texts |= self._chats(questions, written, turns=turns)
        return [texts[i] for i in range(len(questions))]

    def between(
        self, question: Question, *, chat: bool, room: int | None = None
    ) -> list[int]:
        """Returns the tokens between a sampled stop token and the next response.

        Args:
          question: the observation, with its row's settings; with `chat` a plain text
            is a message of the user.
          chat: whether the chat template writes the observation.
          room: the most tokens; None is no limit.

        Raises:
          InputError: the template rejects the messages after a turn of the assistant.
          OutOfRoom: the observation has more than `room` tokens.
        """
        with located(question.where):
            if not chat:
                pieces = self._pieces.of_observation(str(question.written), question)
                return self._joining.follow(pieces, after=self.stop_ids[:1], room=room)
            ids = iter(self._conversations.observation(question, room=room))
        for number in ids:  # the stop token of the turn before was sampled already
            if number in self.stop_ids:
                break
        return [*ids]

    def ends_turns(self, question: Question) -> bool:
        """Whether the chat template ends the assistant's turns with a stop token.

        Args:
          question: a conversation, whose row's settings the template reads.
        """
        later = question._replace(written=[OPENING])
        try:
            ids = self._conversations.observation(later)
        except InputError:  # the template takes no such turn
            return True
        return not set(self.stop_ids).isdisjoint(ids)

    def turn(self, text: str, *, behind: Question, after: Sequence[int]) -> list[int]:
        """Returns the tokens of a plain response in an episode, stop token included.

        Args:
          behind: the observation that precedes the response.
          after: all tokens before the response.

        Raises:
          InputError: as `responses`.
        """
        with located(behind.where):
            pieces, stop = self._pieces.of_response(text, behind)
            observed = self._pieces.of_observation(str(behind.written), behind)
            last = (observed or [""])[-1]
            body, joined = tokenization.encode(
                self.tokenizer, [last, last + pieces[0]], special=False
            )
            if not body or list(after[-len(body) :]) != body:
                joined = None
            ids = self._joining.behind(
                pieces, after=after, size=len(body), joined=joined
            )
            return self._ended(ids, stop=stop, text=text)

    def chat_turn(self, text: str, *, question: Question) -> list[int]:
        """Returns the tokens of a response in a conversation, whatever precedes it.

        Args:
          question: the row of the response.

        Raises:
          InputError: as `responses`.
        """
        opening = question._replace(written=[OPENING])
        [example] = self._conversations.examples(
            [opening], [[OPENING, messages.of_assistant(text)]], turns=[[1]]
        )
        return list(example.response)

    def written(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the tokens of a text in which control tokens are tokens.

        Such texts are written by a template, or in files of plain text, which separate
        documents by control tokens.

        Args:
          special: whether to prepend the tokenizer's prefix, such as BOS, unless the
            text begins with it, as a conversation of a template does.
        """
        (ids,) = tokenization.encode(self.tokenizer, [text], special=False)
        prefix = self._joining.prefix if special else []
        return ids if ids[: len(prefix)] == prefix else [*prefix, *ids]

    def rendered(
        self, conversation: Sequence[Message], *, continued: bool = False
    ) -> str:
        """Renders a conversation with the chat template, for `written`.

        Args:
          continued: whether the last message is unfinished. If not, and the last
            message is not a response, the text asks for one.

        Raises:
          InputError: the template rejects the messages.
        """
        from rlhf_jax.data.text import chat

        with located("a conversation"):
            return chat.render(self.tokenizer, conversation, continued=continued)

    def _chats(
        self,
        questions: Sequence[Question],
        written: Sequence[Written],
        *,
        turns: Sequence[Sequence[int] | None],
    ) -> dict[int, Text]:
        """Encodes the conversations among the questions; {index of question: text}."""
        chats = [i for i, question in enumerate(questions) if question.is_chat]
        conversations, learned = [], []
        for i in chats:
            question = questions[i]
            if turns[i] is None:
                with located(question.where):
                    messages.check_prompt(question.messages, field="prompt")
            conversations.append([*question.messages, *messages.as_turn(written[i])])
            learned.append(turns[i] or [len(conversations[-1]) - 1])
        asked = [questions[i] for i in chats]
        examples = self._conversations.examples(asked, conversations, turns=learned)
        return dict(zip(chats, examples, strict=True))

    def _plain_prompt(self, question: Question) -> tuple[list[int], list[str]]:
        """Returns (the tokens before the text, the pieces of the text)."""
        first, *others = question.template.split(PLACE)
        text, head = str(question.written), self._joining.prefix
        if first:
            first, head = self._without_bos(first, head)
        else:
            text, head = self._without_bos(text, head)
        cut = self._pieces.of_others(text, question)
        pieces = [first]
        for other in others:
            pieces = [*pieces[:-1], pieces[-1] + cut[0], *cut[1:]]
            pieces[-1] += other
        return head, pieces

    def _without_bos(self, text: str, head: list[int]) -> tuple[str, list[int]]:
        """Removes a written BOS from a text; returns (text, tokens before the text)."""
        bos = self.tokenizer.bos_token_id
        if bos not in head and (not isinstance(bos, int) or bos in self.stop_ids):
            return text, head
        names = self._pieces.control.texts(bos)
        by_hand = next((name for name in names if text.startswith(name)), "")
        if by_hand and bos not in head:
            head = [bos, *head]
        return text[len(by_hand) :], head

    def _plain_responses(
        self,
        questions: Sequence[Question],
        written: Sequence[Written],
        *,
        prompts: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        before, parts = [], []
        for question, text in zip(questions, written, strict=True):
            with located(question.where):
                before.append(self._plain_prompt(question))
                parts.append(self._pieces.of_response(messages.plain(text), question))
        joined = tokenization.encode(
            self.tokenizer,
            [
                body[0] + pieces[0]
                for (_, body), (pieces, _) in zip(before, parts, strict=True)
            ],
            special=False,
        )
        rows = progress.track(
            zip(before, parts, prompts, joined, questions, written, strict=True),
            "responses behind their prompts",
            total=len(questions),
        )
        responses = []
        for (head, body), (pieces, stop), prompt, whole, question, text in rows:
            ids = self._joining.behind(
                pieces,
                after=prompt,
                size=len(prompt) - len(head),
                joined=whole if len(body) == 1 else None,
            )
            with located(question.where):
                responses.append(self._ended(ids, stop=stop, text=str(text)))
        return responses

    def _ended(self, ids: list[int], *, stop: int | None, text: str) -> list[int]:
        """Appends the stop token to a response; InputError if it contains another."""
        if stop is None and ids and ids[-1] in self.stop_ids:  # ordinary text
            ids, stop = ids[:-1], ids[-1]
        inside = next((number for number in ids if number in self.stop_ids), None)
        if inside is not None:
            from rlhf_jax.data.text import chat

            shown = chat.shown(self.tokenizer, [inside])
            raise InputError(
                f"expected a response that holds a stop token at its end"
                f" alone, got {shown} inside {text!r:.60}, where a sampled response"
                " would have ended; cut the response there, or change the stop tokens"
                " in generation_config.json"
            )
        if stop is None:
            if not self.stop_ids:
                tokenization.eos_token_id(self.tokenizer)  # raises: there is none
            stop = self.stop_ids[0]
        return [*ids, stop]
