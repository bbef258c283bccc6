"""Compiled programs on disk, so that a second start does not compile them again.

This is JAX's own persistent compilation cache. Its key covers all that a program
depends on: its text, the compiler's version and flags, and the devices. The same
machine code runs, so the numbers are equal to the bit. With several processes the first
writes, and each reads its own folder, or a shared one. `give_back_memory` frees memory
that compilation leaves behind.

`compiled_since` counts how often each program is compiled: a run whose shapes change
compiles in its loop. Programs that JAX reads from disk count too, as they are new
shapes. A program is identified by its function's name. `missed_since` says how many of
them were not on disk.
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

MAX_BYTES = 4 * 2**30  # of a folder; the oldest programs beyond it go at a start
EVENT = "/jax/core/compile/backend_compile_duration"
HIT = "/jax/compilation_cache/cache_hits"
FROM_DISK = "<from disk>"  # no function has this name
Counts = collections.Counter[str]
_counts: Counts = collections.Counter()


def default_folder() -> Path | None:
    """rlhf_jax/compiled in the user's cache directory; None without a home."""
    cache_home = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache_home):  # the XDG standard ignores relative paths
        return Path(cache_home) / "rlhf_jax" / "compiled"
    try:
        return Path.home() / ".cache" / "rlhf_jax" / "compiled"
    except RuntimeError:
        return None


def use_default() -> None:
    """`use(default_folder())`, unless JAX is configured otherwise.

    JAX_COMPILATION_CACHE_DIR and JAX_ENABLE_COMPILATION_CACHE have precedence. If the
    folder cannot be written to, nothing is kept.
    """
    settings = jax.config.values
    if settings["jax_compilation_cache_dir"] is not None:
        return
    folder = default_folder()
    if folder is None or not settings["jax_enable_compilation_cache"]:
        return
    try:
        use(folder)
    except InputError:  # a read-only home is not the user's mistake
        return


def use(folder: Path | None) -> None:
    """Keeps every program that is compiled from now on, and reads those kept before.

    Small programs too: a start compiles dozens of them, which takes seconds.

    Args:
      folder: is made if missing; beyond `MAX_BYTES` the oldest programs are removed.
        None neither keeps nor reads programs.

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
    # By default JAX keeps only programs that take a second or more to compile.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)


def prune(folder: Path, *, max_bytes: int) -> None:
    """Removes the oldest programs until at most `max_bytes` are left.

    JAX's own bound would read a file per program whenever it writes one.
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
    """Returns memory that the compiler has freed to the system.

    This is half of a small run's memory on a CPU. Only glibc keeps such memory.
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
    """{program: compilations} since `before`, an earlier count; the most first."""
    counts = (compiled_so_far() - before).most_common()
    return {name: count for name, count in counts if name != FROM_DISK}


def missed_since(before: Counts) -> int:
    """How many programs of `compiled_since(before)` were not on disk."""
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
