"""Finds a checkpoint's folder: local, in object storage or on the Hugging Face hub.

Without a network the hub's own client retries for a minute per file. Here config.json
is requested first, within a time limit, so that a missing checkpoint is one message. A
name without an owner, which only a few old models on the hub have, is refused before
the network is tried.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Sequence
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import HFValidationError

from rlhf_jax.functional.errors import InputError
from rlhf_jax.runs.object_storage import urls

SECONDS = 8.0  # time limit for config.json
OWNERLESS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class NoCheckpoint(InputError):
    """There is neither a folder nor a hub id of a name."""


def folder(path_or_repo_id: str | os.PathLike[str], *, patterns: Sequence[str]) -> Path:
    """Returns the folder of a path or address, or a downloaded snapshot of a hub id.

    Args:
      patterns: patterns of the file names to download.

    Raises:
      NoCheckpoint: there is neither.
    """
    if urls.of(path_or_repo_id) is not None:
        return urls.fetched(path_or_repo_id, only=patterns)
    path = Path(path_or_repo_id)
    try:
        if path.is_dir():
            return path
        is_file = path.is_file()
    except OSError:  # not a valid file name
        is_file = False
    name = str(path_or_repo_id)
    cause: Exception | None = None
    if is_file:
        why = ", which is a file; give the folder that holds it"
    elif not _ID.fullmatch(name):
        why = "; that looks like a path, and there is no such folder; correct it"
    elif "/" not in name and name not in OWNERLESS and not _cached(name):
        why = f"; there is no such folder in {Path.cwd()}, and no OWNER/ of the hub"
        why += "; correct the path"
    else:
        try:
            _reach(name)
            return Path(
                huggingface_hub.snapshot_download(name, allow_patterns=list(patterns))
            )
        except (OSError, HFValidationError) as error:
            cause = error
        message = next(iter(str(cause).splitlines()), type(cause).__name__)
        message = message.removeprefix("Got: ")  # written by a client without network
        why = f"; there is no such folder, and the hub says: {message:.200}"
        why += "; correct the name, or see to the network"
        if path.parent.name and path.parent.is_dir():
            why = f", of which {str(path.parent)!r} is a folder here{why}"
    raise NoCheckpoint(
        f"expected a folder with a checkpoint or a hub id, got {name!r:.200}{why}"
    ) from cause


def _cached(repo_id: str) -> bool:
    try:
        cached = huggingface_hub.try_to_load_from_cache(repo_id, "config.json")
    except HFValidationError:
        return False
    return isinstance(cached, str)


@functools.lru_cache
def _reach(repo_id: str) -> None:
    """Waits for config.json; raises the hub's error, or TimeoutError."""
    failed: list[OSError | HFValidationError] = []

    def download() -> None:
        try:
            huggingface_hub.snapshot_download(repo_id, allow_patterns=["config.json"])
        except (OSError, HFValidationError) as error:
            failed.append(error)

    # In a thread, since the look-up of the hub's address has no time limit.
    waiting = threading.Thread(target=download, daemon=True)
    waiting.start()
    waiting.join(SECONDS)
    if waiting.is_alive():
        failed.append(TimeoutError(f"no answer in {SECONDS:g} s; is there a network?"))
    if failed:
        raise failed[0]
