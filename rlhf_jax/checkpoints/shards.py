"""The files of a Hugging Face checkpoint: JSON, and safetensors in one or many shards.

model.safetensors
model-00001-of-00002.safetensors ... with model.safetensors.index.json
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rlhf_jax.checkpoints import mapping
from rlhf_jax.checkpoints.mapping import NotFinite
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import parsing, write_errors

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
_COMPARED = 2**24  # entries compared at a time


def read_json(file: Path) -> dict[str, Any]:
    """Reads the object in a JSON file.

    Raises:
      InputError: there is no such file, or it holds no JSON object.
    """
    if not file.exists():
        raise InputError(
            f"expected {file.name}, got a folder with {_listing(file.parent)}; give "
            f"one that `save_pretrained` wrote"
        )
    return parsing.read_object(
        file, expected="a JSON object", advice="fetch it again", foreign=True
    )


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a checkpoint's JSON file, indented as `transformers` does."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def open_file(file: Path) -> safe_open:
    """Opens a safetensors file and reads its header.

    Raises:
      InputError: the file is missing, not readable or truncated.
    """
    try:
        return safe_open(file, framework="numpy")
    except OSError as error:
        raise InputError(
            f"expected {file.name} to be readable, got: {error}; check the file "
            f"and its permissions"
        ) from error
    except SafetensorError as error:
        raise InputError(
            f"expected safetensors in {file.name}, got {file.stat().st_size} bytes "
            f"of something else ({error}); it is truncated, fetch it again"
        ) from error


class Tensors:
    """The tensors of some shards by name; slices are read, and checked to be finite."""

    def __init__(
        self, folder: Path, *, named: Callable[[str], str | None] = str
    ) -> None:
        """Reads the headers only.

        Args:
          named: maps a tensor's name in the file to its name here; None leaves the
            tensor out.

        Raises:
          InputError: there are no safetensors, or a shard is missing or truncated.
        """
        self.headers: dict[str, mapping.Header] = {}
        self._stored: dict[str, tuple[Path, str]] = {}
        self._not_finite: dict[str, NotFinite] = {}
        for file in _files(folder):
            shard = open_file(file)
            for stored in shard.keys():  # noqa: SIM118 (not a dict, and not iterable)
                name = named(stored)
                if name is None:
                    continue
                header = shard.get_slice(stored)
                shape, dtype = tuple(header.get_shape()), header.get_dtype()
                self.headers[name] = mapping.Header(shape, dtype)
                self._stored[name] = file, stored

    def read(self, name: str, window: Any) -> np.ndarray:
        """Reads a slice of a tensor; counts the entries that are not finite."""
        # Opened anew, since a memory map keeps what was read until it is closed.
        part = np.asarray(self._open(name)[window])
        not_finite = NotFinite.of(part)
        if any(not_finite):
            before = self._not_finite.get(name, NotFinite())
            self._not_finite[name] = NotFinite(
                *map(sum, zip(before, not_finite, strict=True))
            )
        return part

    def _open(self, name: str) -> Any:
        file, stored = self._stored[name]
        return open_file(file).get_slice(stored)

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors are equal; reads them up to the first difference."""
        first, second = self.headers[name], self.headers[other]
        floats = {first.dtype, second.dtype} <= mapping.FLOATS.keys()
        if not floats or first.shape != second.shape:
            return False
        size, *rest = first.shape or (1,)
        rows = max(1, _COMPARED // max(1, math.prod(rest)))
        for start in range(0, size, rows):
            # Opened anew, as above.
            one, two = (
                self._open(leaf_name)[start : min(start + rows, size)]
                for leaf_name in (name, other)
            )
            if not np.array_equal(one, two):
                return False
        return True

    def check_finite(self) -> None:
        """Raises InputError if an entry read so far was NaN or infinite."""
        mapping.refuse_not_finite(
            {
                "{1} in {0.name}".format(*self._stored[name]): (
                    not_finite,
                    math.prod(self.headers[name].shape),
                )
                for name, not_finite in self._not_finite.items()
            }
        )


def write(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]], *, max_shard_bytes: int
) -> None:
    """Writes the tensors in order, with one shard in memory at a time."""
    names: list[list[str]] = []
    total = 0
    for shard in _batches(tensors, max_shard_bytes=max_shard_bytes):
        # transformers refuses a file that does not name its framework.
        save(shard, folder / f"{len(names)}.shard", metadata={"format": "pt"})
        names.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    if len(names) == 1:
        (folder / "0.shard").rename(folder / WEIGHTS)
        return
    weight_map = {}
    for number, of_shard in enumerate(names):
        file = f"model-{number + 1:05}-of-{len(names):05}.safetensors"
        (folder / f"{number}.shard").rename(folder / file)
        weight_map |= dict.fromkeys(of_shard, file)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / INDEX, index)


def save(
    tensors: dict[str, np.ndarray], path: Path, *, metadata: dict[str, str]
) -> None:
    """Writes a safetensors file; equal tensors and metadata give equal bytes.

    safetensors itself writes the metadata in random order.
    """
    save_file(tensors, path, metadata=metadata)
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        header["__metadata__"] = dict(sorted(metadata.items()))
        ordered = json.dumps(header, separators=(",", ":"), ensure_ascii=False)
        assert len(ordered.encode()) <= size, "a header that is only put in order"
        file.seek(8)
        file.write(ordered.encode().ljust(size))


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a temporary folder that becomes `path` at the end: all or nothing.

    Raises:
      InputError: `path` is a file or a folder that is not empty.
      WriteError: the folder cannot be written.
    """
    path = path.absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(
            f"expected a new or empty folder to save a checkpoint in, got {path}, "
            f"which is in use; choose another or remove it"
        )
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # left by a run that was killed
    with write_errors.writing(path):
        try:
            partial.mkdir(parents=True)
            yield partial
            os.replace(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    """Lists the files of the weights; a single file first, as in transformers."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise InputError(
                f"expected a weight_map of tensors to files in {INDEX}, got "
                f"{weight_map!r:.40}; fetch it again"
            )
        files = [_inside(folder, name) for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise InputError(
                f"expected the shards that {INDEX} names, got none of {missing}; fetch "
                f"the checkpoint again"
            )
        return files
    mapping.refuse_adapter(folder)
    raise InputError(
        f"expected {WEIGHTS} or {INDEX}, got {_listing(folder)}; to convert a "
        f"pytorch_model.bin (a pickle), load it with torch and transformers and call "
        f"`save_pretrained`"
    )


def _inside(folder: Path, name: str) -> Path:
    """Returns the file of that name; InputError if it is outside the folder.

    In the hub's cache the files of a snapshot are links to blobs beside the snapshots.
    """
    allowed = [folder.resolve()]
    snapshots = folder.absolute().parent
    if snapshots.name == "snapshots":
        allowed.append(snapshots.parent.resolve() / "blobs")
    try:
        file = (folder / name).resolve()
        inside = any(file.is_relative_to(parent) for parent in allowed)
    except (OSError, ValueError, RuntimeError):  # too long, a NUL, links in a circle
        inside = False
    plain = name not in ("", ".", "..") and not set("/\\\0").intersection(name)
    if not (plain and inside):
        raise InputError(
            f"expected {INDEX} to name files of the checkpoint's folder, got "
            f"{name!r:.80}, which leads out of it; put the file into the folder, or "
            f"fetch the checkpoint again"
        )
    return folder / name


def _listing(folder: Path) -> str:
    return ", ".join(sorted(file.name for file in folder.iterdir())) or "nothing in it"


def _batches(
    tensors: Iterable[tuple[str, np.ndarray]], *, max_shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > max_shard_bytes:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard
