"""Every text is parsed, or refused by one short message that names its place."""

import json
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import parsing
from rlhf_jax.runs.parsing import MAX_DEPTH, MAX_DIGITS, Source

HERE = Source("rows.jsonl:3", "an object", "mend it")
DEEPER = "nested deeper than 100 objects or lists"


def nested(depth):
    return "[" * depth + "]" * depth


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", r"'' \(Expecting value, column 1\)"),
        ("{", r"'{' \(Expecting property name"),
        ("{\n{", r"\(Expecting property name .*, line 2, column 1\)"),
        (nested(MAX_DEPTH + 1), f"'\\[+', {DEEPER}"),
        (nested(100_000), f"'\\[+', {DEEPER}"),
        ('{"a":' * 100_000, f", {DEEPER}"),
        ('{"a": 1, "b": 2, "a": 3}', r"\(the key 'a' twice\)"),
        ('[{"a": {"b": 1, "b": 1}}]', r"\(the key 'b' twice\)"),
        ("[NaN]", "with nan, which is not a finite number"),
        ("-Infinity", "with -inf, which is not a finite number"),
        ("[1e999]", "with inf, which is not a finite number"),
        ("9" * (MAX_DIGITS + 1), "with a number of more than 300 digits"),
        ("-" + "9" * 400, "with a number of more than 300 digits"),
        ("9" * 5000, r"\(Exceeds the limit \(4300 digits\)"),
        (r'["a\ud800"]', r"with '\\ud800', half a surrogate pair"),
        (r'{"\udfff": 1}', r"with a key with '\\udfff', half a surrogate pair"),
        (b"\xff{}", "byte 0xff at offset 0, which is not UTF-8"),
        (b'{"a": "\xe9"}', "byte 0xe9 at offset 7, which is not UTF-8"),
        ("\0", r"'\\x00' \(Expecting value"),
    ],
    ids=str,
)
def test_json_that_is_refused(text, got):
    message = rf"^rows.jsonl:3: expected an object, got .*{got}.*; mend it$"
    with pytest.raises(InputError, match=message) as refusal:
        parsing.of_json(text, HERE)
    assert len(str(refusal.value)) < 300
    assert refusal.value.__cause__ is None


def test_as_much_as_is_allowed_is_read():
    most = 10**MAX_DIGITS - 1
    text = f'{{"a": {nested(MAX_DEPTH - 1)}, "b": {most}, "c": "\\ud83d\\ude00"}}'
    value = parsing.of_json(b"\xef\xbb\xbf" + text.encode(), HERE)
    assert value == {
        "a": json.loads(nested(MAX_DEPTH - 1)),
        "b": most,
        "c": "\N{GRINNING FACE}",
    }
    assert math.isfinite(float(most))


def test_rows_of_other_programs_keep_what_nobody_may_read():
    text = f'{{"a": NaN, "b": {"7" * 4_000}, "c": "\\ud800"}}'
    value = parsing.of_json(text, HERE, foreign=True)
    assert math.isnan(value["a"])
    assert (value["b"], value["c"]) == (int("7" * 4_000), "\ud800")
    with pytest.raises(InputError, match="the key 'a' twice"):
        parsing.of_json('{"a": 1, "a": 2}', HERE, foreign=True)
    brackets = "[" * 2 * MAX_DEPTH
    for text in (nested(MAX_DEPTH), json.dumps([brackets]), json.dumps([[]] * 200)):
        assert parsing.of_json(text, HERE, foreign=True) == json.loads(text)
    with pytest.raises(InputError, match=f"nested deeper than {MAX_DEPTH}"):
        parsing.of_json(nested(MAX_DEPTH + 1), HERE, foreign=True)
    with pytest.raises(InputError, match=f"nested deeper than {MAX_DEPTH}"):
        parsing.of_json(f"[{nested(MAX_DEPTH)}, []]", HERE, foreign=True)


def test_a_line_that_is_too_large():
    assert parsing.of_json("[1, 2]", HERE, size=6) == [1, 2]
    with pytest.raises(InputError, match=r"rows.jsonl:3: .* more than 6 characters"):
        parsing.of_json("[1, 22]", HERE, size=6)
    assert len(parsing.of_json(f"[{'1,' * 2**16}1]", HERE, size=None)) == 2**16 + 1


