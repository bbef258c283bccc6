"""Single responses with labels: rows, mismatched responses, refused input."""

import time

import hypothesis
import numpy as np
import pytest
import toy_files
from hypothesis import strategies as st

from rlhf_jax.data import packing, splits, unpaired
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.functional.checks import InputError

ROWS = [
    {"prompt": "the cat", "completion": "sat very good .", "label": True},
    {"prompt": "a dog", "completion": "ran", "label": False},
    {"prompt": "a dog", "completion": "is good", "label": True},
    {"prompt": "it was", "chosen": "good", "rejected": "very bad", "id": 7},
]


@pytest.fixture(scope="module")
def tokenizer():
    return toy_files.tokenizer()


def read(path, *rows, **options):
    return unpaired.read_labelled(
        toy_files.jsonl(path / "rows.jsonl", *rows), **options
    )


def test_a_pair_is_two_rows_of_which_the_chosen_is_desirable(tmp_path):
    rows = read(tmp_path, *ROWS)
    assert [row["label"] for row in rows] == [True, False, True, True, False]
    assert [row["completion"] for row in rows[3:]] == ["good", "very bad"]
    assert [row["prompt"] for row in rows[3:]] == ["it was"] * 2
    assert rows[4].where.endswith("rows.jsonl:4")


def test_each_text_has_a_response_to_another_prompt(tmp_path, tokenizer):
    rows = read(tmp_path, *ROWS)
    contract, options = TextContract(tokenizer), {"limits": Limits(16), "seed": 0}
    texts = unpaired.encode_labelled(contract, rows, **options)
    decode = tokenizer.decode
    assert {(decode(t.prompt), t.desirable) for t in texts} == {
        ("the cat", True),
        ("a dog", False),
        ("a dog", True),
        ("it was", True),
        ("it was", False),
    }
    responses = {}
    for text in texts:
        responses.setdefault(tuple(text.prompt), []).append(text.completion)
    for text in texts:
        others = [r for p, r in responses.items() if p != tuple(text.prompt)]
        assert text.mismatched in [response for some in others for response in some]
        assert text.pair == (text.prompt, text.completion, text.mismatched, None)
    again = unpaired.encode_labelled(contract, rows, **options)
    assert again == texts
    groups = splits.by_prompt(texts)
    assert sorted(len(group) for group in groups) == [1, 2, 2]
    assert all(len({tuple(t.prompt) for t in group}) == 1 for group in groups)


def searched(prompts, *, seed):
    """The text that gives each text its mismatched response, by linear search."""
    order = np.random.default_rng(seed).permutation(len(prompts)).tolist()
    others = {}
    for turn, place in enumerate(order):
        other = turn + 1
        while prompts[order[other % len(order)]] == prompts[place]:
            other += 1
        others[place] = order[other % len(order)]
    return [others[place] for place in range(len(prompts))]


@pytest.mark.slow
@hypothesis.given(
    st.lists(st.sampled_from("aaaaaabcd"), min_size=2, max_size=60),
    st.integers(0, 99),
)
def test_the_response_to_another_prompt_is_the_next_in_the_order(prompts, seed):
    hypothesis.assume(len(set(prompts)) > 1)
    # Words of the vocabulary by their number, so that each text is told apart.
    words = toy_files.WORDS[:20]
    rows = [
        {
            "prompt": prompt,
            "completion": f"{words[number // 20]} {words[number % 20]}",
            "label": number % 2 == 0,
        }
        for number, prompt in enumerate(prompts)
    ]
    spelt = toy_files.tokenizer([*toy_files.WORDS, "b", "c", "d"])
    texts = unpaired.encode_labelled(
        TextContract(spelt), rows, limits=Limits(16), seed=seed
    )
    expected = searched([tuple(text.prompt) for text in texts], seed=seed)
    assert [text.mismatched for text in texts] == [
        texts[other].completion for other in expected
    ]


@pytest.mark.slow
def test_a_prompt_of_most_texts_takes_no_longer(tokenizer):
    def seconds(count):
        same = {"prompt": "the cat", "completion": "sat"}
        rows = [same | {"label": number % 2 == 0} for number in range(count)]
        rows.append({"prompt": "a dog", "completion": "ran", "label": True})
        began = time.process_time()
        unpaired.encode_labelled(
            TextContract(tokenizer), rows, limits=Limits(16), seed=0
        )
        return time.process_time() - began

    assert seconds(8_000) < 5 * 8 * min(seconds(1_000) for _ in range(2)) + 0.5


def test_a_mismatched_response_is_cut_where_it_does_not_fit(tmp_path, tokenizer):
    long = {"prompt": "it was so", "completion": "good", "label": True}
    other = {"prompt": "the cat", "completion": "ran very bad .", "label": False}
    rows = read(tmp_path, ROWS[0], other, long)
    texts = unpaired.encode_labelled(
        TextContract(tokenizer), rows, limits=Limits(7), seed=0
    )
    by_length = {len(text.prompt): text for text in texts}
    assert len(by_length[3].mismatched) == 4  # of 5
    # A row of 10 tokens: 3 + 2 of the text, 3 + 2 of the other.
    short = read(tmp_path, long, {"prompt": "a", "completion": "bad", "label": False})
    for widest, cut in ((10, 2), (9, 1)):
        texts = unpaired.encode_labelled(
            TextContract(tokenizer), short, limits=Limits(16, widest=widest), seed=0
        )
        packing.pack([text.pair for text in texts], width=widest)
        assert {len(t.prompt): len(t.mismatched) for t in texts}[3] == cut
    with pytest.raises(InputError, match=r"at most 8 tokens, the width .* got 9"):
        unpaired.encode_labelled(
            TextContract(tokenizer), short, limits=Limits(16, widest=8), seed=0
        )


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (ROWS[:1], {}, "desirable and undesirable completions, got only true as 'lab"),
        (
            [ROWS[1] | {"label": 1}],
            {},
            r"rows.jsonl:1: expected true or false in 'label', got 1",
        ),
        ([{"prompt": "a", "label": True}], {}, "expected a field 'completion', got"),
        ([ROWS[0] | {"prompt": " "}], {}, "expected a prompt in 'prompt', got an emp"),
        (
            [ROWS[0] | {"completion": " "}],
            {"blank": "error"},
            "expected a response in 'completion', got an empty text",
        ),
        (
            [ROWS[3] | {"chosen": " "}],
            {"blank": "error"},
            "expected a response in 'chosen', got an empty text",
        ),
        ([ROWS[3] | {"chosen": " "}], {"blank": "drop"}, "completions, got none as"),
        ([ROWS[3] | {"chosen": "very bad"}], {}, "expected two different responses"),
    ],
)
def test_rows_that_are_refused(tmp_path, rows, options, message):
    with pytest.raises(InputError, match=message):
        read(tmp_path, *rows, **options)


def test_a_single_prompt_is_refused(tmp_path, tokenizer):
    rows = read(tmp_path, ROWS[3])
    with pytest.raises(InputError, match=r"of at least 2 prompts, .* got 1"):
        unpaired.encode_labelled(
            TextContract(tokenizer), rows, limits=Limits(16), seed=0
        )
