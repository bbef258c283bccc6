"""A run folder in object storage, as a local spool and its mirror in the bucket.

    --out gs://bucket/run ──> SPOOL/.../run, where the run writes, snapshots too
                                   │ sync: as a stage begins, when a snapshot is
                                   v complete, and at the end
                              gs://bucket/run, from which any machine goes on

The bucket holds a complete run at any moment. A sync writes rows first, then arrays,
then the lists that make snapshots and models valid, and summary.json last. Only then
does it remove older snapshots, their lists first. A resume drops rows beyond the newest
snapshot, as it does for a killed run.

run.lock in the bucket names the writer. Object storage has no locks, so the newest
process wins, and an older one stops at its next sync. If run.lock names the process
that last wrote this machine's spool, the spool may be ahead of the bucket, as after a
lost connection, and is kept. Otherwise it is filled anew from the bucket.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import lock, write_errors
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.runs.proof.run_files import MANIFEST, SUMMARY
from rlhf_jax.runs.snapshots.integrity import LIST
from rlhf_jax.runs.unfinished import DELETED, UNFINISHED

STATE = "state.json"  # beside the spool: its owner, and the files that the bucket has
ORBAX_UNFINISHED = ".orbax-checkpoint-tmp"
FIXED = ("snapshots", "model", "adapter", "reference")  # their files never change
FIRST = "config.json"  # without it a folder is no run
Stamp = list[int]  # bytes and time of change [ns] of a local file
_mirrors: dict[Path, Mirror] = {}  # by spool


class LostError(write_errors.WriteError):
    """The bucket could not be written to; the spool has every file."""

    def __init__(self, url: str, why: str, *, spool: Path) -> None:
        super().__init__(url, why)
        self.remedy = f"check the connection and keep {spool}"


def local(out: Path) -> Path:
    """Returns the folder where a run writes: `out` itself, or the spool of an address.

    Raises:
      InputError: as `urls.check`.
    """
    url = urls.of(out)
    if url is None:
        return out
    spool = urls.place_of(urls.check(url), kind="runs")
    _mirrors.setdefault(spool, Mirror(url, spool))
    return spool


def written(path: os.PathLike[str]) -> str:
    """Returns a path for config.json and messages; in a spool, as an address."""
    path = Path(path)
    for spool in (path, *path.parents):
        if (mirror := _mirrors.get(spool)) is not None:
            return "/".join((mirror.url, *path.relative_to(spool).parts))
    return os.fspath(path)


def begin(out: Path, *, resume: bool) -> None:
    """Fills a spool from its bucket; does nothing for a local path.

    Raises:
      InputError: the bucket cannot be read, or holds a run and `resume` is off.
    """
    if (mirror := _mirrors.get(out)) is not None:
        mirror.fill(resume=resume)


def require_run(out: object, names: Sequence[str], *, resume: bool) -> None:
    """Checks that an --out with files of these names is a run that is being resumed.

    Raises:
      InputError: `resume` is off, or config.json is missing.
    """
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    if not resume:
        raise InputError(
            f"--out {out} already holds {shown}; continue that run with --resume, or "
            f"give another --out"
        )
    if FIRST not in names:
        raise InputError(
            f"--resume: expected a run folder, with {FIRST}, in --out, got "
            f"{out!s:.200}, which holds {shown or 'nothing'}; give the --out of the "
            f"run to continue"
        )


@contextlib.contextmanager
def kept(out: Path) -> Iterator[None]:
    """Encloses a run: claims its address at the start, and updates it at the end.

    Raises:
      InputError: the bucket cannot be written to, or processes do not share the spool.
      LostError: the bucket can no longer be written to.
    """
    mirror = _mirrors.get(out)
    if mirror is None:
        yield
        return
    processes.on_first(mirror.claim)
    state = urls.read(out.parent / STATE)
    shared = f"the spool of {mirror.url}, ${urls.SPOOL} on a disk that all share,"
    processes.agree(shared, json.dumps(state))
    try:
        yield
    except LostError:
        raise
    except Exception:  # Ctrl-C does not wait for the network
        with contextlib.suppress(StopError):
            syncing(out)()
        raise
    syncing(out)()
    processes.wait()


def syncing(folder: Path) -> Callable[[], None]:
    """Returns a function that updates a run's address; for a path it does nothing."""
    mirror = _mirrors.get(folder)
    if mirror is None or not processes.is_first():
        return lambda: None
    return mirror.sync