def read(folder, name, content, **options):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return parsing.read_object(path, expected="options", advice="mend it", **options)


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 10)
)


@pytest.mark.parametrize(
    ("name", "content", "got"),
    [
        ("a.json", "[1]", r"list \[1\]"),
        ("a.json", "", r"'' \(Expecting value"),
        ("a.toml", "a = ", r"'a = ' \(Invalid value \(at end"),
        ("a.toml", "a = 1\na = 2", r"\(Cannot overwrite a value"),
        ("a.toml", "a = nan", "with nan, which is not a finite number"),
        ("a.toml", f"a = {nested(3000)}", DEEPER),
        ("a.toml", ".".join("a" * 3000) + " = 1", DEEPER),
        ("a.toml", "a = " + "9" * 5000, r"\(Exceeds the limit \(4300 digits\)"),
        ("a.toml", "a = " + "9" * 400, "with a number of more than 300 digits"),
        ("a.toml", r'a = "\ud800"', "Escaped character is not a Unicode scalar"),
        ("a.toml", b"a = '\xff'", "byte 0xff at offset 5, which is not UTF-8"),
        ("a.yaml", "a: [", r"\(did not find|\(expected the node content.*line 1"),
        ("a.yaml", "a: 1\nb: 2\na: 3", r"\(the key 'a' twice, line 1, column 1\)"),
        ("a.yaml", "a: &b [*b]", DEEPER),
        ("a.yaml", BOMB, "with aliases that expand to more than 1000000 values"),
        ("a.yaml", f"a: {nested(400)}", DEEPER),
        ("a.yaml", "a: .inf", "with inf, which is not a finite number"),
        ("a.yaml", "a: " + "9" * 5000, r"\(Exceeds the limit \(4300 digits\)"),
        ("a.yaml", "1: 2", "with the key 1, which is not a string"),
        ("a.yaml", "a: !!int x", r"\("),
        ("a.yaml", "a: !!timestamp x", r"\("),
        ("a.yaml", "a: !!python/name:os.system ''", "could not determine a constr"),
        ("a.yaml", r'a: "\ud800"', r"half a surrogate pair"),
        ("a.yml", "- a", r"list \['a'\]"),
        ("a.yml", "a\0", "special characters are not allowed|unacceptable char"),
    ],
    ids=lambda of: of[:20] if isinstance(of, str) else "",
)
def test_files_that_are_refused(tmp_path, name, content, got):
    message = rf"{name}: expected options, got .*({got}).*; mend it$"
    with pytest.raises(InputError, match=message) as refusal:
        read(tmp_path, name, content)
    assert len(str(refusal.value)) < 300 + len(str(tmp_path))
    assert "\n" not in str(refusal.value)


def test_files_that_are_read(tmp_path):
    assert read(tmp_path, "a.toml", b"\xef\xbb\xbfa.b = 1\r\n") == {"a": {"b": 1}}
    merged = "a: &a {x: 1, y: 2}\nb:\n  <<: *a\n  x: 3\n"
    assert read(tmp_path, "a.yaml", merged)["b"] == {"x": 3, "y": 2}
    assert read(tmp_path, "a", '{"a": null}') == {"a": None}
    assert math.isinf(read(tmp_path, "a", '{"a": Infinity}', foreign=True)["a"])


@pytest.mark.parametrize(
    ("name", "got"),
    [
        ("none.json", "one that cannot be read: No such file"),
        ("", "one that cannot be read: Is a directory"),
        ("a\0b", "one that cannot be read: embedded null byte"),
        ("x" * 300, "one that cannot be read: File name too long"),
    ],
)
def test_a_file_that_cannot_be_read(tmp_path, name, got):
    path = tmp_path / name
    with pytest.raises(InputError, match=f"expected options, got {got}") as refusal:
        parsing.read_object(path, expected="options", advice="mend it")
    assert "\0" not in str(refusal.value)


