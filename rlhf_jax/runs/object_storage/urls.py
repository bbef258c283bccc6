"""Addresses of object storage, and local copies of their files.

fsspec reads and writes gs://BUCKET/NAME and s3://BUCKET/NAME. Its two backends are the
extra `cloud`; they find credentials and endpoints as the tools of those clouds do.

    urls.of("gs://bucket/prompts.jsonl")        the address; None for a path
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
from rlhf_jax.runs.unfinished import UNFINISHED, replacing

SCHEMES = {"gs": "gcsfs", "s3": "s3fs", "memory": "fsspec"}  # {scheme: package}
SPOOL = "RLHF_JAX_SPOOL"  # environment variable: the folder of all copies
HOME = "the shell replaces ~ in --out ~/runs, and not behind a =; write $HOME"
PATIENCE = 120.0  # seconds for which a failed call is repeated
# A scheme has at least two letters: C:/runs is a path. `Path` turns // into /.
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_NO_BUCKET = re.compile(r"(gs|s3):", re.IGNORECASE)  # `Path` turns gs:// into gs:
_NO_SLASH = re.compile(r"(gs|s3):([^/].*)", re.IGNORECASE | re.DOTALL)
_AT_ONCE = 8  # files
# Errors of gcsfs, s3fs and botocore that a second try cannot mend.
_FINAL = ("Forbidden", "NoCredentials", "Unable to locate credentials")
Result = TypeVar("Result")


def of(place: str | os.PathLike[str]) -> str | None:
    """Returns a path or text as an address without final slashes; None for a path.

    Raises:
      InputError: the address lacks its slashes, and would name a local folder.
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
    """Checks an address, and returns it.

    Raises:
      InputError: its scheme is unknown, it has no bucket, it contains . or .. as a
        part, or the package of its scheme is missing.
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
    """Refuses an address, and a ~, for an option that takes only local paths.

    Raises:
      InputError: `place` is an address, or begins with a ~ that no shell has replaced.
    """
    got, advice = of(place), "give one, and copy it there or from there"
    got, advice = (os.fspath(place), HOME) if begins_at_home(place) else (got, advice)
    if got is not None:
        raise InputError(
            f"{option}: expected a folder on this machine, got {got:.200}; {advice}"
        )


def begins_at_home(place: Path) -> bool:
    """Returns whether a path begins with ~, as shells leave it in --out=~/runs."""
    return place.parts[:1] == ("~",)


def spool() -> Path:
    """Returns the folder of all copies: $RLHF_JAX_SPOOL, or one in the user's cache."""
    if folder := os.environ.get(SPOOL):
        return Path(folder).absolute()
    compiled = program_cache.default_folder()
    if compiled is None:  # the user has no home folder
        return Path(tempfile.gettempdir()) / "rlhf_jax" / "spool"
    return compiled.parent / "spool"


def place_of(url: str, *, kind: str) -> Path:
    """Returns the path of an address's copy: a folder of its own, and its last name."""
    digest = hashlib.sha256(url.encode()).hexdigest()[:12]
    return spool() / kind / digest / url.rpartition("/")[2]


@functools.cache
def system(url: str) -> Any:
    """Returns the fsspec file system of an address, without contacting the bucket.

    Raises:
      InputError: as `check`, or the backend does not start.
    """
    scheme = check(url).partition("://")[0]
    # gcsfs's clients for zonal buckets would warn if there are no credentials.
    os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    import fsspec  # takes half a second, which local runs save

    try:
        return fsspec.filesystem(scheme, use_listings_cache=False)
    except Exception as error:  # backends raise any type without credentials
        raise InputError(
            f"{url:.200}: expected a bucket that this user can open, got {why(error)}; "
            f"log in to that cloud"
        ) from error


def why(error: BaseException) -> str:
    """Returns a backend's exception as one line."""
    if isinstance(error, FileNotFoundError):
        return "no such bucket or file"
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first:.200}"


def tried(call: Callable[[], Result], *, over: threading.Event | None = None) -> Result:
    """Returns the call's result; a failed call is repeated for `PATIENCE` seconds.

    Raises the last exception. A missing or forbidden file is not tried again, and no
    call is once `over` is set.
    """
    end, pause = time.monotonic() + PATIENCE, 1.0
    over = threading.Event() if over is None else over
    while True:
        try:
            return call()
        except Exception as error:  # backends raise any type
            final = isinstance(error, FileNotFoundError | PermissionError)
            text = f"{type(error).__name__} {error}"
            final = final or any(part in text for part in _FINAL)
            if final or time.monotonic() + pause > end or _paused(pause, over):
                raise
        pause = min(2 * pause, 30.0)


def _paused(seconds: float, over: threading.Event) -> bool:
    """Waits; whether `over` was set meanwhile."""
    return over.wait(seconds)


def each(call: Callable[[str], object], names: Iterable[str]) -> None:
    """Calls `tried` for all names, several at once; raises the first error.

    An error or Ctrl-C ends further tries, since the pool waits for its threads.
    """
    over = threading.Event()
    with concurrent.futures.ThreadPoolExecutor(_AT_ONCE) as pool:
        try:
            list(pool.map(lambda name: tried(lambda: call(name), over=over), names))
        finally:
            over.set()


