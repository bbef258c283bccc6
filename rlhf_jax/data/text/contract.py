"""The text contract: the only place where text becomes tokens and tokens become text.

    prompt      [BOS] Q: 2+2? A:       what the tokenizer puts in front, never behind
    response    4 EOS                  the tokens that it has in "Q: 2+2? A: 4"

Every trainer, reward, verifier, environment and evaluation goes by these rules:

1. Tokens decode to the text that was written. A prompt has the tokens that it has
   alone, as when a response to it is sampled. A response has those of prompt +
   response past the prompt's. Where the tokenizer merges across the border (the prompt
   ends in " ", the response begins with "4", and " 4" is one token), the prompt keeps
   its own tokens, and the response has those that continue it.
2. BOS stands once. Nothing that the tokenizer puts behind a text ends a prompt. A
   response ends with one stop token and holds no other. Written by hand, a stop token
   at the end of a response is this one, and a BOS at the beginning of a plain prompt is
   that one, unless it is a stop token, too, which the tokenizer puts nowhere.
3. Text never becomes a control token (`control`), unless the row asks for the token by
   its name. Of a response tags such as <think> and </think> are tokens.
4. What a reward reads of a response is cut by token id at its stop token. Padding, BOS
   and stop tokens are left out, and every other special token is kept.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rlhf_jax.data import tokenization
from rlhf_jax.data.examples import Episode, Example, Text
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.text import chat, messages
from rlhf_jax.data.text.control import Control, Cutter
from rlhf_jax.data.text.messages import Message
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import progress

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Written = str | list[Message]  # a text, or messages for the chat template
PRIVATE = range(0xE000, 0x110000)  # where characters of no meaning begin
PROBES = ("a", "0", "x", ".", "\n", "the")  # texts that most tokenizers have tokens for
ANCHORS = ("\n", ".", "a", "0", " ")  # what a text in the middle may follow
CONTEXT = 8  # tokens before a text: more than any character is made of


PLACE = "{question}"  # where a row's text stands in a template of plain text


class Asked(NamedTuple):
    """A prompt, with what its row says of how it is to be read."""

    written: Written
    where: str = "a prompt"
    """Its file and line, for errors."""
    variables: Mapping[str, Any] = {}  # nobody writes to it
    """What the chat template reads besides the messages: tools, documents, options."""
    control: tuple[str, ...] = ()
    """Control tokens that are tokens in this row's texts, by name."""
    template: str = PLACE
    """Of a plain prompt, with the row's text in place of {question}. It is the run's
    own, so that a control token in it is one."""

    @property
    def messages(self) -> list[Message]:
        """Of a conversation."""
        assert not isinstance(self.written, str)
        return self.written


def asked(row: Row, *, field: str, where: str) -> Asked:
    """The prompt in a field of a row, with the fields that say how to read it.

    Raises:
      InputError: one of these fields is not what it should be; names file and line.
    """
    variables = messages.variables(row, where=where)
    names = row.get(messages.CONTROL_TOKENS)
    names = () if names is None else names
    if not isinstance(names, list | tuple) or not all(
        isinstance(name, str) for name in names
    ):
        raise InputError(
            f"{where}: expected a list of tokens in {messages.CONTROL_TOKENS!r}, such"
            f' as ["<|im_start|>"], got {names!r:.60}; correct the row'
        )
    return Asked(row[field], where, variables, tuple(names))


