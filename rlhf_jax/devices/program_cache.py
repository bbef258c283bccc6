"""Compiled programs on disk, so that a second start does not compile them again.

It is JAX's own persistent compilation cache, whose key is all that a program depends
on: its text, the compiler's version and flags, the devices. What runs is the same
machine code, so the numbers are the same bits. Of several processes the first writes,
and each reads its own folder, or one that they share. `give_back_memory` is for what
making a program has left in memory.

`compiled_since` counts how often each program is compiled: a run whose shapes change
compiles in its loop. JAX tells every listener of a compilation and of a program that it
reads from disk instead; both count, as both are a new shape. A program is known by its
function's name. `missed_since` says how many of them the disk did not have.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
from jax import monitoring

from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError

MAX_BYTES = 4 * 2**30  # of a folder at a start, before the oldest programs go
EVENT = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"
FROM_DISK = "<from disk>"  # no function has this name
Counts = collections.Counter[str]
_counts: Counts = collections.Counter()


def default_folder() -> Path | None:
    """rlhf_jax/compiled in the user's cache directory; None without a home."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache_home):  # the standard has others ignored
        return Path(cache_home) / "rlhf_jax" / "compiled"
    try:
        return Path.home() / ".cache" / "rlhf_jax" / "compiled"
    except RuntimeError:
        return None


def use_default() -> None:
    """`use(default_folder())`, unless JAX has been told otherwise already.

    By JAX_COMPILATION_CACHE_DIR or JAX_ENABLE_COMPILATION_CACHE. Without a place to
    write to nothing is kept.
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] is not None:
        return
    folder = default_folder()
    if folder is None or not settings["jax_enable_compilation_cache"]:
        return
    try:
        use(folder)
    except InputError:  # a home that cannot be written to is no mistake of the user's
        return


def use(folder: Path | None) -> None:
    """Keeps every program that is compiled from now on, and reads those kept before.

    Small ones too: starting takes dozens of them, which add up to seconds.

    Args:
      folder: is made where it is missing; of more than `MAX_BYTES` the oldest programs
        are removed. None keeps and reads none.

    Raises:
      InputError: the folder cannot be made or written to.
    """
    if folder is None:
        jax.config.update("jax_compilation_cache_dir", None)
        return
    folder = folder.expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise InputError(
            f"--compilation-cache: expected a folder, or one that can be made, that "
            f"can be written to, got {folder}: {error.strerror}; name another, or None"
        ) from error
    if processes.is_first():
        prune(folder, max_bytes=MAX_BYTES)
    jax.config.update("jax_compilation_cache_dir", os.fspath(folder))
    # JAX keeps programs of a second or more; a start is made of dozens of smaller ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def prune(folder: Path, *, max_bytes: int) -> None:
    """Removes the programs that were written first until `max_bytes` are left.

    JAX's own bound reads a file for every program at every program that it writes.
    """
    programs = []
    for path in folder.glob("*-cache"):
        try:
            status = path.stat()
        except OSError:  # another run removes them too
            continue
        programs.append((status.st_mtime_ns, status.st_size, path))
    left = sum(size for _, size, _ in programs)
    for _, size, path in sorted(programs):
        if left <= max_bytes:
            return
        path.unlink(missing_ok=True)
        left -= size


def give_back_memory() -> None:
    """Gives memory that the compiler has freed back to the system.

    Half of what a small run holds on a CPU. Only glibc keeps it, and can be asked.
    """
    with contextlib.suppress(OSError, TypeError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def compiled_so_far() -> Counts:
    """{program: compilations} of this process since this was first called.

    `FROM_DISK` counts those among them that were read and not compiled.
    """
    _listen()
    return _counts.copy()


def compiled_since(before: Counts) -> dict[str, int]:
    """{program: compilations} since `before`, of `compiled_so_far`; the most first."""
    counts = (compiled_so_far() - before).most_common()
    return {name: count for name, count in counts if name != FROM_DISK}


def missed_since(before: Counts) -> int:
    """How many of `compiled_since(before)` the disk did not have."""
    since = compiled_so_far() - before
    return sum(compiled_since(before).values()) - since[FROM_DISK]


@functools.cache
def _listen() -> None:
    monitoring.register_event_duration_secs_listener(_count)
    monitoring.register_event_listener(_count_hit)


def _count(event: str, duration_secs: float, **about: Any) -> None:
    del duration_secs
    if event == EVENT:
        name = str(about.get("fun_name", "unnamed"))
        _counts[name.removeprefix("jit(").removesuffix(")")] += 1


def _count_hit(event: str, **about: Any) -> None:
    del about
    if event == HIT:
        _counts[FROM_DISK] += 1
