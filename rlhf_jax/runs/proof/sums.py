"""Sums of files, bytes and SHA-256, and JSON that carries its own.

A sum is [bytes, SHA-256 in hex]. A document that is sealed ends with

    "proof": {"files": {name: sum of another file}, "sha256": of all but this line}

so that no byte of it is free: whatever changes in it, or in a file that it names, is
seen. This finds damage, not forgery: whoever edits can seal again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_jax.runs import parsing

Sum = list[Any]
PROOF = "proof"  # the key of a sealed document
LARGE = 2**24  # bytes of files that are worth threads


class Rolling:
    """The sum of what was appended so far."""

    def __init__(self) -> None:
        self.size = 0
        self._hash = hashlib.sha256()

    def add(self, data: bytes) -> None:
        """Takes what is appended."""
        self.size += len(data)
        self._hash.update(data)

    def now(self) -> Sum:
        """The sum, which more may follow."""
        return [self.size, self._hash.hexdigest()]


def of_file(path: Path) -> Sum:
    """The sum of a whole file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]


def of_files(folder: Path, names: Sequence[str]) -> dict[str, Sum]:
    """{name: sum} of the files of a folder that are there; large ones side by side."""
    paths = [path for name in names if (path := folder / name).is_file()]
    there = [path.relative_to(folder).as_posix() for path in paths]
    if sum(path.stat().st_size for path in paths) < LARGE:
        return dict(zip(there, map(of_file, paths), strict=True))
    with ThreadPoolExecutor() as pool:
        return dict(zip(there, pool.map(of_file, paths), strict=True))


def of_rows(path: Path, *, stage: str, size: int | None = None) -> Rolling:
    """The sum of a stage's rows in a JSONL file of a run, of the first `size` bytes.

    Rows of other stages do not count, so that it holds wherever they stand; neither
    does a last line that was cut off.
    """
    begins = json.dumps({"stage": stage}, ensure_ascii=False)[:-1].encode() + b","
    rolling = Rolling()
    if path.is_file():
        with path.open("rb") as file:
            for line in file:
                if size is not None and rolling.size >= size:
                    break
                if line.startswith(begins) and line.endswith(b"\n"):
                    rolling.add(line)
    return rolling


def differences(
    expected: Mapping[str, Sum], actual: Mapping[str, Sum]
) -> Iterator[str]:
    """What is wrong with each file that is missing or is not what was written."""
    for name, of in expected.items():
        if name not in actual:
            yield f"{name}: missing"
        elif actual[name] != of:
            (size, digest), (now, got) = of, actual[name]
            shown = [f"{now} bytes", f"{size}"]
            if now == size:
                shown = [f"SHA-256 {got[:12]}", digest[:12]]
            yield f"{name}: {shown[0]}, expected {shown[1]}"


def sealed(
    document: Mapping[str, Any], *, files: Mapping[str, Sum], doubts: Sequence[str] = ()
) -> dict[str, Any]:
    """The document with its proof.

    Args:
      files: of other files, by their names beside it.
      doubts: what was not as it should be when it was sealed.
    """
    proof: dict[str, Any] = {"files": dict(files)}
    if doubts:
        proof["doubts"] = list(doubts)
    value = {**document, PROOF: proof}
    proof["sha256"] = hashlib.sha256(written(value).encode()).hexdigest()
    return value


def opened(path: Path) -> dict[str, Any] | None:
    """The proof of a sealed document that is whole; None where it has none.

    Raises:
      ValueError: it is not as it was written; says why. OSError: it cannot be read.
    """
    content = path.read_bytes()
    try:
        text = content.decode()
        value = parsing.of_json(text, parsing.Source(path.name, "JSON"))
    except ValueError as error:
        raise ValueError(f"no JSON: {error}") from error
    if not isinstance(value, dict) or PROOF not in value:
        return None
    match value[PROOF]:
        case {"files": dict(), "sha256": str()} as proof:
            whole = written(value) == text
            expected = proof.pop("sha256")
            got = hashlib.sha256(written(value).encode()).hexdigest()
            if whole and got == expected:
                return proof
            raise ValueError(
                f"SHA-256 {got[:12]}, expected {expected[:12]}"
                if whole
                else "not as it was written"
            )
    raise ValueError("not as it was written")


def written(document: Mapping[str, Any]) -> str:
    """A document as its file has it: strict JSON; NaN and infinity raise ValueError."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
