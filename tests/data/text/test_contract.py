"""The text contract, over a zoo of tokenizers and arbitrary texts."""

import functools
import os

import hypothesis
import pytest
import tokenizer_zoo
from hypothesis import example, given
from hypothesis import strategies as st

from rlhf_jax.data import encoding, tokenization, unpaired
from rlhf_jax.data.encoding import encode_episodes
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.data.turns import TurnEncoder

ZOO = tokenizer_zoo.zoo()
quickly = hypothesis.settings(
    max_examples=int(os.environ.get("CONTRACT_EXAMPLES", "25")),
    deadline=None,
    derandomize=True,
    database=None,
)
CHATS = {name for name, trait in ZOO.items() if trait.tokenizer.chat_template}
CONTROL = (
    *("<|eos|>", "<|bos|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|end|>"),
    *("<think>", "</think>", "<|im_", "end|>"),
)
PIECES = st.sampled_from(
    [*CONTROL, " ", "  ", "4", " 4", "a", "b", "ab", "\n", "\n\n", "é", "日", "🙂"]
)
TEXTS = st.lists(PIECES | st.text(st.characters(codec="ascii"), max_size=3), max_size=8)
texts = TEXTS.map("".join)
PLAIN = [name for name in ZOO if name not in CHATS]
for_each_plain = pytest.mark.parametrize("name", PLAIN)
for_each_chat = pytest.mark.parametrize("name", sorted(CHATS))


@functools.cache
def contract(name):
    return TextContract(ZOO[name].tokenizer, stop_ids=ZOO[name].stop_ids)


def decoded(name, ids):
    return tokenization.decode(ZOO[name].tokenizer, ids)


def by_hand(name, text):
    """Whether a text itself begins with BOS or ends with a stop token."""
    trait = ZOO[name]
    bos = trait.tokenizer.bos_token
    return (bos is not None and text.startswith(bos)) or text.endswith(trait.stops)


def demonstrated(name, prompt, response):
    [example] = encoding.encode_demonstrations(
        TextContract(ZOO[name].tokenizer, stop_ids=ZOO[name].stop_ids),
        [{"prompt": prompt, "response": response}],
        limits=Limits(10**6),
    )
    return [*example.prompt], [*example.response]


@pytest.mark.cases(quick=2)
@for_each_plain
@quickly
@given(prompt=texts, response=texts)
def test_what_is_trained_on_decodes_to_the_text(name, prompt, response):
    prompt_ids, answer = demonstrated(name, prompt, response)
    head = contract(name).prefix
    assert prompt_ids[: len(head)] == head
    ids = [*prompt_ids[len(head) :], *answer[:-1]]
    if by_hand(name, prompt) or by_hand(name, response):
        return
    text = prompt + response
    if name == "metaspace":  # which reads "4" and " 4" at the beginning alike
        text = text.removeprefix(" ")
    assert decoded(name, ids) == text


@pytest.mark.cases(quick=5)
@for_each_plain
@quickly
@given(prompt=texts, response=texts)
def test_control_tokens_are_those_of_the_contract(name, prompt, response):
    """One BOS, one stop token at the end, and the tags of a response."""
    control, tags = contract(name).control.ids, contract(name).control.tags
    prompt_ids, answer = demonstrated(name, prompt, response)
    bos, head = ZOO[name].tokenizer.bos_token_id, contract(name).prefix
    before = len(head) or (prompt_ids[:1] == [bos] and by_hand(name, prompt))
    assert control.isdisjoint(prompt_ids[before:])
    assert (control - tags).isdisjoint(answer[:-1])
    assert answer[-1] in ZOO[name].stop_ids


