"""The turns of a conversation that are trained on, and their tokens."""

import json

import numpy as np
import pytest
import tokenizer_zoo

from rlhf_jax.data import batches, encoding, files, packing, tokenization
from rlhf_jax.data.encoding import encode_episodes
from rlhf_jax.data.examples import Episode, Example
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.functional.checks import InputError

CHAT = tokenizer_zoo.zoo()["chat"]
THINKING = tokenizer_zoo.zoo()["thinking"]


def user(text):
    return {"role": "user", "content": text}


def assistant(text, **mark):
    return {"role": "assistant", "content": text} | mark


TALK = [
    user("a"),
    assistant("FIRST"),
    user("b"),
    assistant("SECOND"),
    user("c"),
    assistant("THIRD"),
]


def encoded(row, *, trait=CHAT, **options):
    [example] = encoding.encode_demonstrations(
        TextContract(trait.tokenizer, stop_ids=trait.stop_ids),
        [row],
        limits=Limits(999),
        **options,
    )
    return example


def row_of(messages):
    return {"prompt": messages[:-1], "response": messages[-1:]}


def learned(example, *, trait=CHAT):
    """The trained texts, one per contiguous span."""
    tokens = np.array([*example.prompt, *example.response])
    trained = np.array(example.trained)
    starts = np.flatnonzero(trained[1:] != trained[:-1]) + 1
    runs = zip(np.split(tokens, starts), np.split(trained, starts), strict=True)
    return [
        tokenization.decode(trait.tokenizer, run.tolist()) for run, on in runs if on[0]
    ]


def whole(messages, *, trait=CHAT):
    ids = trait.tokenizer.apply_chat_template(
        messages, tokenize=True, return_dict=False
    )
    return ids[:-1]  # but for the line end, which begins the next turn


@pytest.mark.parametrize(
    ("which", "expected"),
    [("last", ["THIRD"]), ("all", ["FIRST", "SECOND", "THIRD"])],
)
def test_the_last_turn_or_all(which, expected):
    example = encoded(row_of(TALK), assistant_turns=which)
    assert learned(example) == [f"{text}<|im_end|>" for text in expected]
    assert [*example.prompt, *example.response] == whole(TALK)
    kind = Example if which == "last" else Episode
    assert isinstance(example, kind)


@pytest.mark.parametrize("mark", ["weight", "train", "loss_mask"])
@pytest.mark.parametrize("which", ["last", "all", "marked"])
def test_a_mark_goes_before_the_option(mark, which):
    talk = [
        *(user("a"), assistant("FIRST", **{mark: 1})),
        *(user("b"), assistant("SECOND", **{mark: 0})),
        *(user("c"), assistant("THIRD", **{mark: None})),
    ]
    example = encoded(row_of(talk), assistant_turns=which)
    third = [] if which == "marked" else ["THIRD<|im_end|>"]
    assert learned(example) == ["FIRST<|im_end|>", *third]
    ids = [*example.prompt, *example.response]
    assert ids == whole(TALK)[: len(ids)]  # the mark is not the template's


def test_the_last_turn_may_be_marked_not_to_be_learned():
    talk = [
        *TALK[:1],
        assistant("FIRST", train=True),
        user("b"),
        assistant("SECOND", weight=0),
    ]
    example = encoded(row_of(talk))
    assert learned(example) == ["FIRST<|im_end|>"]
    assert isinstance(example, Example)
    assert [*example.prompt, *example.response] == whole(TALK[:2])


@pytest.mark.parametrize(
    ("talk", "which", "message"),
    [
        (
            [user("a"), assistant("A")],
            "marked",
            r"learned, got none, by .* 'marked' turns",
        ),
        ([user("a"), assistant("A", weight=0)], "all", r"got none, by the marks"),
        (
            [user("a"), assistant("A", weight=0.5)],
            "last",
            r"0 or 1 in the marks .* 0.5",
        ),
        (
            [user("a") | {"train": 1}, assistant("A")],
            "last",
            r"the assistant .* 'user'",
        ),
        (
            [user("a"), assistant("A", train=1, weight=0)],
            "last",
            r"0 or 1 in the marks .* the same in all",
        ),
    ],
)
def test_marks_that_cannot_be_meant(talk, which, message):
    with pytest.raises(InputError, match=rf"row 0 \(from 0\): .*{message}"):
        encoded(row_of(talk), assistant_turns=which)


def test_pairs_learn_their_responses_alone():
    """A mark that agrees is allowed; one that asks for more is refused."""

    def pair(prompt, **mark):
        row = {"prompt": prompt, "chosen": [assistant("A", **mark)], "rejected": "B"}
        return encoding.encode_preferences(
            TextContract(CHAT.tokenizer, stop_ids=CHAT.stop_ids),
            [row],
            limits=Limits(99),
        )

    [plain] = pair(TALK[:3])
    assert pair([user("a"), assistant("FIRST", weight=0), user("b")], weight=1) == [
        plain
    ]
    with pytest.raises(InputError, match="got an earlier turn that is marked to be"):
        pair([user("a"), assistant("FIRST", weight=1), user("b")])
    with pytest.raises(InputError, match="got one that is marked not to be"):
        pair(TALK[:3], weight=0)


