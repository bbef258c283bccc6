"""Parquet, Arrow, CSV, JSON arrays and compressed files."""

import bz2
import datetime
import gzip
import json
import lzma

import pytest
import toy_files

from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data import digests, files, json_lines, unpaired
from rlhf_jax.functional.checks import InputError

# What a reader that guesses types takes for dates, numbers, or nothing at all.
TEXTS = ["2024-01-01T00:00:00", "2024-01-02", "007", "NA", "null", "", "a\u2028b\x85c"]
ROWS = [{"prompt": f"Q{i}", "response": text} for i, text in enumerate(TEXTS)]
MIXED = [
    {"prompt": [{"role": "user", "content": "hi"}], "response": "yo", "answer": 7},
    {"messages": [{"role": "user", "content": "hi", "name": "Z"}], "answer": "seven"},
    {"answer": None, "tags": {"a": [1, {"b": None}]}, "big": 10**30},
]


def jsonl(rows):
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


@pytest.fixture
def datasets():
    return pytest.importorskip("datasets", reason="the extra datasets")


@pytest.fixture
def write(tmp_path):
    def write(name, content):
        path = tmp_path / name
        content = content.encode() if isinstance(content, str) else content
        path.write_bytes(content)
        return path

    return write


def places(path):
    return [row.where for row in json_lines.read_jsonl(path)]


COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["texts", "mixed"])
@pytest.mark.parametrize(
    ("suffix", "compress"), COMPRESSIONS.items(), ids=COMPRESSIONS.keys()
)
@pytest.mark.parametrize("has_suffix", [True, False])
def test_compressed_json_lines_are_what_is_in_them(
    write, rows, suffix, compress, has_suffix
):
    text = f"\ufeff\n{jsonl(rows)}"
    path = write(f"rows.jsonl{suffix * has_suffix}", compress(text.encode()))
    assert json_lines.read_jsonl(path) == rows
    assert places(path) == [f"{path}:{line + 2}" for line in range(len(rows))]


@pytest.mark.parametrize("rows", [ROWS, MIXED], ids=["texts", "mixed"])
@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_the_objects_of_an_array_are_rows(write, rows, indent, suffix):
    text = "\ufeff" + json.dumps(rows, indent=indent)
    path = write(f"r.json{suffix}", gzip.compress(text.encode()) if suffix else text)
    assert json_lines.read_jsonl(path) == rows
    assert places(path) == [f"{path}[{number}]" for number in range(len(rows))]


def test_a_csv_file_s_cells_are_texts(write):
    cells = [("Q, 1", 'a "b"\nc'), ("Q2", "007"), ("Q3", "NA"), ("", "2024-01-01")]
    text = (
        'prompt, response\r\n"Q, 1","a ""b""\nc"\r\nQ2,007\r\n\r\nQ3,NA\r\n,2024-01-01'
    )
    rows = [{"prompt": prompt, "response": response} for prompt, response in cells]
    path = write("rows.csv", "\ufeff" + text)
    assert json_lines.read_jsonl(path) == rows
    assert places(path) == [f"{path}:{line}" for line in (2, 4, 6, 7)]
    packed = write("rows.csv.gz", gzip.compress(text.encode()))
    assert json_lines.read_jsonl(packed) == rows
    tabs = write("rows.tsv", "prompt\tresponse\nQ, 1\ta; b\n")
    assert json_lines.read_jsonl(tabs) == [{"prompt": "Q, 1", "response": "a; b"}]
    semicolons = write("other.csv", "prompt;response\nQ, 1;a\n")
    assert json_lines.read_jsonl(semicolons) == [{"prompt": "Q, 1", "response": "a"}]
    long = write("long.csv", f"prompt\n{'x' * 200_000}\n")
    assert json_lines.read_jsonl(long) == [{"prompt": "x" * 200_000}]


def test_labels_of_a_csv_file(write):
    path = write("rows.csv", "prompt,completion,label\nQ,True,True\nQ,False,false\n")
    rows = unpaired.read_labelled(path)
    assert [row["completion"] for row in rows] == ["True", "False"]
    assert [row["label"] for row in rows] == [True, False]
    path = write("rows.csv", "prompt,completion,label\nQ,a,yes\n")
    with pytest.raises(InputError, match=r"rows.csv:2: expected true or false in 'lab"):
        unpaired.read_labelled(path)


@pytest.mark.parametrize("name", ["rows.parquet", "really_parquet.jsonl", "a[1]*?.p"])
def test_parquet(tmp_path, datasets, name):
    messages = [{"role": "user", "content": "hi"}]
    named = [{"role": "user", "content": "hi", "name": "Z"}]
    rows = [{"prompt": messages, "n": 1}, {"prompt": named, "n": None}]
    path = tmp_path / name
    datasets.Dataset.from_list(rows).to_parquet(path)
    assert json_lines.read_jsonl(path) == rows
    assert places(path) == [f"{path}[0]", f"{path}[1]"]
    assert files.read_prompts(path) == rows
    with pytest.raises(
        InputError, match=r"\[0\]: expected a field 'response', got 'pr"
    ):
        files.read_demonstrations(path)


def test_what_json_does_not_hold_has_a_digest(tmp_path, datasets):
    rows = [{"prompt": "Q", "at": datetime.datetime(2026, 1, 2), "raw": b"\0"}]
    path = tmp_path / "rows.parquet"
    datasets.Dataset.from_list(rows).to_parquet(path)
    first, second = json_lines.read_jsonl(path), json_lines.read_jsonl(path)
    assert digests.of_values([first, [1]]) == digests.of_values([second, [1]])
    second[0]["raw"] = b"\1"
    assert digests.of_values([first, [1]]) != digests.of_values([second, [1]])


