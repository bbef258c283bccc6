"""Files to rows, and the message for each malformed file."""

import functools
import json
import pickle
import sys
import types

import pytest
import toy_files

from rlhf_jax.data import files, json_lines, splits
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.functional.checks import InputError


@pytest.fixture
def write(tmp_path):
    def write(name, *lines):
        path = tmp_path / name
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        return path

    return write


def test_jsonl_rows_keep_all_fields_and_blank_lines_count(write):
    path = write("rows.jsonl", '{"prompt": "a", "answer": 7}', "", '{"prompt": "é"}')
    assert json_lines.read_jsonl(path) == [
        {"prompt": "a", "answer": 7},
        {"prompt": "é"},
    ]
    assert files.read_prompts(path) == [{"prompt": "a", "answer": 7}, {"prompt": "é"}]


def test_a_line_separator_inside_a_string_is_no_line_end(write):
    path = write("rows.jsonl", json.dumps({"prompt": "a\u2028b"}, ensure_ascii=False))
    assert files.read_prompts(path) == [{"prompt": "a\u2028b"}]


def test_text_prompts_are_lines(write):
    path = write("prompts.txt", "first", "", "  second")
    assert files.read_prompts(path) == [{"prompt": "first"}, {"prompt": "  second"}]
    assert files.read_prompts(path, field="question") == [
        {"question": "first"},
        {"question": "  second"},
    ]


def test_demonstrations_by_other_names(write):
    path = write("gsm.jsonl", '{"question": "1+1?", "answer": "2"}')
    rows = files.read_demonstrations(path, prompt="question", response="answer")
    assert rows == [{"question": "1+1?", "answer": "2"}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": " \n"}, "rows.jsonl:1: expected a prompt in 'prompt', got an emp"),
        (
            {"chosen": "Why? A.", "rejected": "Why? B."},
            "rows.jsonl:1: expected responses without their prompt in 'chosen' and",
        ),
        (
            {"rejected": "\n\nHuman: Who?\n\nAssistant: B."},
            "rows.jsonl:1: expected a response to 'prompt' in 'rejected', got a dia",
        ),
    ],
)
def test_sides_that_are_no_answers_to_their_prompt(write, row, message):
    good = {"prompt": "Why?", "chosen": " A.", "rejected": " B."}
    with pytest.raises(InputError, match=message):
        files.read_preferences(write("rows.jsonl", json.dumps(good | row)))


def test_preferences_with_a_prompt_stay_as_they_are(write):
    row = {"prompt": "p", "chosen": "a", "rejected": "b", "margin": 0.5}
    assert files.read_preferences(write("pairs.jsonl", json.dumps(row))) == [row]


def test_dialogues_are_cut_at_the_last_shared_turn(write):
    shared = "\n\nHuman: hi\n\nAssistant: yes\n\nHuman: why\n\nAssistant:"
    row = {"chosen": f"{shared} Because.", "rejected": f"{shared} But\n\nAssistant: no"}
    assert files.read_preferences(write("pairs.jsonl", json.dumps(row))) == [
        {"prompt": shared, "chosen": " Because.", "rejected": " But\n\nAssistant: no"}
    ]


@pytest.mark.parametrize(
    ("read", "lines", "message"),
    [
        (
            json_lines.read_jsonl,
            ['{"a": 1}', "", '{"a": 1,}'],
            r"rows.jsonl:3: expected one JSON object per line, got '{\"a\": 1,}'",
        ),
        (
            json_lines.read_jsonl,
            ["[1, 2]"],
            r"rows.jsonl:1: expected a JSON object, got list '\[1, 2\]'",
        ),
        (
            json_lines.read_jsonl,
            ["", "  "],
            r"rows.jsonl: expected at least one row, got none",
        ),
        (
            files.read_prompts,
            ['{"prompt": "a"}', '{"question": "b", "id": 1}'],
            r"rows.jsonl:2: expected a field 'prompt', got 'question', 'id'; add it",
        ),
        (
            files.read_prompts,
            ['{"prompt": ["a"]}'],
            r"rows.jsonl:1: expected messages as .* in 'prompt', got 'a', whose role",
        ),
        (
            files.read_prompts,
            ['{"prompt": " "}'],
            r"rows.jsonl:1: expected a prompt in 'prompt', got an empty text; remove",
        ),
        (
            files.read_demonstrations,
            ['{"prompt": "a"}'],
            r"rows.jsonl:1: expected a field 'response', got 'prompt'; add it",
        ),
        (
            files.read_preferences,
            ['{"prompt": "a", "chosen": "b"}'],
            r"rows.jsonl:1: expected a field 'rejected', got 'prompt', 'chosen'",
        ),
        (
            files.read_preferences,
            ['{"prompt": "a", "chosen": "b", "rejected": "b"}'],
            r"rows.jsonl:1: expected two different responses, got equal 'chosen'",
        ),
        (
            files.read_preferences,
            ['{"prompt": 3, "chosen": "b", "rejected": "c"}'],
            r"rows.jsonl:1: expected text or messages in 'prompt', got int 3",
        ),
        (
            files.read_preferences,
            ['{"chosen": "b", "rejected": "c"}'],
            r"rows.jsonl:1: expected a field 'prompt', or dialogues that share a",
        ),
        (
            files.read_preferences,
            [
                '{"chosen": "\\n\\nHuman: hi\\n\\nAssistant: yes",'
                ' "rejected": "\\n\\nHuman: ho\\n\\nAssistant: yes"}'
            ],
            r"rows.jsonl:1: expected a field 'prompt', or dialogues that share a",
        ),
        (
            files.read_preferences,
            [
                '{"prompt": "a", "chosen": "b", "rejected": "c"}',
                '{"chosen": "\\n\\nHuman: hi\\n\\nAssistant: yes\\n\\nHuman: why'
                '\\n\\nAssistant: so",'
                ' "rejected": "\\n\\nHuman: hi\\n\\nAssistant: no"}',
            ],
            r"rows.jsonl:2: expected dialogues that differ in the last response alone.*"
            r" another turn of the human in 'chosen' after they part; cut",
        ),
    ],
)
def test_malformed_rows_name_file_and_line(write, read, lines, message):
    with pytest.raises(InputError, match=message):
        read(write("rows.jsonl", *lines))


def test_unreadable_files(tmp_path):
    with pytest.raises(
        InputError, match=r"no.jsonl: expected a readable file, got No such file"
    ):
        json_lines.read_jsonl(tmp_path / "no.jsonl")
    receipt = Receipt("--data", "no.jsonl")
    with pytest.raises(
        InputError, match=r"^--data: no.jsonl: expected .* directory, seen from /.+; "
    ):
        json_lines.read_jsonl("no.jsonl", receipt=receipt)
    with pytest.raises(InputError, match="got Is a directory; check the path"):
        files.read_prompts(tmp_path)
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9\n")
    with pytest.raises(InputError, match="expected UTF-8 text, got byte 0xe9 at off"):
        files.read_prompts(latin)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    with pytest.raises(InputError, match=r"empty.txt: expected at least one row"):
        files.read_prompts(empty)
    with pytest.raises(
        InputError, match=r"empty.txt: expected text, got an empty file"
    ):
        json_lines.read_text(empty)


def test_hub_rows(monkeypatch):
    requests = []

    def load_dataset(name, split):
        requests.append((name, split))
        if name == "nobody/nothing":
            raise FileNotFoundError("no such data set")
        return [{"prompt": "a", "id": 1}] if split == "train" else [{"id": 2}]

    stub = types.SimpleNamespace(load_dataset=load_dataset)
    monkeypatch.setitem(sys.modules, "datasets", stub)
    assert files.read_prompts("hf:some/set") == [{"prompt": "a", "id": 1}]
    with pytest.raises(InputError, match=r"hf:some/set:test\[0\]: expected a field"):
        files.read_prompts("hf:some/set:test")
    with pytest.raises(InputError, match=r"hf:nobody/nothing: .*no such data set"):
        files.read_prompts("hf:nobody/nothing")
    assert requests[:2] == [("some/set", "train"), ("some/set", "test")]


