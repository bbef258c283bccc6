"""Detects the format of a file by its first bytes, or else by its name."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from pathlib import Path
from types import ModuleType

from rlhf_jax.functional.checks import InputError


class NoFile(InputError):
    """Data is missing or cannot be read; readers with a receipt add its option."""


HEAD = 2**16  # bytes that are read to detect a format


@dataclasses.dataclass(frozen=True)
class Format:
    """A format that is neither JSON Lines nor plain text."""

    name: str  # for messages
    remedy: str  # how to convert a file to JSON Lines or text
    builder: str | None = None  # the builder in `datasets` that reads it, if any
    suffixes: tuple[str, ...] = ()
    magic: tuple[bytes, ...] = ()  # the first bytes of such a file

    def refusal(self, path: Path, *, expected: str = "JSON Lines") -> InputError:
        """Makes the error that such a file is not read, with the remedy."""
        per_line = ", one JSON object per line" if expected == "JSON Lines" else ""
        return InputError(
            f"{path}: expected {expected}{per_line}, got {self.name}; {self.remedy}"
        )

    def reader(self, path: Path) -> ModuleType:
        """Returns the package `datasets`.

        Raises:
          InputError: `datasets` is not installed or does not read the format.
        """
        install = ""
        if self.builder is not None:
            with contextlib.suppress(ImportError):
                return importlib.import_module("datasets")
            install = (
                ", or install what reads it as it is, "
                "`pip install 'rlhf-jax[datasets]'`"
            )
        raise InputError(f"{self.refusal(path)}{install}")


def _compressed(name: str, suffix: str, *magic: bytes, unpack: str) -> Format:
    named, remedy = f"{name}-compressed data", f"unpack it (`{unpack} FILE`)"
    return Format(named, remedy, "text", (suffix,), magic)


def _by_pandas(reader: str) -> str:
    return (
        f"convert it, with pandas by `pandas.{reader}"
        f".to_json(OUT, orient='records', lines=True)`"
    )


ARRAY = Format(
    "a JSON array (a list)",
    "write each of its objects on a line of its own (`jq -c '.[]' FILE`)",
    "json",
)
CSV = Format(
    "comma-separated values (CSV)",
    _by_pandas("read_csv(FILE, dtype=str, keep_default_na=False)"),
    "csv",
    (".csv",),
)
TSV = dataclasses.replace(
    CSV,
    name="tab-separated values (TSV)",
    remedy=_by_pandas("read_csv(FILE, sep='\\t', dtype=str, keep_default_na=False)"),
    suffixes=(".tsv",),
)
_BZIP2 = tuple(b"BZh%d1AY&SY" % level for level in range(1, 10))
COMPRESSED = (
    _compressed("gzip", ".gz", b"\x1f\x8b", unpack="gzip -d"),
    _compressed("bzip2", ".bz2", *_BZIP2, unpack="bzip2 -d"),
    _compressed("xz", ".xz", b"\xfd7zXZ\0", unpack="xz -d"),
    _compressed("zstd", ".zst", b"\x28\xb5\x2f\xfd", unpack="zstd -d"),
)
WRITTEN = (ARRAY, CSV, TSV)  # formats that are text
_FORMATS = (
    *COMPRESSED,
    Format(
        "a Parquet table, which is binary",
        _by_pandas("read_parquet(FILE)"),
        "parquet",
        (".parquet",),
        (b"PAR1",),
    ),
    Format(
        "an Arrow table, which is binary",
        _by_pandas("read_feather(FILE)"),
        "arrow",
        (".arrow", ".feather"),
        (b"ARROW1\0\0", b"\xff\xff\xff\xff"),
    ),
    CSV,
    TSV,
    Format(
        "a zip archive, as Excel's workbooks are",
        "unpack it, or save the sheet as CSV",
        suffixes=(".zip", ".xlsx"),
        magic=(b"PK\x03\x04",),
    ),
    Format("UTF-16 text", "save it as UTF-8", magic=(b"\xff\xfe", b"\xfe\xff")),
    Format(
        "a pointer of Git LFS",
        "fetch the file itself, `git lfs pull`",
        magic=(b"version https://git-lfs.github.com/spec/",),
    ),
)


def of(path: Path, head: bytes) -> Format | None:
    """Returns the format of a file; None is JSON Lines or plain text.

    Args:
      head: its first bytes. If they begin a JSON object the file is JSON Lines,
        whatever its name.
    """
    form = of_bytes(head)
    if form is not None:
        return form
    written = head.removeprefix(b"\xef\xbb\xbf").lstrip()
    if written.startswith(b"[") and written[1:].lstrip()[:1] in (b"{", b"]"):
        return ARRAY
    if not written or written.startswith(b"{"):
        return None
    name = path.name.lower()
    return next((form for form in _FORMATS if name.endswith(form.suffixes)), None)


def of_bytes(head: bytes) -> Format | None:
    """Returns the format that has these first bytes; None if there is none."""
    return next((form for form in _FORMATS if head.startswith(form.magic)), None)


def unpacked_name(path: Path) -> Path:
    """Returns the path without the suffix of a compression."""
    suffixes = [suffix for form in COMPRESSED for suffix in form.suffixes]
    return path.with_suffix("") if path.suffix.lower() in suffixes else path


def is_text(source: str | Path) -> bool:
    """Whether a file's name is that of plain text: .txt, .txt.gz and the like."""
    return unpacked_name(Path(source)).suffix == ".txt"
