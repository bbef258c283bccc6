"""Limits and a seccomp filter that a process sets on itself before untrusted code runs.

This module imports little, since every program starts a new process.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import resource
import sys

TYPE_CHECKING = False  # `typing` takes long to import
if TYPE_CHECKING:
    from typing import Any

MIB = 2**20
PRINTED = 2**20  # bytes kept of the output of a request
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
CAPABILITIES = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 of capset(2)


class NumpyFinder:
    """Finds NumPy, and no other package, in a process without site-packages."""

    def __init__(self, folder: str) -> None:
        self.folder = folder  # of the package numpy

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Implements `importlib.abc.MetaPathFinder`."""
        if name != "numpy":
            return None
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each thread would take memory
        return importlib.util.spec_from_file_location(
            name, f"{self.folder}/__init__.py", submodule_search_locations=[self.folder]
        )


def limits(settings: dict[str, Any]) -> None:
    """Limits processor time (seconds), address space and file sizes (MiB)."""
    for which, most in (
        (resource.RLIMIT_CPU, int(settings["seconds"]) + 2),
        (resource.RLIMIT_AS, settings["memory"] * MIB),
        (resource.RLIMIT_FSIZE, settings["file_size"] * MIB),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # the system lacks this limit
            _, hard = resource.getrlimit(which)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(which, (int(most), int(most)))


class Printed(io.BytesIO):
    """Standard output, of which the first `PRINTED` bytes are kept."""

    def write(self, data: Any, /) -> int:
        """Keeps what fits; returns the length of `data`, as if all were written."""
        super().write(memoryview(data)[: max(0, PRINTED - self.tell())])
        return len(data)


def no_standard_files() -> None:
    """Redirects standard input, output and error to /dev/null."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)


def take(settings: dict[str, Any]) -> tuple[int, int]:
    """Applies the limits and the seccomp filter (`ways`), and drops all privileges.

    Returns:
      Descriptors of the former standard input and output, which lead to the judge.

    Raises:
      OSError: the system refuses.
    """
    pipes = os.dup(0), os.dup(1)
    os.chdir(settings["folder"])
    sys.meta_path.append(NumpyFinder(settings["numpy"]))
    limits(settings)
    if settings["filter"]:
        _confine(bytes.fromhex(settings["filter"]))
    no_standard_files()
    return pipes


def _confine(program: bytes) -> None:
    import ctypes

    class Filter(ctypes.Structure):
        _fields_ = (("count", ctypes.c_ushort), ("program", ctypes.c_char_p))

    libc, word = ctypes.CDLL(None, use_errno=True), ctypes.c_ulong

    def call(function: Any, *args: Any) -> None:
        if function(*args) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"{function.__name__}: {os.strerror(number)}")

    if os.geteuid() == 0:  # without capabilities root has an owner's rights only
        version = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
        call(libc.capset, version, (ctypes.c_uint32 * 6)())
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, word(1), word(0), word(0), word(0))
    read = ctypes.byref(Filter(len(program) // 8, program))
    call(libc.prctl, PR_SET_SECCOMP, word(FILTER), read)
