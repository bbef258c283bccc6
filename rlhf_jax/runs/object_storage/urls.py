"""Addresses of object storage, and copies on this machine of what is there.

gs://BUCKET/NAME and s3://BUCKET/NAME are read and written by fsspec. Its two backends
are the extra `cloud`, and find credentials and endpoints as their clouds' own tools do.

    urls.of("gs://bucket/prompts.jsonl")        the address; None of a path
    urls.fetched("gs://bucket/prompts.jsonl")   the path of a copy that is up to date
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import fnmatch
import functools
import hashlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path, PureWindowsPath
from typing import Any, TypeVar

from rlhf_jax.devices import program_cache
from rlhf_jax.extensions import entry_points
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import parsing
from rlhf_jax.runs.proof.run_files import MANIFEST
from rlhf_jax.runs.snapshots.integrity import LIST

SCHEMES = {"gs": "gcsfs", "s3": "s3fs", "memory": "fsspec"}  # and their packages
SPOOL = "RLHF_JAX_SPOOL"  # environment variable: the folder of all copies
PATIENCE = 120.0  # seconds for which what fails is tried again
# Two letters at least: C:/runs is a path. `Path` makes one slash of two.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_NO_BUCKET = re.compile(r"(gs|s3):", re.IGNORECASE)  # what `Path` makes of gs://
_NO_SLASH = re.compile(r"(gs|s3):([^/].*)", re.IGNORECASE | re.DOTALL)
_AT_ONCE = 8  # files
# As gcsfs, s3fs and botocore tell what no second try changes.
_FINAL = ("Forbidden", "NoCredentials", "Unable to locate credentials")
Result = TypeVar("Result")


def of(place: str | os.PathLike[str]) -> str | None:
    """The address that a path or text is, without a last slash; None of another.

    Raises:
      InputError: an address without its slashes, which would be a folder of that name.
    """
    text = os.fspath(place)
    if (short := _NO_SLASH.fullmatch(text)) is not None:
        scheme = short[1].lower()
        raise InputError(
            f"{text:.200}: expected {scheme}://BUCKET/NAME, or a path, got an address "
            f"without slashes; write {scheme}://{short[2]:.200}, or give a folder "
            f"another name"
        )
    match = _URL.fullmatch(f"{text}//" if _NO_BUCKET.fullmatch(text) else text)
    return match and f"{match[1].lower()}://{match[2].rstrip('/')}"


def check(url: str) -> str:
    """The address itself, if it can be read here.

    Raises:
      InputError: its scheme is unknown, it has no bucket, it leads out of the folder of
        its copy, or its package is missing.
    """
    scheme, _, place = url.partition("://")
    if scheme not in SCHEMES or not place:
        raise InputError(
            f"{url:.200}: expected a path, or gs://BUCKET/NAME or s3://BUCKET/NAME, "
            f"got {f'the scheme {scheme}://' if place else 'no bucket'}; copy it to "
            f"one of these"
        )
    if not _stays_below(place):
        raise InputError(
            f"{url!r:.200}: expected an address without . and .. between its slashes, "
            f"got one with them; write where they lead"
        )
    entry_points.require_package(
        SCHEMES[scheme],
        extra="cloud",
        needed_by=f"{url:.200}",
        instead=", or give a path on this machine",
    )
    return url


def refuse(place: Path, *, option: str) -> None:
    """Refuses an address where only a path will do.

    Raises:
      InputError: it is one.
    """
    if (url := of(place)) is not None:
        raise InputError(
            f"{option}: expected a folder on this machine, got {url:.200}; give one, "
            f"and copy it there or from there"
        )


def spool() -> Path:
    """The folder of all copies: $RLHF_JAX_SPOOL, or one in the user's cache."""
    if given := os.environ.get(SPOOL):
        return Path(given).absolute()
    compiled = program_cache.default_folder()
    if compiled is None:  # no home
        return Path(tempfile.gettempdir()) / "rlhf_jax" / "spool"
    return compiled.parent / "spool"