def test_hub_rows_without_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"run `pip install 'rlhf-jax\[datasets\]'`"):
        files.read_prompts("hf:some/set")


def test_human_preferences(shared_data):
    rows = files.read_preferences(shared_data / "hh-rlhf-harmless" / "pairs.jsonl")
    assert len(rows) == 1800
    assert rows[1] == {
        "prompt": "\n\nHuman: call me a bad name\n\nAssistant:",
        "chosen": " Sorry, that’s out of bounds",
        "rejected": " I didn’t catch that. I don’t have a call to make right now, so I"
        " just can’t speak right now",
    }
    assert all(row["prompt"].endswith("\n\nAssistant:") for row in rows)


def test_answers_of_nothing(write):
    """Kept by default, as EOS alone is also an answer."""
    rows = [
        {"prompt": "a", "chosen": "b", "rejected": "c"},
        {"prompt": "d", "chosen": " \n", "rejected": "c"},
    ]
    path = write("pairs.jsonl", *map(json.dumps, rows))
    assert files.read_preferences(path) == rows
    assert files.read_preferences(path, blank="drop") == rows[:1]
    message = (
        r"pairs.jsonl:2: expected a response in 'chosen', got an empty text; remove"
    )
    with pytest.raises(InputError, match=message):
        files.read_preferences(path, blank="error")
    with pytest.raises(InputError, match="a pair of two responses, got empty ones"):
        files.read_preferences(write("no.jsonl", json.dumps(rows[1])), blank="drop")


def test_human_preferences_hold_answers_of_nothing(shared_data):
    path = shared_data / "hh-rlhf-harmless" / "pairs.jsonl"
    assert len(files.read_preferences(path, blank="drop")) == 1797
    with pytest.raises(
        InputError, match=r"pairs.jsonl:398: expected a response in 'ch"
    ):
        files.read_preferences(path, blank="error")


def test_questions_and_plays(shared_data):
    rows = files.read_prompts(shared_data / "gsm8k" / "test.jsonl", field="question")
    assert len(rows) == 1319
    assert rows[0]["answer"].endswith("#### 18")
    text = json_lines.read_text(shared_data / "tinyshakespeare.txt")
    assert text.startswith("First Citizen:\nBefore we proceed")
    assert len(text) == 1115394


def test_held_out_rows_are_a_share_drawn_by_the_seed():
    rows = list("abcdefghij")
    training, held_out = splits.hold_out(rows, share=0.3, seed=0)
    assert len(held_out) == 3
    assert sorted(training + held_out) == rows
    assert training == sorted(training)
    assert held_out == sorted(held_out)
    assert splits.hold_out(rows, share=0.3, seed=0) == (training, held_out)
    draws = {tuple(splits.hold_out(rows, share=0.3, seed=seed)[1]) for seed in range(9)}
    assert len(draws) > 3
    assert splits.hold_out(rows, share=0, seed=0) == (rows, [])
    assert len(splits.hold_out(rows, share=0.01, seed=0)[1]) == 1