def test_a_template_that_leaves_out_what_is_to_be_learned():
    """Like Qwen3's, which writes the thoughts of the last turn only."""
    thought = assistant("<think>hm</think>\nFIRST")
    talk = [user("a"), thought, user("b"), assistant("SECOND")]
    with pytest.raises(InputError, match="leaves out a part of '<think>hm</think>"):
        encoded(row_of(talk), trait=THINKING, assistant_turns="all")
    example = encoded(row_of(talk), trait=THINKING)
    assert learned(example, trait=THINKING) == ["SECOND<|im_end|>"]
    last = encoded(row_of(talk[:2]), trait=THINKING)
    think = THINKING.tokenizer.convert_tokens_to_ids("<think>")
    assert last.response[0] == think


def test_a_turn_whose_beginning_merges_with_the_template_s_end():
    """By rule 1, the prompt keeps the tokens that it has in sampling."""
    talk = [user("a"), assistant("\n\nFIRST"), user("b"), assistant("\n\nSECOND")]
    tokenizer = CHAT.tokenizer
    example = encoded(row_of(talk), assistant_turns="all")
    assert learned(example) == ["\n\nFIRST<|im_end|>", "\n\nSECOND<|im_end|>"]
    ids = [*example.prompt, *example.response]
    assert ids != whole(talk)
    assert tokenization.decode(tokenizer, ids) == tokenizer.decode(whole(talk))
    [prompt] = encoding.encode_prompts(
        TextContract(tokenizer, stop_ids=CHAT.stop_ids),
        [{"prompt": talk[:1]}],
        limits=Limits(99),
    )[1]
    assert [*example.prompt] == prompt
    start = len(prompt) + example.observed[0][1]
    [second] = encoding.encode_prompts(
        TextContract(tokenizer, stop_ids=CHAT.stop_ids),
        [{"prompt": talk[2:3]}],
        limits=Limits(99),
    )[1]
    assert ids[start - len(second) : start] == second


def test_batches_and_packed_rows_read_the_mask():
    example = encoded(row_of(TALK), assistant_turns="all")
    [batch] = batches.sequences_in_order([example], batch_size=1, pad_id=0)
    np.testing.assert_array_equal(batch.response_mask[0], example.trained)
    [row] = packing.pack_examples([example], width=200)
    assert [bool(on) for on in row.response] == example.trained


def test_whole_conversations_of_a_file(tmp_path):
    file = tmp_path / "talks.jsonl"
    file.write_text(json.dumps({"messages": TALK}) + "\n")
    [example] = encoding.encode_demonstrations(
        TextContract(CHAT.tokenizer),
        files.read_demonstrations(file),
        limits=Limits(999),
        assistant_turns="all",
    )
    assert learned(example) == [f"{x}<|im_end|>" for x in ("FIRST", "SECOND", "THIRD")]


def test_a_conversation_that_the_assistant_opens():
    talk = [assistant("FIRST"), user("b"), assistant("SECOND")]
    example = encoded(row_of(talk), assistant_turns="all")
    assert [*example.prompt, *example.response] == whole(talk)
    assert learned(example) == ["FIRST<|im_end|>", "SECOND<|im_end|>"]


def test_what_the_template_writes_before_a_turn_is_never_learned():
    """Also if the previous turn is the assistant's."""
    talk = [
        user("a"),
        assistant("FIRST"),
        assistant("SECOND"),
        user("b"),
        assistant("THIRD"),
    ]
    example = encoded(row_of(talk), assistant_turns="all")
    assert [*example.prompt, *example.response] == whole(talk)
    assert learned(example) == [
        f"{name}<|im_end|>" for name in ("FIRST", "SECOND", "THIRD")
    ]


def test_no_eos_and_no_stop_tokens():
    reader = tokenizer_zoo.zoo()["chat"].tokenizer
    reader.eos_token = None
    row = row_of([user("a"), assistant("b")])
    with pytest.raises(InputError, match="a tokenizer with an EOS token, got none"):
        encoding.encode_demonstrations(TextContract(reader), [row], limits=Limits(99))


@pytest.mark.parametrize("prompt", ["a", [user("a")]])
def test_an_episode_has_the_control_tokens_that_its_row_names(prompt):
    row = {"prompt": prompt, "turns": ["b", "c<|eos|>", "d"]}
    [eos] = CHAT.tokenizer.convert_tokens_to_ids(["<|eos|>"])
    contract = TextContract(CHAT.tokenizer, stop_ids=CHAT.stop_ids[:1])
    for named in ([], ["<|eos|>"]):
        row["control_tokens"] = named
        [episode] = encode_episodes(contract, [row], limits=Limits(99))
        assert list(episode.response).count(eos) == len(named)


def test_every_turn_of_an_episode_is_asked_for_with_the_row_s_options():
    options = {"chat_template_kwargs": {"enable_thinking": False}}
    trait = tokenizer_zoo.zoo()["thinking"]
    trait.tokenizer.chat_template = trait.tokenizer.chat_template.replace(
        "m.role + '\n' +",
        "m.role + '\n' + ('<think>\n\n</think>\n\n' if m.role == 'assistant'"
        " else '') +",
    )
    row = {"prompt": [user("a")], "turns": ["b", "c", "d"]} | options
    [episode] = encode_episodes(
        TextContract(trait.tokenizer, stop_ids=trait.stop_ids), [row], limits=Limits(99)
    )
    text = tokenization.decode(trait.tokenizer, [*episode.prompt, *episode.response])
    assert text.count("assistant\n<think>\n\n</think>\n\n") == 2