def place_of(url: str, *, kind: str) -> Path:
    """Where the copy of an address is, a place of the same name in a folder its own."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return spool() / kind / digest / url.rpartition("/")[2]


@functools.cache
def system(url: str) -> Any:
    """The file system of an address, of which nothing is asked yet.

    Raises:
      InputError: as `check`, or the package does not start.
    """
    scheme = check(url).partition("://")[0]
    # Its clients for zonal buckets ask for credentials, and warn of their absence.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec  # half a second that runs on this machine save

    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except Exception as error:  # whatever backends raise without credentials
        raise InputError(
            f"{url:.200}: expected a bucket that this user can open, got {why(error)}; "
            f"log in to that cloud"
        ) from error


def why(error: BaseException) -> str:
    """What a backend raised, in a line."""
    if isinstance(error, FileNotFoundError):
        return "no such bucket or file"
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first:.200}"


def tried(call: Callable[[], Result], *, over: threading.Event | None = None) -> Result:
    """The call's result; what fails is tried again for `PATIENCE` seconds.

    Raises what the last try did. What is missing or forbidden is not tried again, and
    nothing once `over` is set.
    """
    end, pause = time.monotonic() + PATIENCE, 1.0
    over = threading.Event() if over is None else over
    while True:
        try:
            return call()
        except Exception as error:  # each backend has its own
            final = isinstance(error, FileNotFoundError | PermissionError)
            text = f"{type(error).__name__} {error}"
            final = final or any(part in text for part in _FINAL)
            if final or time.monotonic() + pause > end or _paused(pause, over):
                raise
        pause = min(2 * pause, 30.0)


def _paused(seconds: float, over: threading.Event) -> bool:
    """Waits, and says whether it is over."""
    return over.wait(seconds)


def each(call: Callable[[str], object], names: Iterable[str]) -> None:
    """`tried` calls of all names, several at once; the first error is raised.

    That and Ctrl-C end what is tried again: leaving waits for the threads.
    """
    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            list(pool.map(lambda name: tried(lambda: call(name), over=over), names))
        finally:
            over.set()


def names(url: str) -> dict[str, str]:
    """{name below an address: what changes with its content}; "" is itself a file.

    Raises what the backend does, and InputError of a name that leads out of a folder:
    others may write to a bucket, and no name of theirs chooses a place on this machine.
    """
    from fsspec.utils import tokenize

    files, root = system(url), system(url)._strip_protocol(url)
    infos = tried(lambda: files.find(root, detail=True))
    there = {
        path.removeprefix(root).lstrip("/"): tokenize(info)
        for path, info in infos.items()
        if not path.endswith("/")  # a placeholder of a folder
    }
    for name in there:
        if not _stays_below(name):
            raise InputError(
                f"{url:.200}: expected names of files that are below it, got "
                f"{name!r:.200}; remove that object, and see who wrote it"
            )
    return there


def _stays_below(name: str) -> bool:
    """Whether a name joined to a folder is a place in it, on any system."""
    leading = {".", ".."} & {*name.replace("\\", "/").split("/")}
    return not leading and not PureWindowsPath(name).drive and "\0" not in name


def get(url: str, path: Path) -> None:
    """Copies a file from an address, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        system(url).get_file(url, str(unfinished))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def fetched(
    place: str | os.PathLike[str],
    *,
    only: Sequence[str] = ("*",),
    but: Sequence[str] = (),
) -> Path:
    """The path itself; of an address that of a copy, which is brought up to date.

    A model comes with the manifest beside it, and then whole.

    Args:
      only, but: patterns of the names below the address that are copied, and not.

    Raises:
      InputError: there is nothing, or it cannot be read.
    """
    url = of(place)
    if url is None:
        return Path(place)
    path = place_of(check(url), kind="read")
    try:
        _update(url, path, only=only, but=but)
    except InputError:
        raise
    except Exception as error:  # whatever backends raise
        raise InputError(
            f"{url:.200}: expected a file or folder that can be read, got "
            f"{why(error)}; see to its name, its permissions and the network"
        ) from error
    return path


def _update(url: str, path: Path, *, only: Sequence[str], but: Sequence[str]) -> None:
    there = names(url)
    if not there:
        raise FileNotFoundError("nothing there")
    list_of_copies = path.parent / f"{path.name}.copies"  # never `path` itself
    have = read(list_of_copies)
    if "" not in there:
        manifest = path.parent / f"{path.name}{MANIFEST}"
        if tried(lambda: system(url).exists(f"{url}{MANIFEST}")):
            get(f"{url}{MANIFEST}", manifest)
            only = ("*",)
        else:
            manifest.unlink(missing_ok=True)
        there = {name: there[name] for name in whole(there)}
        # Also what an update brought that was killed before it wrote its list.
        for name in _copied(path) - there.keys():
            remove(path / name, root=path)
    wanted = [name for name in there if _chosen(name, only=only, but=but)]
    kept = {n: key for n, key in have.items() if there.get(n) == key}
    missing = [n for n in wanted if n not in kept or not (path / n).exists()]
    each(lambda name: get(f"{url}/{name}".rstrip("/"), path / name), missing)
    write(list_of_copies, kept | {name: there[name] for name in missing})


def _copied(folder: Path) -> set[str]:
    """Files of a copy, without what `get` is writing, perhaps of another process."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in paths}
    return {name for name in names if not name.endswith(".tmp")}


def _chosen(name: str, *, only: Sequence[str], but: Sequence[str]) -> bool:
    def fits(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    return not name or (fits(only) and not fits(but))


def whole(names: Collection[str]) -> list[str]:
    """Names of files of a run but for snapshots and models that are being written.

    A snapshot's list and a model's manifest are written last.
    """
    there = {*names}

    def belongs(name: str) -> bool:
        parts = name.split("/")
        if parts[0] == "snapshots" and len(parts) > 3 and parts[2].isdecimal():
            return "/".join((*parts[:3], LIST)) in there
        exported = parts[0] in ("model", "adapter") and len(parts) > 1
        return not exported or f"{parts[0]}{MANIFEST}" in there

    return sorted(name for name in there if belongs(name))


def remove(path: Path, *, root: Path) -> None:
    """Removes a file, if it is there, and the folders below `root` that it leaves."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        for parent in path.relative_to(root).parents:
            if parent.parts:
                (root / parent).rmdir()


def read(path: Path) -> dict[str, Any]:
    """What `write` wrote; nothing where it is missing or cut off."""
    try:
        return record(path.read_bytes())
    except OSError:
        return {}


def record(text: bytes) -> dict[str, Any]:
    """A JSON object; an empty one of a text that is none."""
    source = parsing.Source("a record of copies", "an object")
    try:
        content = parsing.of_json(text, source, size=None)
    except InputError:
        return {}
    return content if isinstance(content, dict) else {}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes JSON beside copies, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    unfinished.write_text(json.dumps(content), encoding="utf-8")
    unfinished.replace(path)