def test_a_file_that_is_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(parsing, "MAX_SIZE", 8)
    assert read(tmp_path, "a.json", '{"a": 1}') == {"a": 1}
    with pytest.raises(InputError, match="expected options, got more than 8 bytes"):
        read(tmp_path, "a.json", '{"a": 11}')


@pytest.mark.parametrize(
    ("text", "got"),
    [
        ("", "invalid syntax"),
        ("a >", "invalid syntax"),
        ("\0", "null bytes"),
        ("-" * 20_000 + "1", "20001 characters, more than 2000"),
        ("-" * 1_900 + "1", "."),
        ("(" * 900 + "1" + ")" * 900, "."),
        ("+".join("a" * 900), "operations nested deeper than 100"),
        ("a > " + "9" * 400, "one with a number of more than 300 digits"),
        ("a > " + "9" * 1990, "one with a number of more than 300 digits"),
        ("a > 1e999", "one with inf, which is not a finite number"),
    ],
    ids=lambda of: of[:20],
)
def test_expressions_that_are_refused(text, got):
    claim = Source("claim", "A > B", "write it so")
    with pytest.raises(InputError, match=f"^claim: expected A > B, got .*{got}"):
        parsing.expression(text, claim)


def test_an_expression_warns_of_nothing(recwarn):
    parsing.expression("1is 2", HERE)
    assert not recwarn


SHAPE = {
    "name": str,
    "count?": int,
    "share?": float | int | None,
    "alarms?": [{"step": int, "at?": [[str]]}],
}


@pytest.mark.parametrize(
    ("value", "got"),
    [
        ([], "list []"),
        (None, "NoneType None"),
        ({}, "one without name"),
        ({"name": 3}, "name = int 3"),
        ({"name": "a", "count": True}, "count = bool True"),
        ({"name": "a", "share": "b"}, "share = str 'b'"),
        ({"name": "a", "alarms": {}}, "alarms = dict {}"),
        ({"name": "a", "alarms": [{"step": 1}, 3]}, "alarms[1] = int 3"),
        ({"name": "a", "alarms": [{}]}, "one without alarms[0].step"),
        (
            {"name": "a", "alarms": [{"step": 1, "at": [["b"], [3]]}]},
            "alarms[0].at[1][0] = int 3",
        ),
        ({"name": "a"}, None),
        ({"name": "a", "more": [], "share": None, "count": 3}, None),
        ({"name": "a", "alarms": [{"step": 1, "at": [[], ["b"]]}]}, None),
    ],
    ids=str,
)
def test_what_of_a_value_is_not_of_a_shape(value, got):
    assert parsing.misfit(value, SHAPE) == got


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)
TEXTS = st.text() | st.text("[]{}\":,.0123456789-eE\\uda =>_()'#&*!\n")


def either(read):
    """Parses a text, which may raise the parser's own error alone."""
    try:
        return read()
    except InputError:
        return None


@pytest.mark.parametrize("examples", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_any_value_is_read_as_python_does(examples):
    @hypothesis.settings(max_examples=examples, deadline=None)
    @hypothesis.given(VALUES)
    def check(value):
        text = json.dumps(value)
        got = either(lambda: parsing.of_json(text, HERE))
        assert got == value or parsing.fault(value) is not None

    check()


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("suffix", [".json", ".toml", ".yaml"])
def test_any_bytes_are_read_or_refused(tmp_path, suffix, examples):
    path = tmp_path / f"any{suffix}"

    @hypothesis.settings(max_examples=examples, deadline=None)
    @hypothesis.given(
        st.binary() | TEXTS.map(lambda text: text.encode(errors="replace"))
    )
    def check(content):
        path.write_bytes(content)
        either(lambda: parsing.read_object(path, expected="options", advice="mend it"))
        either(lambda: parsing.of_json(content, HERE))

    check()


@pytest.mark.parametrize("examples", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_any_expression_is_read_or_refused(examples):
    @hypothesis.settings(max_examples=examples, deadline=None)
    @hypothesis.given(TEXTS | st.text("-+*(a1) <>", min_size=1))
    def check(text):
        either(lambda: parsing.expression(text, HERE))

    check()
