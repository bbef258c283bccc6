"""What a run folder holds that is not a result: files being written, old snapshots.

This module loads neither JAX nor orbax.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

UNFINISHED = ".tmp"  # suffix of files that a kill inside `replacing` may leave
SET_ASIDE = ".set-aside"  # suffix of a snapshot newer than the one resumed from
DELETED = "deleted"  # folder of older snapshots, while they are removed


@contextlib.contextmanager
def replacing(path: Path, *, writer: str = "") -> Iterator[Path]:
    """Yields the path of an unfinished file, which replaces `path` at the end.

    A kill leaves the old file or the new one, whole; an error leaves the old one.

    Args:
      writer: part of the unfinished file's name, if several processes write `path`.
    """
    unfinished = path.with_name(f"{path.name}{writer}{UNFINISHED}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        with contextlib.suppress(OSError):  # it has replaced `path`
            unfinished.unlink()