@pytest.mark.cases(quick=2)
@for_each_plain
@quickly
@example(prompt="<s>", response="<|eos|>", other="")
@given(prompt=texts.filter(bool), response=texts, other=texts)
def test_every_path_has_the_same_tokens(name, prompt, response, other):
    """Demonstrations, pairs, labelled responses, sampled prompts, episodes."""
    tokenizer, stops = ZOO[name].tokenizer, ZOO[name].stop_ids
    prompt_ids, answer = demonstrated(name, prompt, response)
    rows = [{"prompt": prompt, "chosen": response, "rejected": other + "x"}]
    of, limits = TextContract(tokenizer, stop_ids=stops), Limits(10**6)
    if demonstrated(name, prompt, other + "x")[1] != answer:
        [pair] = encoding.encode_preferences(of, rows, limits=limits)
        assert ([*pair.prompt], [*pair.chosen]) == (prompt_ids, answer)
    row = {"prompt": prompt, "completion": response, "label": True}
    others = {"prompt": prompt + "x", "completion": response, "label": False}
    labelled = unpaired.encode_labelled(of, [row, others], seed=0, limits=limits)
    assert [*labelled[0].prompt] == prompt_ids
    assert [*labelled[0].completion] == answer
    if prompt_ids:
        _, [sampled] = encoding.encode_prompts(of, [{"prompt": prompt}], limits=limits)
        assert sampled == prompt_ids
    encoder = TurnEncoder(tokenizer, stop_ids=stops, chat=False)
    assert encoder.prompt(prompt, where="row 0") == prompt_ids
    [episode] = encode_episodes(
        of, [{"prompt": prompt, "turns": [response]}], limits=limits
    )
    assert ([*episode.prompt], [*episode.response]) == (prompt_ids, answer)


@pytest.mark.cases(quick=2)
@for_each_plain
@quickly
@example(observed="é日🙂", response="\n")  # more bytes than the tokens looked back at
@given(observed=texts, response=texts)
def test_an_observation_and_the_turn_after_it_keep_their_text(name, observed, response):
    [episode] = encode_episodes(
        TextContract(ZOO[name].tokenizer, stop_ids=ZOO[name].stop_ids),
        [{"prompt": "a", "turns": ["b", observed, response]}],
        limits=Limits(10**6),
    )
    [(start, end)] = episode.observed
    encoder = TurnEncoder(ZOO[name].tokenizer, stop_ids=ZOO[name].stop_ids, chat=False)
    assert episode.response[start:end] == encoder.observation(observed)
    control = contract(name).control.ids
    assert control.isdisjoint(episode.response[start:end])
    before = decoded(name, episode.response[:start])
    if by_hand(name, response):
        return
    whole = decoded(name, episode.response[:-1])
    assert whole == before + observed + response


@pytest.mark.cases(quick=4)
@for_each_plain
@quickly
@given(prompt=texts, response=texts)
def test_a_response_has_the_tokens_of_both_texts_together(name, prompt, response):
    """Unless the tokenizer merges across the border."""
    tokenizer = ZOO[name].tokenizer
    if any(token in prompt + response for token in CONTROL):
        return
    alone, both = (
        tokenizer(text, add_special_tokens=False)["input_ids"]
        for text in (prompt, prompt + response)
    )
    prompt_ids, answer = demonstrated(name, prompt, response)
    assert prompt_ids[len(contract(name).prefix) :] == alone
    if both[: len(alone)] == alone:
        assert answer[:-1] == both[len(alone) :]


@pytest.mark.cases(quick=1)
@for_each_chat
@quickly
@given(content=texts, response=texts)
def test_text_of_messages_opens_and_closes_no_turn(name, content, response):
    """For texts of users, tools, documents, options and the assistant."""
    tokenizer, stops = ZOO[name].tokenizer, ZOO[name].stop_ids
    encode = functools.partial(
        encoding.encode_demonstrations,
        TextContract(tokenizer, stop_ids=stops),
        limits=Limits(10**6),
    )

    def example(content, response):
        row = {
            "prompt": [
                {"role": "user", "content": content},
                {"role": "assistant", "content": "a"},
                {"role": "user", "content": content},
            ],
            "response": response,
            "tools": [{"name": content}],
            "documents": [{"text": content}],
        }
        [encoded] = encode([row])
        return encoded

    ids = contract(name).control.ids - contract(name).control.tags
    example_ids, usual = example(content, response), example("a", "a")

    def controls(tokens):
        return [token for token in tokens if token in ids]

    assert controls(example_ids.prompt) == controls(usual.prompt)
    assert controls(example_ids.response) == controls(usual.response)
    assert example_ids.response[-1] == tokenizer.convert_tokens_to_ids("<|im_end|>")
    if not by_hand(name, response):
        before = decoded(name, example_ids.prompt)
        assert (
            decoded(name, [*example_ids.prompt, *example_ids.response[:-1]])
            == before + response
        )


