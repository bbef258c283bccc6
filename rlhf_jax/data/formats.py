"""Detects the format of a file by its first bytes, or else by its name."""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import importlib
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_jax.functional.checks import InputError


class NoFile(InputError):
    """Data is missing or cannot be read; readers with a receipt add its option."""


HEAD = 2**16  # bytes that are read to detect a format
INSTALL = "`pip install 'rlhf-jax[datasets]'`"


@dataclasses.dataclass(frozen=True)
class Format:
    """A format that is neither JSON Lines nor plain text."""

    name: str  # for messages
    suffixes: tuple[str, ...] = ()
    magic: tuple[bytes, ...] = ()  # the first bytes of such a file
    remedy: str = "unpack it first"  # how to make a file that is read
    builder: str | None = None  # the builder in `datasets` that reads a table
    unpack: Callable[[bytes], bytes] | None = None  # of compressed data
    package: str | None = None  # that reads it, if it is no dependency of this one
    install: str = ""  # how to get the package

    def refusal(self, path: Path, *, expected: str = "JSON Lines") -> InputError:
        """Makes the error that such a file is not read, with the remedy."""
        per_line = ", one JSON object per line" if expected == "JSON Lines" else ""
        return InputError(
            f"{path}: expected {expected}{per_line}, got {self.name}; {self.remedy}"
        )

    def required(self, path: Path) -> Any:
        """Imports the package that reads the format; InputError says how to get it."""
        assert self.package is not None
        try:
            return importlib.import_module(self.package)
        except ImportError:
            raise InputError(
                f"{self.refusal(path)}, or install {self.install}"
            ) from None

    def unpacked(self, path: Path, data: bytes) -> bytes:
        """Returns the content of compressed data; InputError if it is damaged."""
        assert self.unpack is not None
        if self.package is not None:
            self.required(path)
        try:
            return self.unpack(data)
        except Exception as error:  # the packages raise several classes
            raise InputError(
                f"{path}: expected {self.name}, got what does not unpack:"
                f" {error!s:.200}; is the file whole?"
            ) from error


def _unpack_zstd(data: bytes) -> bytes:
    zstandard = importlib.import_module("zstandard")
    parts = []
    while data:
        frame = zstandard.ZstdDecompressor().decompressobj()
        parts.append(frame.decompress(data))
        if not frame.eof:
            raise EOFError("it ends within a frame")
        data = frame.unused_data
    return b"".join(parts)


ARRAY = Format("a JSON array (a list)")
CSV = Format("comma-separated values (CSV)", (".csv",))
TSV = Format("tab-separated values (TSV)", (".tsv",))
WRITTEN = (ARRAY, CSV, TSV)  # formats that are text
_BZIP2 = tuple(b"BZh%d1AY&SY" % level for level in range(1, 10))
COMPRESSED = (
    Format("gzip-compressed data", (".gz",), (b"\x1f\x8b",), unpack=gzip.decompress),
    Format("bzip2-compressed data", (".bz2",), _BZIP2, unpack=bz2.decompress),
    Format("xz-compressed data", (".xz",), (b"\xfd7zXZ\0",), unpack=lzma.decompress),
    Format(
        "zstd-compressed data",
        (".zst",),
        (b"(\xb5/\xfd",),
        unpack=_unpack_zstd,
        package="zstandard",
        install="zstandard",
    ),
)
_BY_PANDAS = (
    "convert it, with pandas by `pandas.read_{}(FILE).to_json(OUT, orient='records',"
    " lines=True)`"
)
_FORMATS = (
    *COMPRESSED,
    Format(
        "a Parquet table, which is binary",
        (".parquet",),
        (b"PAR1",),
        _BY_PANDAS.format("parquet"),
        builder="parquet",
        package="datasets",
        install=f"what reads it as it is, {INSTALL}",
    ),
    Format(
        "an Arrow table, which is binary",
        (".arrow", ".feather"),
        (b"ARROW1\0\0", b"\xff\xff\xff\xff"),
        _BY_PANDAS.format("feather"),
        builder="arrow",
        package="datasets",
        install=f"what reads it as it is, {INSTALL}",
    ),
    CSV,
    TSV,
    Format(
        "a zip archive, as Excel's workbooks are",
        (".zip", ".xlsx"),
        (b"PK\x03\x04",),
        "unpack it, or save the sheet as CSV",
    ),
    Format("UTF-16 text", (), (b"\xff\xfe", b"\xfe\xff"), "save it as UTF-8"),
    Format(
        "a pointer of Git LFS",
        (),
        (b"version https://git-lfs.github.com/spec/",),
        "fetch the file itself, `git lfs pull`",
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
