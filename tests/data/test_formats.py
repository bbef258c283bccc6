"""File formats are recognised, and refused by name where nothing reads them."""

import gzip
import io
import json
import os
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from rlhf_jax.data import files, formats, json_lines, unpaired
from rlhf_jax.functional.checks import InputError

ROWS = [{"prompt": f"Q{i}", "response": "A"} for i in range(4)]
JSONL = "".join(json.dumps(row) + "\n" for row in ROWS).encode()
ARRAY = json.dumps(ROWS).encode()
EXTRA = r"or install what reads it as it is, `pip install 'rlhf-jax\[datasets\]'`"
READERS = [
    files.read_prompts,
    files.read_demonstrations,
    lambda path: files.read_demonstrations(path, turns=True),
    files.read_preferences,
    unpaired.read_labelled,
    json_lines.read_jsonl,
]


def zipped():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("rows.jsonl", JSONL)
    return file.getvalue()


FORMATS = {
    "zstd-compressed data; unpack it first, or install zstandard": (
        ".zst",
        b"\x28\xb5\x2f\xfd" + JSONL,
    ),
    rf"a Parquet table.*pandas.read_parquet.*{EXTRA}": (".parquet", b"PAR1\x15\xff"),
    rf"an Arrow table.*pandas.read_feather.*{EXTRA}": (".arrow", b"ARROW1\0\0\xff"),
}
BY_NOTHING = {
    "a zip archive, as Excel's .*unpack it, or save": (".xlsx", zipped()),
    "UTF-16 text; save it as UTF-8": (".jsonl", JSONL.decode().encode("utf-16")),
    "gzip-compressed data; unpack it first": (
        ".gz",
        gzip.compress(gzip.compress(JSONL)),
    ),
    "a pointer of Git LFS; fetch the file itself": (
        ".parquet",
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n",
    ),
}


@pytest.fixture
def without(monkeypatch):
    for package in ("datasets", "zstandard"):
        monkeypatch.setitem(sys.modules, package, None)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("named", ["as it is", "as JSON Lines"])
@pytest.mark.parametrize(
    ("description", "file"), FORMATS.items(), ids=range(len(FORMATS))
)
def test_a_format_is_named_by_its_content(
    tmp_path, without, read, named, description, file
):
    suffix, content = file
    path = tmp_path / f"rows{suffix if named == 'as it is' else '.jsonl'}"
    path.write_bytes(content)
    named = f"^{path}: expected JSON Lines, one JSON object per line, got {description}"
    with pytest.raises(InputError, match=f"{named}$"):
        read(str(path))


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(("description", "file"), BY_NOTHING.items(), ids=range(4))
def test_what_nothing_reads_is_refused_with_datasets_too(
    tmp_path, read, description, file
):
    suffix, content = file
    path = tmp_path / f"rows{suffix}"
    path.write_bytes(content)
    with pytest.raises(
        InputError,
        match=f"^{path}: expected JSON Lines.*{description}((?!datasets).)*$",
    ):
        read(path)


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("before", [b"", b"\xef\xbb\xbf", b" \n\t"])
def test_an_array_is_told_by_its_first_object(tmp_path, without, indent, before):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(before + json.dumps(ROWS, indent=indent).encode())
    assert files.read_demonstrations(path) == ROWS
    path.write_bytes(before + b"[]")
    with pytest.raises(InputError, match="expected at least one row, got none"):
        files.read_demonstrations(path)


@pytest.mark.parametrize(
    "name", ["rows.csv", "rows.json", "rows.parquet", "rows.jsonl.gz", "rows"]
)
def test_json_lines_are_that_by_any_name(tmp_path, without, name):
    path = tmp_path / name
    path.write_bytes(b"\xef\xbb\xbf" + JSONL.replace(b"\n", b"\r\n"))
    assert files.read_demonstrations(path) == ROWS


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet", "rows.jsonl"])
def test_an_empty_file_is_empty_by_any_name(tmp_path, without, name):
    path = tmp_path / name
    for content in (b"", b" \n\n"):
        path.write_bytes(content)
        with pytest.raises(InputError, match=r"at least one row, got none"):
            files.read_demonstrations(path)


def test_texts_and_prompts_of_texts(tmp_path, without):
    path = tmp_path / "plain.txt"
    for content, message in (
        (b"PAR1\x15\x04\xff", "expected text, got a Parquet table, which is binary; c"),
        ("text".encode("utf-16"), "expected text, got UTF-16 text; save it as UTF-8"),
        (
            gzip.compress(b"PAR1\x15"),
            "expected text, got a Parquet table, which is bin",
        ),
    ):
        path.write_bytes(content)
        for read in (json_lines.read_text, files.read_prompts):
            with pytest.raises(InputError, match=message):
                read(path)


@pytest.mark.parametrize("text", ['[{"a": 1}]', '{"a": 1}', "a,b", "BZh, a name", "PK"])
def test_a_text_may_look_like_anything(tmp_path, without, text):
    path = tmp_path / "plain.txt"
    path.write_text(text)
    assert json_lines.read_text(path) == text
    assert files.read_prompts(path) == [{"prompt": text}]


def test_texts_by_name():
    for name in ("a.txt", "b/a.txt.gz", "a.txt.BZ2", Path("a.txt.zst")):
        assert formats.is_text(name)
    for name in ("a.jsonl", "a.txt.jsonl", "a.gz", "txt", "hf:a/b"):
        assert not formats.is_text(name)


def test_a_pipe_is_read_once(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    content = JSONL * 2000  # more than the bytes that tell a format
    writer = threading.Thread(target=path.write_bytes, args=(content,))
    writer.start()
    assert len(files.read_demonstrations(path)) == 8000
    writer.join()
