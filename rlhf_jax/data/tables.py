"""Reads CSV files and, with the package `datasets` (an extra), tables and data sets."""

from __future__ import annotations

import csv
import glob
import importlib
import io
import sys
import tempfile
from pathlib import Path
from typing import Any

from rlhf_jax.data.formats import INSTALL, TSV, Format, NoFile
from rlhf_jax.functional.checks import InputError

Located = list[tuple[str, dict[str, Any]]]

_LABEL = "label"  # the one column of a CSV file that may hold true and false
_FLAGS = {"true": True, "false": False}


def of_hub(source: str) -> Located:
    """Reads the rows of a data set of the Hugging Face hub.

    Args:
      source: hf:NAME or hf:NAME:SPLIT.

    Raises:
      InputError: `datasets` is not installed, or there is no such data set.
    """
    name, _, split = source.removeprefix("hf:").partition(":")
    try:
        datasets = importlib.import_module("datasets")
        table = datasets.load_dataset(name, split=split if split else "train")
    except Exception as error:  # the packages behind `datasets` raise many classes
        missing = isinstance(error, ImportError)
        remedy = f"; run {INSTALL}" if missing else ""
        raise NoFile(
            f"{source}: expected a Hugging Face data set as hf:NAME or hf:NAME:SPLIT,"
            f" got: {error}{remedy}"
        ) from error
    return _rows(source, table)


def of_table(path: Path, form: Format) -> Located:
    """Reads the rows of a Parquet or Arrow file, located as FILE[0], FILE[1], ...

    Raises:
      InputError: `datasets` is not installed, or the file is damaged.
    """
    datasets = form.required(path)
    try:
        with tempfile.TemporaryDirectory() as cache:  # so that no old copy is read
            table = datasets.load_dataset(
                form.builder,
                data_files=glob.escape(str(path.absolute())),
                split="train",
                cache_dir=cache,
                keep_in_memory=True,
            )
    except Exception as error:  # any class, as in `of_hub`
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise InputError(
            f"{path}: expected {form.name}, got what datasets does not read:"
            f" {cause!s:.200}; is the file whole? or else, {form.remedy}"
        ) from error
    return _rows(path, table)


def of_csv(path: Path, text: str, form: Format) -> Located:
    """Reads the rows of a CSV file with a header, located by their first lines.

    Cells are texts as written, except true and false in a column `label`. Python's
    `csv` reads the file: `datasets` would turn "007" into 7.0 and "NA" into nothing.

    Raises:
      InputError: the file is malformed.
    """
    # Cells may have any length; the limit is shared by all readers of `csv`.
    before = csv.field_size_limit(sys.maxsize)
    try:
        return _csv_rows(path, text, form)
    except csv.Error as error:
        raise InputError(
            f"{path}: expected {form.name}, got: {error}; close every quote"
        ) from None
    finally:
        csv.field_size_limit(before)


def _csv_rows(path: Path, text: str, form: Format) -> Located:
    first_line = text.partition("\n")[0]
    semicolons = ";" in first_line and "," not in first_line
    delimiter = "\t" if form is TSV else ";" if semicolons else ","
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    header = [name.strip() for name in next(reader, [])]
    if "" in header or len(set(header)) < len(header):
        raise InputError(
            f"{path}:1: expected a header that names every column once, got"
            f" {', '.join(map(repr, header))}; correct it"
        )
    rows, line = [], reader.line_num
    for cells in reader:
        where, line = f"{path}:{line + 1}", reader.line_num
        if not cells:
            continue
        if len(cells) != len(header):
            raise InputError(
                f"{where}: expected {len(header)} values, as the header has, got"
                f" {len(cells)}; put quotes around a text with {delimiter!r} in it"
            )
        row: dict[str, Any] = dict(zip(header, cells, strict=True))
        if _LABEL in row:
            label = row[_LABEL]
            row[_LABEL] = _FLAGS.get(label.strip().lower(), label)
        rows.append((where, row))
    return rows


def _rows(source: str | Path, table: Any) -> Located:
    return [
        (f"{source}[{number}]", {name: _as_written(row[name]) for name in row})
        for number, row in enumerate(table)
    ]


def _as_written(value: Any) -> Any:
    """Removes the null fields that Arrow adds to objects.

    In a column of objects each has the fields of all: {"role": ..., "name": null}.
    """
    if isinstance(value, dict):
        return {
            name: _as_written(inner)
            for name, inner in value.items()
            if inner is not None
        }
    if isinstance(value, list):
        return [_as_written(inner) for inner in value]
    return value