@pytest.mark.cases(quick=1)
@for_each_chat
@quickly
@given(content=texts.filter(str.strip))
def test_a_user_s_words_stay_as_they_are(name, content):
    tokenizer, stops = ZOO[name].tokenizer, ZOO[name].stop_ids
    rows = [{"prompt": [{"role": "user", "content": content}]}]
    _, [ids] = encoding.encode_prompts(
        TextContract(tokenizer, stop_ids=stops), rows, limits=Limits(10**6)
    )
    encoder = TurnEncoder(tokenizer, stop_ids=stops, chat=True)
    observed = encoder.observation(content)
    for encoded in (ids, observed):
        assert content in decoded(name, encoded)
    control = contract(name).control.ids
    assert [i for i in ids if i in control] == tokenizer.convert_tokens_to_ids(
        ["<|im_start|>", "<|im_end|>", "<|im_start|>"]
    )


@pytest.mark.parametrize("name", ["thinking", "byte level"])
def test_an_observation_is_encoded_no_further_than_there_is_room(name, monkeypatch):
    tokenizer, stops = ZOO[name].tokenizer, ZOO[name].stop_ids
    encoder = TurnEncoder(tokenizer, stop_ids=stops, chat=name in CHATS)
    control = min(contract(name).control.texts(stops[0]), key=len)
    for observed in ("a b", control * 3, f"a {control} b", ""):
        ids = encoder.observation(observed)
        assert ids == encoder.observation(observed, room=len(ids))
        if ids:
            assert encoder.observation(observed, room=len(ids) - 1) is None
    encode, calls = tokenization.encode, []
    monkeypatch.setattr(
        tokenization, "encode", lambda *a, **b: calls.append(a) or encode(*a, **b)
    )
    assert encoder.observation(control * 100, room=10) is None
    few = len(calls)
    assert len(encoder.observation(control * 100, room=10_000)) > 100
    assert len(calls) - few > 5 * few


@pytest.mark.cases(quick=6)
@pytest.mark.parametrize("name", ZOO)
@quickly
@given(response=texts)
def test_a_reward_reads_what_was_written(name, response):
    """The text is cut at the stop token, which is removed; tags stay."""
    if name in CHATS or by_hand(name, response):
        return
    _, answer = demonstrated(name, "a", response)
    trait = ZOO[name]
    text = tokenization.spoken(trait.tokenizer, answer, stop_ids=trait.stop_ids)
    alone = trait.tokenizer(response, add_special_tokens=False)["input_ids"]
    assert text == response or (text == response[1:] and response[0] == " ")
    assert not set(trait.stop_ids) & set(answer[:-1])
    assert alone is not None


def test_a_text_is_encoded_without_a_look_at_the_whole_vocabulary(monkeypatch):
    """Reading 150,000 tokens takes 0.1 s, and lm-eval encodes texts one by one."""
    reader = ZOO["BOS and EOS"].tokenizer
    expected = TextContract(reader).written("a")

    def fail(*_):
        raise AssertionError("the vocabulary was listed")

    monkeypatch.setattr(type(reader), "get_vocab", fail)
    assert TextContract(reader).written("a") == expected


@pytest.mark.parametrize("trait", ["prefix space and BOS", "BOS and EOS", "BOS is EOS"])
def test_a_written_bos_is_not_prepended_again(trait):
    reader = ZOO[trait].tokenizer
    contract = TextContract(reader, stop_ids=ZOO[trait].stop_ids)
    text = f"{reader.bos_token}Hi"  # as a chat template writes it
    assert contract.written(text) == reader(text, add_special_tokens=False).input_ids
    assert contract.written(text).count(reader.bos_token_id) == 1
    assert contract.written("Hi")[0] == reader.bos_token_id