class Mirror:
    """The address of a run, and its spool."""

    def __init__(self, url: str, spool: Path) -> None:
        self.url, self._spool = url, spool
        self._token = ""
        self._uploaded: dict[str, Stamp] = {}  # of local files that the bucket has
        self._strays: list[str] = []  # in the bucket, incomplete after a kill
        self._one_at_a_time = threading.Lock()

    def fill(self, *, resume: bool) -> None:
        """Fills the spool from the bucket, unless the spool is ahead of it."""
        with self._reached():
            names = {*urls.names(self.url)} - {lock.NAME}
            owner = self._owner()
        if names:  # the address may hold something else, such as many runs
            require_run(self.url, sorted(names), resume=resume)
        state = urls.read(self._spool.parent / STATE)
        with lock.hold(self._spool):
            same = owner.get("token", "") == state.get("token")
            if same and (self._spool / FIRST).exists():
                self._keep(state["there"], names)
            else:
                self._refill(urls.whole(names))
        self._strays = sorted(names - {*self._files()})

    def _refill(self, names: list[str]) -> None:
        (self._spool.parent / STATE).unlink(missing_ok=True)
        for path in self._spool.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != lock.NAME:
                path.unlink()

        def get(name: str) -> None:
            urls.get(f"{self.url}/{name}", self._spool / name)

        with self._reached():
            urls.each(get, names)
        self._uploaded = {name: _stamp(self._spool / name) for name in names}

    def _keep(self, then: dict[str, Stamp], names: set[str]) -> None:
        """Keeps the spool, without the files that were removed from the bucket."""
        for name in then.keys() - names:
            urls.remove(self._spool / name, root=self._spool)
        now = {name: _stamp(self._spool / name) for name in self._files()}
        self._uploaded = {n: then[n] for n in then if now.get(n) == then[n]}

    def claim(self) -> None:
        """Writes this process into run.lock as the writer of the run.

        Raises:
          InputError: the bucket cannot be written to.
        """
        self._token = uuid.uuid4().hex
        text = json.dumps(lock.owner() | {"token": self._token})
        files, at = urls.system(self.url), f"{self.url}/{lock.NAME}"
        with self._reached():
            urls.tried(lambda: files.pipe_file(at, text.encode()))
            urls.each(self._remove, self._strays)
        self._save()

    def sync(self) -> None:
        """Copies the changes of the spool to the bucket, in the module's order.

        Raises:
          LostError: the bucket cannot be written to.
          StopError: another process has claimed the run.
        """
        with self._one_at_a_time:
            try:
                self._require_own()
                self._put()
            except StopError:
                raise
            except Exception as error:  # backends raise any type
                raise LostError(self.url, urls.why(error), spool=self._spool) from error

    def _put(self) -> None:
        files = urls.system(self.url)
        now = {name: _stamp(self._spool / name) for name in self._files()}

        def put(name: str) -> None:
            path, at = self._spool / name, f"{self.url}/{name}"
            if name.split("/")[0] in FIXED:
                files.put_file(str(path), at)
            else:  # rows may be appended meanwhile, so the file is read at once
                files.pipe_file(at, path.read_bytes())

        changed = [name for name in now if self._uploaded.get(name) != now[name]]
        for rank in sorted({*map(_rank, changed)}):
            of_rank = [name for name in changed if _rank(name) == rank]
            urls.each(put, of_rank)
            self._uploaded |= {name: now[name] for name in of_rank}
        gone = [
            name
            for name in self._uploaded
            if name.startswith("snapshots/")
            and name not in now
            and FIRST in now  # the spool was not emptied by someone else
        ]
        for rank in sorted({*map(_rank, gone)}, reverse=True):
            urls.each(self._remove, [n for n in gone if _rank(n) == rank])
        self._uploaded = {name: self._uploaded[name] for name in now}
        self._save()

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed by an earlier try
            urls.system(self.url).rm_file(f"{self.url}/{name}")

    def _save(self) -> None:
        state = {"token": self._token, "there": self._uploaded}
        urls.write(self._spool.parent / STATE, state)

    def _files(self) -> list[str]:
        """Names of the files in the spool, without those being written."""
        names = [
            (Path(folder) / name).relative_to(self._spool).as_posix()
            for folder, _, files in os.walk(self._spool)
            for name in files
        ]
        return [
            name
            for name in urls.whole(names)
            if name != lock.NAME
            and not name.startswith(".")  # a model being written
            and not name.endswith(UNFINISHED)
            and ORBAX_UNFINISHED not in name
            and f"/{DELETED}/" not in name
        ]

    def _owner(self) -> dict[str, Any]:
        files = urls.system(self.url)
        try:
            at = f"{self.url}/{lock.NAME}"
            return urls.record(urls.tried(lambda: files.cat_file(at)))
        except FileNotFoundError:
            return {}

    def _require_own(self) -> None:
        owner = self._owner()
        if owner.get("token") != self._token:
            by = f"process {owner.get('process')} on {owner.get('host')}"
            raise StopError(
                f"{self.url}: expected to be the one process that writes this run, got "
                f"{by if owner else 'none'} in its {lock.NAME}; this one stops and "
                f"leaves what it has in {self._spool}: end the other one, or "
                f"give another --out"
            )

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Turns any exception of a backend into an InputError."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"--out {self.url}: expected a bucket that this user can read and "
                f"write, got {urls.why(error)}; make it, log in to that cloud, or "
                f"check the network"
            ) from error


def _rank(name: str) -> int:
    """The turn in which a file is written, so that the bucket holds a complete run."""
    parts = name.split("/")
    if name == SUMMARY:
        return 4
    makes_valid = name.endswith(MANIFEST) if len(parts) == 1 else parts[-1] == LIST
    if makes_valid or (parts[0] == "reference" and name.endswith(".json")):
        return 3
    if len(parts) > 1:
        return 2
    return 0 if name == FIRST else 1


def _stamp(path: Path) -> Stamp:
    status = path.stat()
    return [status.st_size, status.st_mtime_ns]
