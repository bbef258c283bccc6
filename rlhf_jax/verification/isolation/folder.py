"""The folder that generated code writes to: watched, and removed in any case."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess

FILES = 10_000  # files and folders that there may be at once


def too_much(folder: str, *, disk: float) -> str:
    """What of it is more than allowed, or "".

    Args:
      disk: MiB in all.
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
                if count > FILES:
                    return f"made more than {FILES} files"
    return ""


def remove(folder: str) -> None:
    """Removes it with all that is in it, however deep and whatever its permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    remove = ["rm", "-rf"]  # programs know no longest path
    for words in (remove, ["chmod", "-R", "u+rwX"], remove):
        if os.path.lexists(folder):
            subprocess.run([*words, folder], stderr=subprocess.DEVNULL, check=False)
