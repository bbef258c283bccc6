"""The files of a Hugging Face checkpoint: JSON, and safetensors in one or many shards.

model.safetensors
model-00001-of-00002.safetensors ... with model.safetensors.index.json
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import keys

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      InputError: there is no such file, or it holds no JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"expected {file.name}, got a folder with {_listing(file.parent)}; give "
            f"one that `save_pretrained` wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise InputError(
            f"expected JSON in {file.name}, got: {error}; fetch it again"
        ) from error
    if not isinstance(content, dict):
        raise InputError(
            f"expected an object in {file.name}, got {content!r:.40}; fetch it again"
        )
    return content


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes a checkpoint's JSON file, indented as `transformers` does."""
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def open_file(file: Path) -> safe_open:
    """A safetensors file, of which the header has been read.

    Raises:
      InputError: it is not there, not readable, or truncated.
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


def read(
    folder: Path,
) -> tuple[dict[str, keys.Header], Callable[[str], Any]]:
    """What the shards hold, from their headers alone, and a tensor to read slices of.

    Raises:
      InputError: no safetensors, a shard that the index names is missing, or a shard is
        truncated.
    """
    headers, file_of = {}, {}
    for file in _files(folder):
        shard = open_file(file)
        for name in shard.keys():  # noqa: SIM118 (not a dict, and not iterable)
            header = shard.get_slice(name)
            headers[name] = keys.Header(tuple(header.get_shape()), header.get_dtype())
            file_of[name] = file
    # Opened anew, as what was read through a mapping is held until it is closed.
    return headers, lambda name: open_file(file_of[name]).get_slice(name)


def write(
    folder: Path, tensors: Iterable[tuple[str, np.ndarray]], *, max_shard_bytes: int
) -> None:
    """Writes the tensors in order, holding one shard of them at a time."""
    names: list[list[str]] = []
    total = 0
    for shard in _batches(tensors, max_shard_bytes=max_shard_bytes):
        # transformers refuses a file that does not name its framework.
        save_file(shard, folder / f"{len(names)}.shard", metadata={"format": "pt"})
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


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path` that takes its place at the end: whole, or not there.

    Raises:
      InputError: `path` is a file, or a folder with something in it.
    """
    path = path.absolute()
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise InputError(
            f"expected a new or empty folder to save a checkpoint in, got {path}, "
            f"which is in use; choose another or remove it"
        )
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a run that was killed here
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _files(folder: Path) -> list[Path]:
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(name, str) for name in weight_map.values()
        ):
            raise InputError(
                f"expected a weight_map of tensors to files in {INDEX}, got "
                f"{weight_map!r:.40}; fetch it again"
            )
        files = [folder / name for name in sorted(set(weight_map.values()))]
        missing = [file.name for file in files if not file.exists()]
        if missing:
            raise InputError(
                f"expected the shards that {INDEX} names, got none of {missing}; fetch "
                f"the checkpoint again"
            )
        return files
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    raise InputError(
        f"expected {WEIGHTS} or {INDEX}, got {_listing(folder)}; to convert a "
        f"pytorch_model.bin (a pickle), load it with torch and transformers and call "
        f"`save_pretrained`"
    )


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