class TextContract:
    """Texts to tokens and tokens to texts, for one tokenizer and one model."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        stop_ids: Sequence[int] | None = None,
    ) -> None:
        """Of a tokenizer.

        Args:
          stop_ids: tokens that end a response, of which the first is given to a text
            without one; None is the tokenizer's EOS.
        """
        self.tokenizer = tokenizer
        eos = tokenizer.eos_token_id
        self.stop_ids: tuple[int, ...] = tuple(
            stop_ids if stop_ids else [eos] if isinstance(eos, int) else []
        )
        self.control = Control(tokenizer, stop_ids=self.stop_ids)

    # Text to tokens.

    def prompts(self, asked: Sequence[Asked]) -> list[list[int]]:
        """The tokens of prompts, BOS included, up to where a response begins.

        Raises:
          InputError: messages that the chat template does not take, or a row that asks
            for a token that the tokenizer does not have; names file and line.
        """
        pieces, heads = [], []
        for each in progress.track(asked, "prompts to text", total=len(asked)):
            if isinstance(each.written, str):
                head, body = self._plain_prompt(each)
                heads.append(head)
                pieces.append(body)
            else:
                heads.append([])
                pieces.append(self._chat_prompt(each))
        encoded = self._encode(pieces)
        return [[*head, *ids] for head, ids in zip(heads, encoded, strict=True)]

    def responses(
        self,
        asked: Sequence[Asked],
        written: Sequence[Written],
        *,
        prompts: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        """The tokens of responses to `asked`, each with one stop token at its end.

        Args:
          written: texts; to messages also messages of one turn of the assistant.
          prompts: of `prompts`.

        Raises:
          InputError: a plain text holds a stop token inside, or the chat template does
            not end a response with a stop token, or leaves out a part of it.
        """
        responses: dict[int, list[int]] = {}
        plain = [i for i, each in enumerate(asked) if isinstance(each.written, str)]
        of_plain = self._plain_responses(
            [asked[i] for i in plain],
            [str(written[i]) for i in plain],
            prompts=[prompts[i] for i in plain],
        )
        responses.update(zip(plain, of_plain, strict=True))
        chats = [i for i, each in enumerate(asked) if not isinstance(each.written, str)]
        conversations = [
            [*asked[i].messages, *messages.as_turn(written[i])] for i in chats
        ]
        of_chats = self._conversations(
            [asked[i] for i in chats],
            conversations,
            turns=[[len(each) - 1] for each in conversations],
        )
        for i, example in zip(chats, of_chats, strict=True):
            responses[i] = list(example.response)
        return [responses[i] for i in range(len(asked))]

    def examples(
        self,
        asked: Sequence[Asked],
        written: Sequence[Written],
        *,
        turns: Sequence[Sequence[int] | None],
    ) -> list[Text]:
        """Prompts with their responses, and which tokens of them are learned.

        Args:
          written: responses, as `responses` takes them.
          turns: of each conversation the messages that are learned, counted from its
            first; None for a plain text, and for a conversation's last turn alone.

        Raises:
          InputError: as `prompts` and `responses`.
        """
        several = [i for i, each in enumerate(turns) if each is not None]
        single = [i for i, each in enumerate(turns) if each is None]
        texts: dict[int, Text] = {}
        prompts = self.prompts([asked[i] for i in single])
        responses = self.responses(
            [asked[i] for i in single], [written[i] for i in single], prompts=prompts
        )
        texts.update(zip(single, map(Example, prompts, responses), strict=True))
        of_several = self._conversations(
            [asked[i] for i in several],
            [[*asked[i].messages, *messages.as_turn(written[i])] for i in several],
            turns=[turns[i] or [] for i in several],
        )
        texts.update(zip(several, of_several, strict=True))
        return [texts[i] for i in range(len(asked))]

    def between(self, written: Written, *, where: str, chat: bool) -> list[int]:
        """The tokens between a sampled stop token and the next response.

        Args:
          written: what was observed; a plain text is a message of the user with `chat`.
          where: whose observation it is, for errors.
          chat: whether the chat template writes it.

        Raises:
          InputError: messages that the template does not take after a turn of the
            assistant.
        """
        if not chat:
            pieces = self.control.cutter().pieces(str(written))
            return self._follow(pieces, after=self.stop_ids[:1])
        ids = iter(self._observation(written, where=where))
        for number in ids:  # what the template writes up to its stop token is sampled
            if number in self.stop_ids:
                break
        return [*ids]

    def turn(
        self, text: str, *, where: str, after: Sequence[int], before: str = ""
    ) -> list[int]:
        """The tokens of a plain response within an episode, its stop token included.

        Args:
          after: the tokens before it.
          before: the text of the last of these; "" where a stop token is the last.

        Raises:
          InputError: as `responses`.
        """
        pieces, stop = self._response_pieces(text, Asked(before, where))
        last = (self.control.cutter().pieces(before) or [""])[-1]
        body, joined = tokenization.encode(
            self.tokenizer, [last, last + pieces[0]], special=False
        )
        if not body or list(after[-len(body) :]) != body:
            joined = None
        ids = self._continue(pieces, after=after, size=len(body), joined=joined)
        return self._ended(ids, stop=stop, where=where, text=text)

    def chat_turn(self, text: str, *, where: str) -> list[int]:
        """The tokens of a response as the chat template writes it, whatever precedes.

        Raises:
          InputError: as `responses`.
        """
        opening = Asked([OPENING], where)
        [example] = self._conversations(
            [opening], [[OPENING, messages.said(text)]], turns=[[1]]
        )
        return list(example.response)

    def written(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text that is written for the tokenizer, as a template's is.

        What stands in it as a control token is that token. Files of plain text
        separate their documents by such.

        Args:
          special: whether the tokenizer's own tokens, as BOS, stand in front.
        """
        (ids,) = tokenization.encode(self.tokenizer, [text], special=False)
        return [*self.prefix, *ids] if special else ids

    def rendered(
        self, conversation: Sequence[Message], *, continued: bool = False
    ) -> str:
        """The chat template's text of a conversation, for `written`.

        Args:
          continued: whether the last message goes on; otherwise a response is asked
            for, unless the last message is one.

        Raises:
          InputError: messages that the template does not take.
        """
        return chat.render(
            self.tokenizer, conversation, where="a conversation", continued=continued
        )

    def asks_for(self, each: Asked) -> frozenset[int]:
        """The control tokens that a row asks for by name.

        Raises:
          InputError: the tokenizer has no such token.
        """
        if not each.control:
            return frozenset()
        vocabulary = self.tokenizer.get_vocab()
        for name in each.control:
            if name not in vocabulary:
                raise InputError(
                    f"{each.where}: expected tokens of the tokenizer in"
                    f" {messages.CONTROL_TOKENS!r}, got {name!r:.60}, which it does not"
                    " have; correct the row"
                )
        return frozenset(vocabulary[name] for name in each.control)

    # What is left of the tokenizer's own ways.

    @functools.cached_property
    def prefix(self) -> list[int]:
        """What the tokenizer puts in front of a text, as BOS."""
        ids = sorted(set(self.tokenizer.get_vocab().values()) - self.control.ids)
        own = [tokenization.decode(self.tokenizer, [number]) for number in ids[:4]]
        for probe in (*PROBES, *own):
            try:
                (plain,) = tokenization.encode(self.tokenizer, [probe], special=False)
                (whole,) = tokenization.encode(self.tokenizer, [probe], special=True)
            except Exception:  # no token for this one: tokenizers raises bare Exception
                continue
            for at in range(len(whole) - len(plain) + 1):
                if plain and whole[at : at + len(plain)] == plain:
                    return whole[:at]
        return []

    def _plain_prompt(self, each: Asked) -> tuple[list[int], list[str]]:
        """(the tokens in front of the text, the text in pieces)."""
        first, *others = each.template.split(PLACE)
        text, head = str(each.written), self.prefix
        if first:
            first, head = self._without_bos(first, head)
        else:
            text, head = self._without_bos(text, head)
        cut = self.control.cutter(self.asks_for(each)).pieces(text) or [""]
        pieces = [first]
        for other in others:
            pieces = [*pieces[:-1], pieces[-1] + cut[0], *cut[1:]]
            pieces[-1] += other
        return head, pieces

    def _without_bos(self, text: str, head: list[int]) -> tuple[str, list[int]]:
        """A text without the BOS that was written at its beginning, and what begins."""
        bos = self.tokenizer.bos_token_id
        if bos not in head and (not isinstance(bos, int) or bos in self.stop_ids):
            return text, head
        names = self.control.texts(bos)
        by_hand = next((name for name in names if text.startswith(name)), "")
        if by_hand and bos not in head:
            head = [bos, *head]
        return text[len(by_hand) :], head

    def _plain_responses(
        self,
        asked: Sequence[Asked],
        written: Sequence[str],
        *,
        prompts: Sequence[Sequence[int]],
    ) -> list[list[int]]:
        before = [self._plain_prompt(each) for each in asked]
        parts = [
            self._response_pieces(text, each)
            for text, each in zip(written, asked, strict=True)
        ]
        joined = tokenization.encode(
            self.tokenizer,
            [
                body[0] + pieces[0]
                for (_, body), (pieces, _) in zip(before, parts, strict=True)
            ],
            special=False,
        )
        return [
            self._ended(
                self._continue(
                    pieces,
                    after=prompt,
                    size=len(prompt) - len(head),
                    joined=whole if len(body) == 1 else None,
                ),
                stop=stop,
                where=each.where,
                text=text,
            )
            for (head, body), (
                pieces,
                stop,
            ), prompt, whole, each, text in progress.track(
                zip(before, parts, prompts, joined, asked, written, strict=True),
                "responses behind their prompts",
                total=len(asked),
            )
        ]

    def _response_pieces(self, text: str, each: Asked) -> tuple[list[str], int | None]:
        """A response in pieces, and the stop token that was written at its end."""
        text, stop = self._without_stop(text)
        allowed = self.control.tags | self.asks_for(each)
        return self.control.cutter(allowed).pieces(text) or [""], stop

    def _without_stop(self, text: str) -> tuple[str, int | None]:
        """A response without the stop token that was written at its end, and that."""
        by_hand = {
            name: number
            for number in self.stop_ids
            if number in self.control.ids
            for name in self.control.texts(number)
            if text.endswith(name)
        }
        if not by_hand:
            return text, None
        name = max(by_hand, key=len)
        return text[: -len(name)], by_hand[name]

    def _ended(
        self, ids: list[int], *, stop: int | None, where: str, text: str
    ) -> list[int]:
        """A response with one stop token, at its end."""
        if stop is None and ids and ids[-1] in self.stop_ids:  # an ordinary token
            ids, stop = ids[:-1], ids[-1]
        inside = next((number for number in ids if number in self.stop_ids), None)
        if inside is not None:
            shown = chat.shown(self.tokenizer, [inside])
            raise InputError(
                f"{where}: expected a response that holds a stop token at its end"
                f" alone, got {shown} inside {text!r:.60}, where a sampled response"
                " would have ended; cut the response there, or change the stop tokens"
                " in generation_config.json"
            )
        if stop is None:
            if not self.stop_ids:
                tokenization.eos_token_id(self.tokenizer)  # says that there is none
            stop = self.stop_ids[0]
        return [*ids, stop]

    def _continue(
        self,
        pieces: Sequence[str],
        *,
        after: Sequence[int],
        size: int,
        joined: list[int] | None,
    ) -> list[int]:
        """The tokens of a text, in pieces, that follows another: rule 1.

        Args:
          after: all tokens before it.
          size: how many of these are of the text before it.
          joined: the tokens of that text and the first of `pieces` as one text; None
            where they stand apart.
        """
        if joined is None or joined[:size] != list(after[len(after) - size :]):
            return self._follow(pieces, after=after)
        ids = joined[size:]
        return [*ids, *self._follow(pieces[1:], after=[*after, *ids])]

    def _follow(self, pieces: Sequence[str], *, after: Sequence[int]) -> list[int]:
        """The tokens of pieces that stand apart from what they follow."""
        ids: list[int] = []
        for piece in pieces:
            ids += self._middle(piece, after=[*after, *ids])
        return ids

    def _middle(self, text: str, *, after: Sequence[int]) -> list[int]:
        """Tokens of a text that decode to it behind others, and to no space more.

        Tokenizers as Llama 2's put a space in front of what they encode. Where another
        text stands in front of it, they do not.
        """
        if not text:
            return []
        size = CONTEXT
        while tokenization.decode(self.tokenizer, after[-size:]).startswith("�"):
            if size >= len(after):
                break
            size += CONTEXT  # it began within a character
        context = list(after[-size:])
        # A template's control tokens may follow, which are not decoded to their text.
        text_alone = text[: self.control.cutter().first(text)]
        expected = tokenization.decode(self.tokenizer, context) + text_alone
        (alone,) = tokenization.encode(self.tokenizer, [text], special=False)
        for ids in (alone, *self._behind_anchors(text)):
            whole = tokenization.decode(self.tokenizer, [*context, *ids])
            if whole.startswith(expected) and (text_alone != text or whole == expected):
                return ids
        return alone  # of a tokenizer that does not keep texts

    def _behind_anchors(self, text: str) -> Iterator[list[int]]:
        for anchor in ANCHORS:
            try:
                before, whole = tokenization.encode(
                    self.tokenizer, [anchor, anchor + text], special=False
                )
            except Exception:  # no token for the anchor
                continue
            if whole[: len(before)] == before:
                yield whole[len(before) :]

    def _encode(self, texts: Sequence[Sequence[str]]) -> list[list[int]]:
        """Tokens of texts in pieces, of which none becomes a control token."""
        firsts = [pieces[0] for pieces in texts]
        encoded = tokenization.encode(self.tokenizer, firsts, special=False)
        return [
            ids if len(pieces) == 1 else [*ids, *self._follow(pieces[1:], after=ids)]
            for ids, pieces in zip(encoded, texts, strict=True)
        ]

    # Conversations, as the chat template writes them.

    def _chat_prompt(self, each: Asked) -> list[str]:
        [text], cut = self._rendered([each.messages], each)
        return text.split(cut)

    def _conversations(
        self,
        asked: Sequence[Asked],
        conversations: Sequence[list[Message]],
        *,
        turns: Sequence[Sequence[int]],
    ) -> list[Text]:
        """Conversations, of which some turns of the assistant are learned."""
        rendered = []
        rows = zip(asked, conversations, turns, strict=True)
        for each, whole, learned in progress.track(
            rows, "conversations to text", total=len(asked)
        ):
            beginnings = [whole[:turn] for turn in learned]
            texts, cut = self._rendered([whole, *beginnings], each)
            for turn, text in zip(learned, texts[1:], strict=True):
                content = self._without_stop(messages.content([whole[turn]]))[0]
                chat.check_written(
                    texts[0].replace(cut, ""),
                    beginning=text.replace(cut, ""),
                    content=content,
                    where=each.where,
                )
            rendered.append((texts, cut))
        encoded = iter(
            self._encode([text.split(cut) for texts, cut in rendered for text in texts])
        )
        return [
            self._learned(
                texts,
                [next(encoded) for _ in texts],
                cut=cut,
                to_the_end=learned[-1] == len(whole) - 1,
                where=each.where,
            )
            for (texts, cut), each, whole, learned in zip(
                rendered, asked, conversations, turns, strict=True
            )
        ]

    def _learned(
        self,
        texts: Sequence[str],
        encoded: Sequence[list[int]],
        *,
        cut: str,
        to_the_end: bool,
        where: str,
    ) -> Text:
        """A conversation's tokens, of which those of some turns are learned.

        Args:
          texts: of the whole, and of its beginnings up to each turn that is learned.
          encoded: their tokens.
          cut: what stands between two pieces of a text.
          to_the_end: whether the last turn is learned.
        """
        beginnings = encoded[1:]
        ids, spans = list(beginnings[0]), []
        following = zip([*encoded[2:], encoded[0]], [*texts[2:], texts[0]], strict=True)
        for beginning, (tokens, text) in zip(texts[1:], following, strict=True):
            if tokens[: len(ids)] == ids:
                part = tokens[len(ids) :]
            else:  # the tokenizer merges across the border: rule 1
                part = self._follow(text[len(beginning) :].split(cut), after=ids)
            last = to_the_end and text is texts[0]
            size = chat.turn_size(
                self.tokenizer,
                part,
                stop_ids=self.stop_ids,
                last=last,
                where=where,
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

    def _observation(self, written: Written, *, where: str) -> list[int]:
        """What the template writes behind a turn of the assistant."""
        observed = messages.of_user(written)
        [text], cut = self._rendered([observed], Asked(observed, where), behind=True)
        [ids] = self._encode([text.split(cut)])
        return ids

    def _rendered(
        self,
        conversations: Sequence[Sequence[Message]],
        each: Asked,
        *,
        behind: bool = False,
    ) -> tuple[list[str], str]:
        """What the template writes of conversations, and of its request for more.

        Args:
          conversations: of texts, and of whatever else JSON has, such as calls of
            tools.
          each: the row that they are of.
          behind: they follow a turn of the assistant, and what is written up to its
            text is left out.

        Returns:
          Texts, and the character that cuts them into pieces.
        """
        variables = dict(each.variables)
        used = json.dumps([*conversations, variables], ensure_ascii=False, default=str)
        mark, cut = _unused(set(used))
        allowed = self.asks_for(each)
        other = self.control.cutter(allowed)
        own = self.control.cutter(allowed | self.control.tags)

        def apart(value: Any, cutter: Cutter) -> Any:
            if isinstance(value, str):
                return cut.join(cutter.pieces(value))
            if isinstance(value, dict):  # as a call of a tool
                return {
                    apart(key, cutter): apart(said, cutter)
                    for key, said in value.items()
                }
            if isinstance(value, list):
                return [apart(part, cutter) for part in value]
            return value

        def turn(message: Message) -> Message:
            if message.get("role") != messages.ASSISTANT:
                return apart(messages.unmarked(message), other)
            content = self._without_stop(message.get("content") or "")[0]
            return apart(messages.unmarked(message) | {"content": content}, own)

        texts = []
        for conversation in conversations:
            turns = [turn(message) for message in conversation]
            if behind:
                turns = [OPENING, messages.said(mark), *turns]
            text = chat.render(
                self.tokenizer,
                turns,
                where=each.where,
                variables=apart(variables, other),
            )
            texts.append(text.rpartition(mark)[2] if behind else text)
        return texts, cut


OPENING = {"role": "user", "content": "Hi"}  # to whom a turn responds


def _unused(used: set[str]) -> tuple[str, str]:
    """Two characters that stand in no text of these."""
    free = (chr(number) for number in PRIVATE if chr(number) not in used)
    return next(free), next(free)