def names(url: str) -> dict[str, str]:
    """Returns {name below an address: token of its content}; "" if it is a file itself.

    Raises the backend's errors, and InputError for a name that leads out of the folder:
    others may write to a bucket, and must not choose a path on this machine.
    """
    from fsspec.utils import tokenize

    files, root = system(url), system(url)._strip_protocol(url)
    infos = tried(lambda: files.find(root, detail=True))
    tokens = {
        path.removeprefix(root).lstrip("/"): tokenize(info)
        for path, info in infos.items()
        if not path.endswith("/")  # a folder's placeholder
    }
    for name in tokens:
        if not _stays_below(name):
            raise InputError(
                f"{url:.200}: expected names of files that are below it, got "
                f"{name!r:.200}; remove that object, and find out who wrote it"
            )
    return tokens


def _stays_below(name: str) -> bool:
    """Whether a name joined to a folder stays inside it, on any system."""
    leading = {".", ".."} & {*name.replace("\\", "/").split("/")}
    return not leading and not PureWindowsPath(name).drive and "\0" not in name


def get(url: str, path: Path) -> None:
    """Copies a file from an address in one step: whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, writer=f".{os.getpid()}") as unfinished:
        system(url).get_file(url, str(unfinished))


def fetched(
    place: str | os.PathLike[str],
    *,
    only: Sequence[str] = ("*",),
    but: Sequence[str] = (),
) -> Path:
    """Returns a path itself; for an address, the path of an up-to-date copy.

    A model with a manifest beside it is copied completely, with the manifest.

    Args:
      only, but: patterns of names below the address to copy, and to leave out.

    Raises:
      InputError: there is no such file or folder, or it cannot be read.
    """
    url = of(place)
    if url is None:
        return Path(place)
    path = place_of(check(url), kind="read")
    try:
        _update(url, path, only=only, but=but)
    except InputError:
        raise
    except Exception as error:  # backends raise any type
        raise InputError(
            f"{url:.200}: expected a file or folder that can be read, got "
            f"{why(error)}; check its name, its permissions and the network"
        ) from error
    return path


def _update(url: str, path: Path, *, only: Sequence[str], but: Sequence[str]) -> None:
    tokens = names(url)
    if not tokens:
        raise FileNotFoundError("nothing there")
    list_of_copies = path.parent / f"{path.name}.copies"  # never `path` itself
    have = read(list_of_copies)
    if "" not in tokens:
        manifest = path.parent / f"{path.name}{MANIFEST}"
        if tried(lambda: system(url).exists(f"{url}{MANIFEST}")):
            get(f"{url}{MANIFEST}", manifest)
            only = ("*",)
        else:
            manifest.unlink(missing_ok=True)
        tokens = {name: tokens[name] for name in whole(tokens)}
        # Includes files of an update that was killed before it wrote its list.
        for name in _copied(path) - tokens.keys():
            remove(path / name, root=path)
    wanted = [name for name in tokens if _chosen(name, only=only, but=but)]
    kept = {n: key for n, key in have.items() if tokens.get(n) == key}
    missing = [n for n in wanted if n not in kept or not (path / n).exists()]
    each(lambda name: get(f"{url}/{name}".rstrip("/"), path / name), missing)
    write(list_of_copies, kept | {name: tokens[name] for name in missing})


def _copied(folder: Path) -> set[str]:
    """Files of a copy, without those that `get` is writing in any process."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    names = {path.relative_to(folder).as_posix() for path in paths}
    return {name for name in names if not name.endswith(UNFINISHED)}


def _chosen(name: str, *, only: Sequence[str], but: Sequence[str]) -> bool:
    def fits(patterns: Sequence[str]) -> bool:
        return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

    return not name or (fits(only) and not fits(but))


def whole(names: Collection[str]) -> list[str]:
    """Returns a run's file names without those of incomplete snapshots and models.

    A snapshot is complete once it has its list, a model once it has its manifest.
    """
    present = {*names}

    def belongs(name: str) -> bool:
        parts = name.split("/")
        if parts[0] == "snapshots" and len(parts) > 3 and parts[2].isdecimal():
            return "/".join((*parts[:3], LIST)) in present
        exported = parts[0] in ("model", "adapter") and len(parts) > 1
        return not exported or f"{parts[0]}{MANIFEST}" in present

    return sorted(name for name in present if belongs(name))


def remove(path: Path, *, root: Path) -> None:
    """Removes a file if it exists, and the folders below `root` that become empty."""
    path.unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not empty
        for parent in path.relative_to(root).parents:
            if parent.parts:
                (root / parent).rmdir()


def read(path: Path) -> dict[str, Any]:
    """Reads a record that `write` wrote; empty if missing or truncated."""
    try:
        return record(path.read_bytes())
    except OSError:
        return {}


def record(text: bytes) -> dict[str, Any]:
    """Parses a JSON object; empty for any other text."""
    source = parsing.Source("a record of copies", "an object")
    try:
        content = parsing.of_json(text, source, size=None)
    except InputError:
        return {}
    return content if isinstance(content, dict) else {}


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON record in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path, writer=f".{os.getpid()}") as unfinished:
        unfinished.write_text(json.dumps(content), encoding="utf-8")
