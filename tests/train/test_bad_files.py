"""Data that trainers refuse: damaged files and unsuitable rows."""

import json

import bad_inputs
import pytest
import test_bad_checkpoints
import test_bad_options
from bad_inputs import DATA, ROWS, TRAINERS
from tiers import one_in

OBJECT = "bad.jsonl:1: expected one JSON object per line, got"
NO_ROW = "bad.jsonl: expected at least one row, got none"
DEEP = "nested deeper than 100 objects or lists"
# Bytes of a file, for every trainer.
FILES = {
    "empty": (b"", NO_ROW),
    "blank": (b" \n\n\t\r\n", NO_ROW),
    "mark": (b"\xef\xbb\xbf", NO_ROW),
    "brace": (b"{", f"{OBJECT} '{{'"),
    "cut": (b'{"prompt": "the c', f"{OBJECT} .*Unterminated string"),
    "list": (b"[1]", "bad.jsonl:1: expected a JSON object, got list"),
    "text": (b'"the cat"', "bad.jsonl:1: expected a JSON object, got str"),
    "number": (b"3", "bad.jsonl:1: expected a JSON object, got int"),
    "null": (b"null", "bad.jsonl:1: expected a JSON object, got NoneType"),
    "NaN": (b"NaN", "bad.jsonl:1: expected a JSON object, got float"),
    "other fields": (b'{"x": 1}', "bad.jsonl:1: expected a field '"),
    "quotes": (b"{'prompt': 'the cat'}", f"{OBJECT} .*property name"),
    "two a line": (b'{"a": 1}{"b": 2}', f"{OBJECT} .*Extra data"),
    "second line": (b"{}\n{", "bad.jsonl:[12]: expected"),
    "deep list": (b"[" * 10_000 + b"]" * 10_000, f"{OBJECT} .*{DEEP}"),
    "deep object": (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, f"{OBJECT} .*{DEEP}"),
    "digits": (b'{"a": ' + b"9" * 5000 + b"}", f"{OBJECT} .*4300 digits"),
    "NUL": (b"\0", rf"{OBJECT} '\\x00'"),
    "UTF-16": (b"\xff\xfe{\0}\0", "bad.jsonl: expected JSON Lines, .* got UTF-16"),
    "Latin-1": (b'{"a": "\xe9"}', "bad.jsonl: expected UTF-8 text, got byte 0xe9"),
    "gzip": (b"\x1f\x8b\x08\0abc", "bad.jsonl: expected gzip-compressed data, got wh"),
    "control": (b'{"a": "\x01"}', f"{OBJECT} .*Invalid control character"),
    "CSV": (b"prompt,response\nthe cat,sat\n", f"{OBJECT} 'prompt,response'"),
    "comment": (b"// rows\n{}\n", f"{OBJECT} '// rows'"),
}
WRITTEN = "bad.jsonl:1: expected text or messages in '{}', got "
MESSAGES = "bad.jsonl:1: expected messages as .* in '{}', got .*whose {} is not a text"
# Values of the field that is asked, for every trainer.
PROMPT_FIELDS = {
    "null": (None, WRITTEN + "NoneType None"),
    "number": (3, WRITTEN + "int 3"),
    "true": (True, WRITTEN + "bool True"),
    "NaN": (float("nan"), WRITTEN + "float nan"),
    "object": ({"role": "user"}, WRITTEN + "dict"),
    "no messages": ([], WRITTEN + "an empty list"),
    "texts": (["a"], MESSAGES.format("{}", "role")),
    "lists": ([[]], MESSAGES.format("{}", "role")),
    "no content": ([{"role": "user"}], MESSAGES.format("{}", "content")),
    "a number's role": ([{"role": 1, "content": "a"}], MESSAGES.format("{}", "role")),
    "null content": (
        [{"role": "user", "content": None}],
        MESSAGES.format("{}", "content"),
    ),
    "parts": (
        [{"role": "user", "content": ["a"]}],
        MESSAGES.format("{}", "content"),
    ),
    "answered": (
        [{"role": "assistant", "content": "a"}],
        "bad.jsonl:1: expected messages that wait for the assistant in '{}'",
    ),
    "half a surrogate": (
        "the \ud800",
        "bad.jsonl:1: expected Unicode text in '{}', got '.ud800', half a surrogate",
    ),
    "half a surrogate in a message": (
        [{"role": "user", "content": "\udfff"}],
        "bad.jsonl:1: expected Unicode text in '{}', got '.udfff', half a surrogate",
    ),
    "too long": ("the " * 40, "expected (at most|a row of at most) .* tokens, got"),
}
MARK = "bad.jsonl:1: expected #### and a number at the end of 'answer', got"
ANSWER = {
    "sft": ("response", [(None, WRITTEN), (7, WRITTEN), ({}, WRITTEN)]),
    "reward_model": (
        "rejected",
        [
            (None, WRITTEN),
            ([["a"]], MESSAGES.format("{}", "role")),
            ("sat .", "expected two different responses, got equal"),
            ("sat   .", "expected responses that differ in a token"),
            ("good " * 20, "expected at most 16 tokens, got 23"),
        ],
    ),
    "dpo": (
        "chosen",
        [
            (None, WRITTEN),
            (0.5, WRITTEN),
            ("", "expected a response in '{}', got an empty text"),
            (" \n", "expected a response in '{}', got an empty text"),
            ("ran .", "expected two different responses, got equal"),
            ([{"role": "assistant", "content": "a"}], "expected text in '{}', as its"),
        ],
    ),
    "grpo": (
        "answer",
        [
            *((value, MARK) for value in (None, 2, [], {}, "", " ", ["#### 2"])),
            *((value, MARK) for value in ("2", "####", "#### two", "2 ####", "\0")),
        ],
    ),
}


