"""A checkpoint's folder: here, or a copy from object storage or the Hugging Face hub.

Without a network the hub's own clients try again for a minute, a file at a time. Here
the hub is asked for config.json first, within a time limit: what it does not have, and
the local cache neither, is one message. A name without an owner, which the hub has of a
few old models alone, is refused before the network is tried.
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

SECONDS = 8.0  # for config.json to come
OWNERLESS = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl", "distilgpt2")
_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?")


class NoCheckpoint(InputError):
    """There is no folder of a name, and no hub id."""


def folder(path_or_repo_id: str | os.PathLike[str], *, patterns: Sequence[str]) -> Path:
    """The folder of that name or address, or else the snapshot of that hub id.

    Args:
      patterns: of the file names to download.

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
    except OSError:  # a name that no system takes
        is_file = False
    name = str(path_or_repo_id)
    cause: Exception | None = None
    if is_file:
        why = ", which is a file; give the folder that holds it"
    elif not _ID.fullmatch(name):
        why = "; that looks like a path, and there is no such folder"
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
        message = message.removeprefix("Got: ")  # of a client without a network
        why = f"; there is no such folder, and the hub says: {message:.200}"
        why += "; correct the name, or see to the network"
        if path.parent.name and path.parent.is_dir():
            why = f", of which {str(path.parent)!r} is a folder here{why}"
    raise NoCheckpoint(
        f"expected a folder with a checkpoint or a hub id, got {name!r:.200}{why}"
    ) from cause


def _cached(repo_id: str) -> bool:
    """Whether the local cache has it, by a download of another program perhaps."""
    try:
        cached = huggingface_hub.try_to_load_from_cache(repo_id, "config.json")
    except HFValidationError:
        return False
    return isinstance(cached, str)


@functools.lru_cache
def _reach(repo_id: str) -> None:
    """Waits for config.json; raises what the hub does, or that nothing came in time."""
    failed: list[OSError | HFValidationError] = []

    def download() -> None:
        try:
            huggingface_hub.snapshot_download(repo_id, allow_patterns=["config.json"])
        except (OSError, HFValidationError) as error:
            failed.append(error)

    # A thread, since looking up the hub's address has no time limit of its own.
    waiting = threading.Thread(target=download, daemon=True)
    waiting.start()
    waiting.join(SECONDS)
    if waiting.is_alive():
        failed.append(TimeoutError(f"no answer in {SECONDS:g} s; is there a network?"))
    if failed:
        raise failed[0]
