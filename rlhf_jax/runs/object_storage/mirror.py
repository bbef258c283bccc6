"""A run folder in object storage: a spool on this machine, and a mirror of it.

    --out gs://bucket/run ──> SPOOL/.../run, where the run writes, snapshots too
                                   │ sync: as a stage begins, when a snapshot is
                                   v complete, and at the end
                              gs://bucket/run, from which any machine goes on

What is found in the bucket is a whole state at any moment: a sync writes rows first,
then arrays, then the lists that make snapshots and models valid, and summary.json last;
only then it removes older snapshots, their lists first. Rows beyond the newest snapshot
are cut by the resume, as those of a killed run are.

run.lock in the bucket names who writes. It is no lock, which object storage lacks: the
newest process wins, and an older one stops at its next sync. Where it names the
process that last wrote this machine's spool, the spool may be ahead, as after a lost
connection, and is kept; else it is filled anew from the bucket.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import lock, write_errors
from rlhf_jax.runs.object_storage import urls
from rlhf_jax.runs.proof.run_files import MANIFEST, SUMMARY, UNFINISHED
from rlhf_jax.runs.snapshots.integrity import LIST

STATE = "state.json"  # beside the spool: whose it is, and what the bucket has of it
ORBAX_UNFINISHED = ".orbax-checkpoint-tmp"
DELETED = "deleted"  # as of `snapshots.snapshots`, which is slow to load
FIXED = ("snapshots", "model", "adapter", "reference")  # folders of files that stay
FIRST = "config.json"  # without it a folder is no run
Stamp = list[int]  # bytes and time of change [ns] of a local file
_mirrors: dict[Path, Mirror] = {}  # by spool


class LostError(write_errors.WriteError):
    """The bucket could not be written to; the spool has it all."""

    def __init__(self, url: str, why: str, *, spool: Path) -> None:
        super().__init__(url, why)
        self.remedy = f"see to the connection, keep {spool}"


def local(out: Path) -> Path:
    """The folder where a run writes: `out` itself, or the spool of an address.

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
    """A path as config.json and messages have it: of a spool and below its address."""
    path = Path(path)
    for spool in (path, *path.parents):
        if (mirror := _mirrors.get(spool)) is not None:
            return "/".join((mirror.url, *path.relative_to(spool).parts))
    return os.fspath(path)


def begin(out: Path, *, resume: bool) -> None:
    """Fills a spool from its bucket; nothing for a path.

    Raises:
      InputError: the bucket cannot be read, or holds a run and `resume` is off.
    """
    if (mirror := _mirrors.get(out)) is not None:
        mirror.fill(resume=resume)


def require_run(out: object, names: Sequence[str], *, resume: bool) -> None:
    """Refuses an --out that holds these names and is no run to go on with.

    Raises:
      InputError: it is not.
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
    """Around a run: claims the address of its spool, and brings it up to date last.

    Raises:
      InputError: the bucket cannot be written to, or processes do not share the spool.
      LostError: it cannot be written to any more.
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
    except Exception:  # not Ctrl-C, which waits for no network
        with contextlib.suppress(StopError):
            syncing(out)()
        raise
    syncing(out)()
    processes.wait()


def syncing(folder: Path) -> Callable[[], None]:
    """What brings the address of a run folder up to date; nothing for a path."""
    mirror = _mirrors.get(folder)
    if mirror is None or not processes.is_first():
        return lambda: None
    return mirror.sync


