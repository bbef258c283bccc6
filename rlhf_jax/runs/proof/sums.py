"""Sums of files, and JSON documents that contain their own sum.

A sum is [bytes, SHA-256 in hex]. A sealed document ends with

    "proof": {"files": {name: sum of another file}, "sha256": of all but this line}

so a change of any byte, in the document or in a file that it names, is found. This
detects damage, not forgery: anyone can seal an edited document again.
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
LARGE = 2**24  # bytes of files from which threads pay off


class Rolling:
    """The sum of bytes that are appended one piece at a time."""

    def __init__(self) -> None:
        self.size = 0
        self._hash = hashlib.sha256()

    def add(self, data: bytes) -> None:
        """Appends `data`."""
        self.size += len(data)
        self._hash.update(data)

    def now(self) -> Sum:
        """Returns the sum of the data so far."""
        return [self.size, self._hash.hexdigest()]


def of_file(path: Path) -> Sum:
    """Returns the sum of a file."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return [file.tell(), digest]


def of_files(folder: Path, names: Sequence[str]) -> dict[str, Sum]:
    """Returns {name: sum} of the files that exist; large files use threads."""
    paths = [path for name in names if (path := folder / name).is_file()]
    present = [path.relative_to(folder).as_posix() for path in paths]
    if sum(path.stat().st_size for path in paths) < LARGE:
        return dict(zip(present, map(of_file, paths), strict=True))
    with ThreadPoolExecutor() as pool:
        return dict(zip(present, pool.map(of_file, paths), strict=True))


def of_rows(path: Path, *, stage: str, size: int | None = None) -> Rolling:
    """Returns the sum of a stage's rows in a JSONL file, up to `size` bytes of them.

    Rows of other stages and a truncated last line are skipped.
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
    expected: Mapping[str, Sum], actual: Mapping[str, Sum], *, called: str = "SHA-256"
) -> Iterator[str]:
    """Yields one fault for each file that is missing or has another sum.

    The second number of a sum may be another check than SHA-256, which is `called` so.
    """
    for name, of in expected.items():
        if name not in actual:
            yield f"{name}: missing"
        elif actual[name] != of:
            (size, check), (now, got) = of, actual[name]
            if now != size:
                yield f"{name}: {now} bytes, expected {size}"
            else:
                yield f"{name}: {called} {got!s:.12}, expected {check!s:.12}"


def sealed(
    document: Mapping[str, Any], *, files: Mapping[str, Sum], doubts: Sequence[str] = ()
) -> dict[str, Any]:
    """Returns the document with its proof.

    Args:
      files: {name: sum} of other files in the same folder.
      doubts: faults that were known when the document was sealed.
    """
    proof: dict[str, Any] = {"files": dict(files)}
    if doubts:
        proof["doubts"] = list(doubts)
    value = {**document, PROOF: proof}
    proof["sha256"] = hashlib.sha256(written(value).encode()).hexdigest()
    return value


def opened(path: Path) -> dict[str, Any] | None:
    """Checks a sealed document, and returns its proof; None if it has none.

    Raises:
      ValueError: the document was changed. OSError: it cannot be read.
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
    """Returns a document as strict JSON; NaN and infinity raise ValueError."""
    return json.dumps(document, indent=2, allow_nan=False) + "\n"
