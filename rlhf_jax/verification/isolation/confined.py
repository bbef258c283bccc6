"""What a process takes upon itself before code that is not trusted runs in it.

This module loads little: a process starts with every program.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import resource
import sys

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from typing import Any

MIB = 2**20
PRINTED = 2**20  # bytes that are passed on of what a request printed
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, FILTER = 38, 22, 2
CAPABILITIES = 0x20080522  # the version of capset(2)'s structures


class NumpyFinder:
    """Finds NumPy, of all that is installed, in a process without site-packages."""

    def __init__(self, folder: str) -> None:
        self.folder = folder  # of the package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Of `importlib`."""
        if name != "numpy":
            return None
        os.environ["OPENBLAS_NUM_THREADS"] = "1"  # each would take memory
        return importlib.util.spec_from_file_location(
            name, f"{self.folder}/__init__.py", submodule_search_locations=[self.folder]
        )


def limits(settings: dict[str, Any]) -> None:
    """Of processor time (seconds), address space and files (MiB)."""
    for which, most in (
        (resource.RLIMIT_CPU, int(settings["seconds"]) + 2),
        (resource.RLIMIT_AS, settings["memory"] * MIB),
        (resource.RLIMIT_FSIZE, settings["file_size"] * MIB),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        with contextlib.suppress(OSError, ValueError):  # one that the system lacks
            _, hard = resource.getrlimit(which)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(which, (int(most), int(most)))


class Printed(io.BytesIO):
    """Standard output, of which the first `PRINTED` bytes count."""

    def write(self, data: Any, /) -> int:
        """As ever."""
        super().write(memoryview(data)[: max(0, PRINTED - self.tell())])
        return len(data)


def no_standard_files() -> None:
    """Has standard input, output and error lead nowhere."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    os.close(null)


def take(settings: dict[str, Any]) -> tuple[int, int]:
    """Limits and a seccomp filter (`ways`), and no privilege.

    Returns:
      What were standard input and output, and lead to the judge.

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

    if os.geteuid() == 0:  # root owns many files, but may no more than an owner
        version = (ctypes.c_uint32 * 2)(CAPABILITIES, 0)
        call(libc.capset, version, (ctypes.c_uint32 * 6)())
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, word(1), word(0), word(0), word(0))
    read = ctypes.byref(Filter(len(program) // 8, program))
    call(libc.prctl, PR_SET_SECCOMP, word(FILTER), read)
