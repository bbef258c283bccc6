"""Single responses with a label: rows, mismatched responses, what is refused."""

import pytest
import toy_files

from rlhf_jax.data import packing, unpaired
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
    options = {"max_length": 16, "seed": 0}
    texts = unpaired.encode_labelled(tokenizer, rows, **options)
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
    again = unpaired.encode_labelled(tokenizer, rows, **options)
    assert again == texts
    groups = unpaired.by_prompt(texts)
    assert sorted(len(group) for group in groups) == [1, 2, 2]
    assert all(len({tuple(t.prompt) for t in group}) == 1 for group in groups)


def test_a_mismatched_response_is_cut_where_it_does_not_fit(tmp_path, tokenizer):
    long = {"prompt": "it was so", "completion": "good", "label": True}
    other = {"prompt": "the cat", "completion": "ran very bad .", "label": False}
    rows = read(tmp_path, ROWS[0], other, long)
    texts = unpaired.encode_labelled(tokenizer, rows, max_length=7, seed=0)
    by_length = {len(text.prompt): text for text in texts}
    assert len(by_length[3].mismatched) == 4  # of 5
    # A row of 10 tokens: 3 + 2 of the text, 3 + 2 of the other.
    short = read(tmp_path, long, {"prompt": "a", "completion": "bad", "label": False})
    for widest, cut in ((10, 2), (9, 1)):
        texts = unpaired.encode_labelled(
            tokenizer, short, max_length=16, seed=0, widest=widest
        )
        packing.pack([text.pair for text in texts], width=widest)
        assert {len(t.prompt): len(t.mismatched) for t in texts}[3] == cut
    with pytest.raises(InputError, match=r"at most 8 tokens, the width .* got 9"):
        unpaired.encode_labelled(tokenizer, short, max_length=16, seed=0, widest=8)


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
        unpaired.encode_labelled(tokenizer, rows, max_length=16, seed=0)