def test_arrow_as_datasets_saves_it(tmp_path, datasets):
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (path,) = (tmp_path / "saved").glob("*.arrow")
    assert json_lines.read_jsonl(path) == ROWS
    assert files.read_demonstrations(path) == ROWS


def test_a_file_that_changes_is_read_anew(tmp_path, datasets):
    path = tmp_path / "rows.parquet"
    for text in ("one", "two"):
        datasets.Dataset.from_list([{"prompt": text}]).to_parquet(path)
        assert files.read_prompts(path) == [{"prompt": text}]


def test_pairs_of_every_format(tmp_path, datasets, write):
    pairs = [{"prompt": "Q", "chosen": "a", "rejected": "b"}]
    table = tmp_path / "pairs.parquet"
    datasets.Dataset.from_list(pairs).to_parquet(table)
    for path in (
        table,
        write("pairs.json", json.dumps(pairs)),
        write("pairs.csv", "prompt,chosen,rejected\nQ,a,b\n"),
        write("pairs.jsonl.gz", gzip.compress(jsonl(pairs).encode())),
    ):
        assert files.read_preferences(path) == pairs
        labels = [
            (row["completion"], row["label"]) for row in unpaired.read_labelled(path)
        ]
        assert labels == [("a", True), ("b", False)]


def test_compressed_texts(tmp_path, write):
    text = "the cat sat\r\na dog ran\n"
    path = write("plain.txt.gz", gzip.compress(text.encode()))
    assert json_lines.read_text(path) == text.replace("\r", "")
    assert files.read_prompts(path) == [
        {"prompt": "the cat sat"},
        {"prompt": "a dog ran"},
    ]
    assert files.read_prompts(write("plain.txt", path.read_bytes()))[1] == {
        "prompt": "a dog ran"
    }
    start = pretrained.load(str(toy_files.checkpoint(tmp_path / "model")))
    plain = write("other.txt", text)
    assert pretrained.read_examples(start, str(path)) == pretrained.read_examples(
        start, str(plain)
    )


DAMAGED = {
    "rows.jsonl.gz": (
        gzip.compress(jsonl(ROWS).encode() * 99)[:-20],
        "rows.jsonl.gz: expected gzip-compressed data, got what .* the file whole",
    ),
    "rows.jsonl.bz2": (bz2.compress(b"{}" * 99)[:-9], "bzip2-compressed data, got wha"),
    "rows.jsonl.xz": (lzma.compress(b"{}" * 99)[:-9], "xz-compressed data, got what"),
    "latin.jsonl.gz": (
        gzip.compress(b"caf\xe9"),
        "latin.*UTF-8 text, got byte 0xe9",
    ),
    "line.jsonl.gz": (
        gzip.compress(b'{"prompt": "a"}\n{"prompt"'),
        r"line.jsonl.gz:2: expected one JSON object per line, got '{\"prompt\"' \(",
    ),
    "cut.json": (
        b'[{"a": 1},\n {"a": ',
        r"cut.json: expected a JSON array, got .*\(Exp",
    ),
    "numbers.json": (
        b'[{"a": 1}, 2]',
        r"numbers.json\[1\]: expected a JSON object, got",
    ),
    "deep.json": (
        b'[{"a": ' + b"[" * 101 + b"]" * 101 + b"}]",
        r"nested deeper than 101 objects or lists",
    ),
    "empty.json": (b"[]", r"empty.json: expected at least one row, got none"),
    "wide.csv": (
        b"a,b\n1,2\n1,2,3\n",
        r"wide.csv:3: expected 2 values, as the header h",
    ),
    "twice.csv": (
        b"a,a\n1,2\n",
        r"twice.csv:1: expected a header that names every col",
    ),
    "blank.csv": (b"a,\n1,2\n", r"blank.csv:1: expected a header that names every col"),
    "head.csv": (b"a,b\n", r"head.csv: expected at least one row, got none"),
    "quote.csv": (
        b'a,b\n"1,2\n',
        r"quote.csv: expected comma-separated.*close every q",
    ),
    "other.csv": (
        b"Q,A\n1,2\n",
        r"other.csv:2: expected a field 'prompt', got 'Q', 'A",
    ),
}


TABLES = {
    "rows.parquet": (b"PAR1" + bytes(range(128, 250)) + b"PAR1", "a Parquet table"),
    "named.parquet": (b"no table", "a Parquet table.* is the file whole"),
    "rows.arrow": (b"ARROW1\0\0\xff", "an Arrow table"),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_damaged_table_is_an_input_error(write, datasets, name):
    content, message = TABLES[name]
    with pytest.raises(InputError, match=message):
        files.read_prompts(write(name, content))


def test_zstd(write):
    zstandard = pytest.importorskip("zstandard")
    frames = [zstandard.compress(jsonl([row]).encode()) for row in ROWS]
    assert json_lines.read_jsonl(write("rows.jsonl.zst", b"".join(frames))) == ROWS
    for damaged in (b"\x28\xb5\x2f\xfd" + b"\0" * 30, b"".join(frames)[:-1]):
        with pytest.raises(InputError, match="zstd-compressed data, got what does not"):
            json_lines.read_jsonl(write("damaged.zst", damaged))


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_an_input_error(write, name):
    content, message = DAMAGED[name]
    with pytest.raises(InputError, match=message):
        files.read_prompts(write(name, content))