class Mirror:
    """An address and its spool."""

    def __init__(self, url: str, spool: Path) -> None:
        self.url, self._spool = url, spool
        self._token = ""
        self._there: dict[str, Stamp] = {}  # in the bucket, of local files
        self._strays: list[str] = []  # there, of what a killed process began
        self._one_at_a_time = threading.Lock()

    def fill(self, *, resume: bool) -> None:
        """Brings the spool to what the bucket holds, unless it is ahead of that."""
        with self._reached():
            there = {*urls.names(self.url)} - {lock.NAME}
            owner = self._owner()
        if there:  # perhaps a bucket of many runs
            require_run(self.url, sorted(there), resume=resume)
        state = urls.read(self._spool.parent / STATE)
        with lock.hold(self._spool):
            same = owner.get("token", "") == state.get("token")
            if same and (self._spool / FIRST).exists():
                self._keep(state["there"], there)
            else:
                self._refill(urls.whole(there))
        self._strays = sorted(there - {*self._files()})

    def _refill(self, names: list[str]) -> None:
        (self._spool.parent / STATE).unlink(missing_ok=True)
        self._there = {}
        for path in self._spool.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            elif path.name != lock.NAME:
                path.unlink()
        self._get(names)

    def _keep(self, then: dict[str, Stamp], there: set[str]) -> None:
        """What the spool has stays, but for what was removed from the bucket."""
        for name in then.keys() - there:  # removed from the bucket since
            urls.remove(self._spool / name, root=self._spool)
        now = {name: _stamp(self._spool / name) for name in self._files()}
        self._there = {n: then[n] for n in then if now.get(n) == then[n]}

    def _get(self, names: list[str]) -> None:
        def get(name: str) -> None:
            urls.get(f"{self.url}/{name}", self._spool / name)

        with self._reached():
            urls.each(get, names)
        self._there |= {name: _stamp(self._spool / name) for name in names}

    def claim(self) -> None:
        """Writes who goes on with the run, which proves that the bucket can be written.

        Raises:
          InputError: it cannot.
        """
        self._token = uuid.uuid4().hex
        now = (
            datetime.datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
        )
        owner = {"process": os.getpid(), "host": socket.gethostname(), "since": now}
        text = json.dumps(owner | {"token": self._token})
        files, at = urls.system(self.url), f"{self.url}/{lock.NAME}"
        with self._reached():
            urls.tried(lambda: files.pipe_file(at, text.encode()))
            urls.each(self._remove, self._strays)
        self._save()

    def sync(self) -> None:
        """Brings the bucket to what the spool holds; see the top of this file.

        Raises:
          LostError: it cannot be written to. StopError: another process goes on with
            the run.
        """
        with self._one_at_a_time:
            try:
                self._require_own()
                self._put()
            except StopError:
                raise
            except Exception as error:  # whatever backends raise
                raise LostError(self.url, urls.why(error), spool=self._spool) from error

    def _put(self) -> None:
        files = urls.system(self.url)
        now = {name: _stamp(self._spool / name) for name in self._files()}

        def put(name: str) -> None:
            path, at = self._spool / name, f"{self.url}/{name}"
            if name.split("/")[0] in FIXED:
                files.put_file(str(path), at)
            else:  # rows are appended meanwhile: what is there by now
                files.pipe_file(at, path.read_bytes())

        changed = [name for name in now if self._there.get(name) != now[name]]
        for rank in sorted({*map(_rank, changed)}):
            of_rank = [name for name in changed if _rank(name) == rank]
            urls.each(put, of_rank)
            self._there |= {name: now[name] for name in of_rank}
        gone = [
            name
            for name in self._there
            if name.startswith("snapshots/")
            and name not in now
            and FIRST in now  # nobody has emptied the spool
        ]
        for rank in sorted({*map(_rank, gone)}, reverse=True):
            urls.each(self._remove, [n for n in gone if _rank(n) == rank])
        self._there = {name: self._there[name] for name in now}
        self._save()

    def _remove(self, name: str) -> None:
        with contextlib.suppress(FileNotFoundError):  # by a try before
            urls.system(self.url).rm_file(f"{self.url}/{name}")

    def _save(self) -> None:
        state = {"token": self._token, "there": self._there}
        urls.write(self._spool.parent / STATE, state)

    def _files(self) -> list[str]:
        """Names of the files of the spool, without what is being written."""
        names = [
            (Path(folder) / name).relative_to(self._spool).as_posix()
            for folder, _, files in os.walk(self._spool)
            for name in files
        ]
        return [
            name
            for name in urls.whole(names)
            if name != lock.NAME
            and not name.startswith(".")  # a model that is being written
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
            by = (
                "none"
                if not owner
                else f"process {owner.get('process')} on {owner.get('host')}"
            )
            raise StopError(
                f"{self.url}: expected to be the one process that writes this run, got "
                f"{by} in its {lock.NAME}; this one stops and leaves what it has in "
                f"{self._spool}: end the other one, or give another --out"
            )

    @contextlib.contextmanager
    def _reached(self) -> Iterator[None]:
        """Turns whatever backends raise about the bucket into an InputError."""
        try:
            yield
        except InputError:
            raise
        except Exception as error:
            raise InputError(
                f"--out {self.url}: expected a bucket that this user can read and "
                f"write, got {urls.why(error)}; make it, log in to that cloud, or see "
                f"to the network"
            ) from error


def _rank(name: str) -> int:
    """In which turn a file is written, so that what the bucket holds is whole."""
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