@pytest.mark.parametrize("share", [-0.1, 1.0, 0.99])
def test_a_share_that_leaves_nothing_is_refused(share):
    with pytest.raises(InputError, match=r"share to hold out: |rows to train on"):
        splits.hold_out(["a", "b"], share=share, seed=0)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (r'{"prompt": "a\ud800b"}', r"Unicode text in 'prompt', .* character 1 of"),
        (
            r'{"prompt": [{"role": "user", "content": "\udfff"}]}',
            r"Unicode text in 'prompt', got '\\udfff', half a surrogate pair",
        ),
        (
            f'{{"prompt": "a", "more": {"[" * 10_000}{"]" * 10_000}}}',
            "nested deeper than 100 objects or lists; correct or remove it",
        ),
        (
            f'{{"prompt": "a", "more": {"[" * 100}{"]" * 100}}}',
            "nested deeper than 100 objects or lists; correct or remove it",
        ),
        (
            f'{{"prompt": "a", "id": {"7" * 5_000}}}',
            r"Exceeds the limit \(4300 digits\)",
        ),
    ],
)
def test_lines_that_no_program_can_use_are_named(write, line, message):
    path = write("rows.jsonl", '{"prompt": "a"}', line)
    with pytest.raises(InputError, match=rf"rows.jsonl:2: expected .*{message}") as got:
        files.read_prompts(path)
    assert len(str(got.value)) < 400 + len(str(path))
    assert got.value.__cause__ is None


def test_as_much_as_is_allowed_is_read(write):
    nested = "[" * 99 + "]" * 99
    line = f'{{"prompt": "\\ud83d\\ude00", "more": {nested}, "id": {"7" * 4_000}}}'
    (row,) = files.read_prompts(write("rows.jsonl", line))
    assert row == {
        "prompt": "\N{GRINNING FACE}",
        "more": json.loads(nested),
        "id": int("7" * 4_000),
    }


@pytest.mark.parametrize(
    ("name", "text"), [("a.txt", "first"), ("a.jsonl", '{"prompt": "first"}')]
)
def test_a_byte_order_mark_is_no_text(tmp_path, name, text):
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + text.encode())
    assert files.read_prompts(tmp_path / name) == [{"prompt": "first"}]
    assert json_lines.read_text(tmp_path / name) == text


@pytest.mark.parametrize("path", ["a\0b.jsonl", "a" * 300, "a" * 300 + ".txt", "."])
def test_a_path_that_is_no_file_is_one_short_message(path):
    with pytest.raises(InputError, match=r"expected .*; check the path$") as got:
        files.read_prompts(path)
    assert len(str(got.value)) < 400


def test_a_row_knows_its_line_and_is_a_plain_dict_elsewhere(write):
    path = write("rows.jsonl", '{"prompt": "a"}', "", '{"prompt": "b", "id": 2}')
    first, second = files.read_prompts(path)
    assert json_lines.place(second, 1) == f"{path}:3"
    assert json_lines.place(second | {"asked": "c"}, 1) == f"{path}:3"
    assert second | {"id": 3} == {"prompt": "b", "id": 3}
    assert json_lines.place(dict(first), 7) == "row 7 (from 0)"
    # As another process reads it: that one need not import this package.
    pickled = pickle.dumps(second)
    assert b"rlhf_jax" not in pickled
    assert type(pickle.loads(pickled)) is dict
    assert pickle.loads(pickled) == {"prompt": "b", "id": 2}


@pytest.mark.parametrize(
    ("read", "row", "advice"),
    [
        (files.read_prompts, {"q": "a"}, "by --prompt-field"),
        (
            functools.partial(files.read_prompts, beside="b"),
            {"prompt": "a"},
            "by --teacher-field",
        ),
        (
            functools.partial(files.read_demonstrations, turns=True),
            {"prompt": "a", "completion": "b"},
            "by --response-field",
        ),
        (files.read_demonstrations, {"text": "a"}, "or rename a field"),  # --ptx
        (files.read_preferences, {"prompt": "a", "good": "b"}, "or rename a field"),
    ],
)
def test_a_missing_field_names_an_option_where_there_is_one(
    read, row, advice, tmp_path
):
    with pytest.raises(InputError, match=f"expected a field .*; add it, .*{advice}$"):
        read(toy_files.jsonl(tmp_path / "rows.jsonl", row))
