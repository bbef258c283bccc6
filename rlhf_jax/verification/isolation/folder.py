"""The folder that generated code writes to: measures its size and removes it."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import subprocess

FILES = 10_000  # limit of the number of files and folders


def too_much(folder: str, *, disk: float) -> str:
    """Returns which limit the folder exceeds, "" if none.

    Args:
      disk: limit of the size of all files together, MiB.
    """
    size = count = 0
    folders = [folder]
    while folders:
        try:
            entries = os.scandir(folders.pop())
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:
                return "made folders that are too deep"
            continue  # removed meanwhile, or not readable
        with entries:
            for entry in entries:
                count += 1
                with contextlib.suppress(OSError):  # removed meanwhile
                    size += entry.stat(follow_symlinks=False).st_blocks * 512
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                if size > disk * 2**20:
                    return f"wrote more than {disk:g} MiB"
                if count > FILES:
                    return f"made more than {FILES} files"
    return ""


def remove(folder: str) -> None:
    """Removes a folder with its contents, of any depth and any permissions."""
    with contextlib.suppress(RecursionError):
        shutil.rmtree(folder, ignore_errors=True)
    remove = ["rm", "-rf"]  # unlike `shutil`, not bound by the longest path
    for words in (remove, ["chmod", "-R", "u+rwX"], remove):
        if os.path.lexists(folder):
            subprocess.run([*words, folder], stderr=subprocess.DEVNULL, check=False)