def rows_of(trainer):
    """(name, rows, message) of rows whose field is missing or has a wrong value."""
    row = ROWS[trainer]
    field_of_prompt = next(iter(row))
    for field in row:
        # A pair without a prompt may be two dialogues, which is told instead.
        missing = f"bad.jsonl:1: expected a (field|text in) '{field}'"
        yield f"no {field}", {k: v for k, v in row.items() if k != field}, missing
    for name, (value, message) in PROMPT_FIELDS.items():
        yield (
            f"{field_of_prompt} {name}",
            row | {field_of_prompt: value},
            message.replace("{}", field_of_prompt),
        )
    if trainer != "sft":  # which learns how texts begin too
        blank = (
            f"bad.jsonl:1: expected a prompt in '{field_of_prompt}', got an empty text"
        )
        yield f"{field_of_prompt} blank", row | {field_of_prompt: " "}, blank
    field, values = ANSWER.get(trainer, ("", []))
    for value, message in values:
        shown = message.replace("{}", field)
        yield f"{field} {value!r:.20}", row | {field: value}, shown


OF_EVERY_TRAINER = [
    (trainer, name, content, message)
    for trainer in TRAINERS
    for name, (content, message) in FILES.items()
]
CASES = [
    *OF_EVERY_TRAINER,
    *(
        (trainer, name, json.dumps(row).encode(), message)
        for trainer in TRAINERS
        for name, row, message in rows_of(trainer)
    ),
]


def test_there_are_at_least_300_cases():
    cases = [
        *((trainer, content) for trainer, _, content, _ in CASES),
        *((bad.trainer, bad.argv) for bad in test_bad_options.CASES),
        *((bad.trainer, bad.name) for bad in test_bad_checkpoints.CASES),
    ]
    assert len(set(cases)) == len(cases) >= 300
    for trainer in TRAINERS:
        assert sum(case[0] == trainer for case in cases) >= 60


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    with bad_inputs.loading_once():
        yield bad_inputs.make_files(tmp_path_factory.mktemp("files"))


@pytest.mark.cases(quick=6, slow=80)
@pytest.mark.parametrize(
    ("trainer", "content", "message"),
    [
        *bad_inputs.by_one_each([(case[0], *case[2:]) for case in OF_EVERY_TRAINER]),
        *one_in(9, [(case[0], *case[2:]) for case in CASES[len(OF_EVERY_TRAINER) :]]),
    ],
    ids=[f"{trainer}: {name}" for trainer, name, _, _ in CASES],
)
def test_data_that_is_refused(files, tmp_path, capsys, trainer, content, message):
    bad = tmp_path / "bad.jsonl"
    bad.write_bytes(content)
    errors = bad_inputs.refused(
        capsys,
        trainer,
        [DATA[trainer], str(bad)],
        files=files,
        out=tmp_path / "run",
        message=message,
    )
    assert len(errors) < 1000
