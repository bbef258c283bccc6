"""The folder on disk that generated code writes to: watched, and removed in any case.

Where it is in memory instead (`sandbox`), it stays empty.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import time

ATTEMPTS = 50  # of a hundredth of a second, for processes that are ending


def too_much(folder: str, *, disk: float, files: int) -> str:
    """What of it is more than allowed, or "".

    Args:
      disk: MiB in all. files: with folders, in all.
    """
    size = count = 0
    folders = [folder]
    while folders:
        try:
            entries = os.scandir(folders.pop())
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return "made folders that are too deep"
            continue  # gone already, or not to be read
        with entries:
            for entry in entries:
                count += 1
                with contextlib.suppress(OSError):  # gone already
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                if size > disk * 2**20:
                    return f"wrote more than {disk:g} MiB"
                if count > files:
                    return f"made more than {files} files"
    return ""


def remove(folder: str) -> None:
    """Removes it with all that is in it, however deep and whatever its permissions.

    A folder within a folder within it is first moved up, so that no path grows long.
    """
    for _ in range(ATTEMPTS):
        with contextlib.suppress(OSError):
            _empty(folder)
            os.rmdir(folder)
        if not os.path.lexists(folder):
            return
        time.sleep(0.01)
    shutil.rmtree(folder, ignore_errors=True)


def _empty(folder: str) -> None:
    os.chmod(folder, 0o700)
    while entries := list(os.scandir(folder)):
        for entry in entries:
            if not entry.is_dir(follow_symlinks=False):
                os.unlink(entry.path)
                continue
            os.chmod(entry.path, 0o700)
            for inner in list(os.scandir(entry.path)):
                if inner.is_dir(follow_symlinks=False):
                    os.chmod(inner.path, 0o700)
                    os.rename(inner.path, f"{folder}/{secrets.token_hex(16)}")
                else:
                    os.unlink(inner.path)
            os.rmdir(entry.path)
