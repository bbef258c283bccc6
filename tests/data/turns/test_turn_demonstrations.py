"""Demonstrations of several turns: what is learned of them, and what is read."""

import numpy as np
import pytest
import toy_files
from test_chat import QWEN, assistant, byte_tokenizer, spelt, user

from rlhf_jax.data import batches, encoding, files, packing
from rlhf_jax.data.encoding import Example
from rlhf_jax.data.turns.demonstrations import encode_demonstrations
from rlhf_jax.environments import calculator, demonstrations
from rlhf_jax.environments.calculator import Calculator
from rlhf_jax.functional.checks import InputError

TURNS = ["calc: 7+5", "= 12\n", "answer: 12"]


def encode(reader, *rows, **options):
    return encode_demonstrations(reader, rows, max_length=200, **options)


def test_plain_turns_by_hand():
    parts = [spelt("calc: 7+5", "<eos>"), spelt("= 12\n"), spelt("answer: 12", "<eos>")]
    [example] = encode(byte_tokenizer(), {"prompt": "7+5\n", "turns": TURNS})
    assert example.prompt == spelt("7+5\n")
    assert example.response == [token for part in parts for token in part]
    lengths = [len(part) for part in parts]
    assert example.observed == [False] * lengths[0] + [True] * lengths[1] + (
        [False] * lengths[2]
    )


def test_turns_of_a_chat_are_the_whole_conversation():
    asked = [user("7+5")]
    rows = [
        {"prompt": asked, "turns": ["calc", "12", "It is 12."]},
        {"prompt": asked, "turns": ["calc", [user("12")], "It is 12."]},
    ]
    examples = encode(QWEN, *rows)
    assert examples[0] == examples[1]
    whole = QWEN.apply_chat_template(
        [*asked, assistant("calc"), user("12"), assistant("It is 12.")], tokenize=False
    )
    prompt, response, observed = examples[0]
    assert QWEN.decode([*prompt, *response]) == whole.rstrip("\n")
    learned = [t for t, read in zip(response, observed, strict=True) if not read]
    assert learned == spelt("calc", "<|im_end|>", "It is 12.", "<|im_end|>")


def test_rows_of_one_turn_stand_beside_them_as_ever():
    row = {"prompt": "Hi", "response": "Yes"}
    reader = byte_tokenizer()
    alone = encoding.encode_demonstrations(reader, [row], max_length=200)
    assert encode(reader, row) == alone
    mixed = encode(reader, row, {"prompt": "Hi", "turns": ["Yes"]})
    assert [each[:2] for each in mixed] == [alone[0][:2]] * 2
    assert not any(mixed[0].observed)


@pytest.mark.parametrize("prompt", [(), (9, 9)])
def test_what_is_observed_is_in_no_loss(prompt):
    example = Example(prompt, (1, 2, 3, 4), [False, True, True, False])
    other = Example((8,), (5, 6))
    start = len(prompt)
    learned = [False] * start + [bool(prompt), False, False, True]
    batch = batches.sequences_in_order([example, other], batch_size=2, pad_id=0)[0]
    np.testing.assert_array_equal(batch.response_mask[0, : start + 4], learned)
    np.testing.assert_array_equal(batch.response_mask[1, :3], [False, True, True])
    [row] = packing.pack_examples([example, other], width=20)
    assert row.response == [*learned, False, True, True]
    stream = {"seed": 0, "pad_id": 0}
    shuffled = batches.sequence_batches([example], batch_size=1, **stream)[0]
    np.testing.assert_array_equal(shuffled.response_mask, [learned])


def test_an_experts_rows_are_read_from_a_file(tmp_path):
    asked = calculator.rows(5, seed=0)
    rows = demonstrations.demonstrations(Calculator(), asked, expert=calculator.expert)
    file = toy_files.jsonl(tmp_path / "rows.jsonl", *rows)
    read = files.read_demonstrations(file)
    assert [dict(row) for row in read] == rows
    reader = byte_tokenizer()
    for row, example in zip(rows, encode(reader, *read), strict=True):
        text = row["prompt"] + "".join(
            turn if place % 2 else f"{turn}<eos>"
            for place, turn in enumerate(row["turns"])
        )
        assert reader.decode([*example.prompt, *example.response]) == text


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (
            "calc",
            r"row 0 .* in 'turns', a response first and last, got 'calc'",
        ),
        (["a", "b"], r"got \['a', 'b'\]; give a list of 1, 3, 5"),
        ([], r"got \[\]; give"),
        (["a", [user("b")], "c"], r"expected an observation as entry 1 \(from 0\)"),
        (["a", "b", [assistant("c")]], r"expected a response as entry 2"),
    ],
)
def test_turns_that_are_none(turns, message):
    with pytest.raises(InputError, match=message):
        encode(byte_tokenizer(), {"prompt": "Hi", "turns": turns})


def test_long_episodes_are_left_out_whole():
    rows = [{"prompt": "7+5\n", "turns": TURNS}, {"prompt": "Hi", "turns": ["Yes"]}]
    kept = encode_demonstrations(byte_tokenizer(), rows, max_length=20, overlong="drop")
    assert [each.prompt for each in kept] == [spelt("Hi")]
