"""Digests of a snapshot's arrays and a list of its files, which reveal damage.

digests        of every array, as `fingerprint.digest` computes it on the devices, and
               of the meta. They are in the meta, under DIGESTS, and prove that restored
               values are those that were saved.
LIST           a file in the snapshot's folder: {file: [bytes, CRC-32]} of all its other
               files. It finds missing and truncated files, and flipped bits on which no
               array depends. Files above MAX_READ, all of arrays, have only a size.

The list is written as soon as the snapshot is complete. If the run was killed before
that, the resume writes it once the digests have proven the arrays. A snapshot of an
older version has neither digests nor a list, and is read without a proof.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax

from rlhf_jax.devices import processes
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import StopError
from rlhf_jax.roles.reference import fingerprint
from rlhf_jax.runs import parsing
from rlhf_jax.runs.proof import sums
from rlhf_jax.runs.unfinished import UNFINISHED, replacing

Array = jax.Array
DIGESTS = "digests"  # key in a snapshot's meta
LIST = "files.json"
MAX_READ = 2**20  # largest bytes of a file whose CRC-32 is listed


class DamagedError(StopError):
    """A snapshot differs from what was saved."""


def damaged(where: Path, faults: list[str]) -> DamagedError:
    """Returns the error that names a snapshot's folder and its faults."""
    return DamagedError(
        f"{where} is damaged: expected what was saved, got\n{checks.listed(faults)}"
    )


def require_whole(where: Path, faults: list[str]) -> None:
    """Raises DamagedError if a snapshot's folder has faults."""
    if faults:
        raise damaged(where, faults)


def of_arrays(arrays: Mapping[str, Array]) -> dict[str, str]:
    """Returns {path: digest in hex}; all processes of a run must call it."""
    words = {
        path: processes.in_turn(fingerprint.digest(leaf, path=path))
        for path, leaf in arrays.items()
    }
    return {
        path: fingerprint.in_hex(pair) for path, pair in processes.whole(words).items()
    }


def of_meta(meta: Mapping[str, Any]) -> str:
    """Returns the digest of JSON values in hex, whatever the order of keys."""
    text = json.dumps(json.loads(json.dumps(meta)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def differing(expected: Mapping[str, str], actual: Mapping[str, str]) -> list[str]:
    """Returns one fault for every array whose digest differs or is missing."""
    return [
        f"{path}: digest {actual.get(path, 'none')}, expected "
        f"{expected.get(path, 'none')}"
        for path in sorted(expected.keys() | actual.keys())
        if expected.get(path) != actual.get(path)
    ]


def write_list(folder: Path) -> None:
    """Writes the list of a complete snapshot in one step."""
    with replacing(folder / LIST) as unfinished:
        unfinished.write_text(json.dumps(_files(folder)), encoding="utf-8")


def has_list(folder: Path) -> bool:
    """Returns whether a snapshot has its list; older or interrupted ones have none."""
    return (folder / LIST).exists()


def faults_of_files(folder: Path) -> list[str]:
    """Returns how the files of a snapshot contradict its list; none without a list."""
    if not has_list(folder):
        return []
    try:
        text = (folder / LIST).read_bytes()
        present = _files(folder)
    except OSError as error:
        return [str(error)]
    try:
        expected = parsing.of_json(text, parsing.Source(LIST, "a list of files"))
        # Every byte of the list is checked, so that none can change unnoticed.
        if json.dumps(expected).encode() != text:
            return [f"{LIST}: it is not as it was written"]
        sizes = {name: [size, check] for name, (size, check) in expected.items()}
    except (ValueError, TypeError, AttributeError) as error:
        return [f"{LIST}: {error}"]
    return [*sums.differences(sizes, present, called="CRC-32")]


def added(folder: Path) -> list[str]:
    """Returns the files of a faultless snapshot that are not in its list."""
    if not has_list(folder):
        return []
    text = (folder / LIST).read_bytes()
    expected = parsing.of_json(text, parsing.Source(LIST, "a list of files"))
    return [name for name in _names(folder) if name not in expected]


def _names(folder: Path) -> Iterator[str]:
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if not path.is_dir() and name not in (LIST, f"{LIST}{UNFINISHED}"):
            yield name


def _files(folder: Path) -> dict[str, list[int | None]]:
    files: dict[str, list[int | None]] = {}
    for name in _names(folder):
        # Opening a file makes network file systems refresh its size.
        with (folder / name).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            check = zlib.crc32(file.read()) if size <= MAX_READ else None
        files[name] = [size, check]
    return files
