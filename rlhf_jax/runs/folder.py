"""A run folder: the config of a run, the versions it ran with, and its results.

config.json     the config and the versions it ran with
data.json       the receipt of the data that it read, see `receipt`
metrics.jsonl, timings.jsonl, samples.jsonl, positions.jsonl    see `metrics`
summary.json    the figures at the end
snapshots/      see `snapshots.snapshots`
plots/          see `plots`
"""

from __future__ import annotations

import collections
import functools
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from importlib import machinery, metadata
from pathlib import Path
from typing import Any

import jax

import rlhf_jax
from rlhf_jax.devices import precision, processes
from rlhf_jax.extensions import entry_points
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import refuse
from rlhf_jax.runs import lock, parsing, write_errors
from rlhf_jax.runs.object_storage import mirror, urls
from rlhf_jax.runs.profile import Window
from rlhf_jax.runs.proof import run_files, sums
from rlhf_jax.runs.run_config import MAY_DIFFER, RunConfig, to_json
from rlhf_jax.runs.snapshots import resume
from rlhf_jax.runs.unfinished import UNFINISHED, replacing

CONFIG = "config.json"
SUMMARY: parsing.Shape = {"alarms?": [{"stage": str, "step": int, "name": str}]}
PACKAGES = (
    *("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "chex", "grain"),
    *("numpy", "transformers"),
)
THEN = " then "  # between the versions of a run that went on with another one
UNRECORDED = "not recorded"  # a version that the start of a run did not record
# The modules of the user's functions in an option: "mine:score", "x=function:mine:f".
# Not the kind of "x=model:policy", nor of "hf:gsm8k:test" or "x=model:runs/reward".
MODULES = re.compile(
    r"(?<![\w./=\\-])(?<!hf:)(?=(?!hf:)([A-Za-z_][\w.]*):[A-Za-z_]\w*(?![\w./:-]))"
)
STAGE = re.compile(rb'\{"stage": "((?:[^"\\]|\\.)*)"')  # of a row of metrics.jsonl


def check_run(config: RunConfig) -> None:
    """Checks that `open_run` can use the folder, without writing anything.

    Raises:
      InputError: an option is a path that is not UTF-8; the run does not have the
        steps of `profile`; `out` is no readable folder or begins with ~; it is not
        empty and `resume` is off; or `resume` is on and the folder is not that of a
        run, has a file that cannot be written, lost its snapshots, has a model beside
        `resume_from`, or its recorded config differs from this one.
    """
    fields = to_json(config)
    if (why := parsing.fault(fields)) is not None:  # the file could not be read again
        raise InputError(
            f"expected options that config.json can hold, got one {why}; give it in "
            f"UTF-8, and paths with such names"
        )
    num_steps = fields.get("num_steps")
    if config.profile is not None and num_steps is not None:
        Window.parse(config.profile).check(num_steps)
    out, names, why = config.out, [], ""
    try:
        if "\0" in str(out):
            why = "a name with NUL"
        elif urls.begins_at_home(out):
            why = f"a folder named ~ ({urls.HOME})"
        elif "[" in str(out.absolute()):  # Orbax reads its path as a glob pattern
            why = "a name with [, in which no snapshot would be restored"
        elif out.exists() and not out.is_dir():
            why = "a file"
        else:
            names = _contents(out)
    except OSError as error:
        why = str(error.strerror)
    if why:
        raise InputError(
            f"--out {mirror.written(out)!r:.200}: expected a folder, absent or one "
            f"that can be read, got: {why}; give another --out, or repair that one"
        )
    if not names and not config.resume_from:
        return
    resumed = config.resume or config.resume_from is not None
    mirror.require_run(out, names, resume=resumed)
    _check_writable(out)
    _changes(config)
    refuse(
        _lost_snapshots(out, read_config(out / CONFIG))
        if config.resume_from is None
        else resume.old_models(out)
    )


def _lost_snapshots(out: Path, fields: dict[str, Any]) -> list[str]:
    """Describes a stage whose rows show that it has saved, and that has no snapshot.

    A resume would begin that stage again, and drop its rows. A run saves every
    `snapshot_every` steps, and a kill may lose one save that was under way.
    """
    path = out / "metrics.jsonl"
    lines = path.read_bytes().splitlines() if path.is_file() else []
    rows = collections.Counter(m[1].decode() for m in map(STAGE.match, lines) if m)
    results = [name for name in resume.FINISHED if (out / name).exists()]
    least = 1 if results else 2 * fields.get("snapshot_every", 1)
    return [
        f"--resume: expected the snapshots of {stage}, of which {path} has {count} "
        f"{'row' if count == 1 else 'rows'}, got none in {out / 'snapshots' / stage}; "
        f"put them back, or begin it again with --resume-from 0, which drops these rows"
        for stage, count in rows.items()
        if count >= least and not resume.newest(out / "snapshots" / stage)
    ]


def _changes(config: RunConfig) -> list[tuple[resume.Recorded, list[str]]]:
    """The fields that a resume changes, for the config of each stage or config.json.

    Raises:
      InputError: fields differ that a resume may not change; the message lists them.
    """
    path = config.out / CONFIG
    whole = resume.Recorded(str(path), read_config(path))
    recorded = resume.recorded_configs(config.out) or [whole]
    fields, but = to_json(config), frozenset(MAY_DIFFER)
    return [
        (one, resume.check_config(one, fields, but=but, folder=config.out))
        for one in recorded
    ]


def open_run(config: RunConfig) -> Path:
    """Makes the run folder with its config.json, or checks the existing one.

    A resumed run whose folder is still empty starts from the beginning. Differences
    from the recorded versions, and in fields that a resume may change, are accepted
    with a warning on stderr; config.json then records the new fields.

    Of several processes the first does this, and the others wait for it.

    Raises:
      InputError: the folder is not empty and the run is not resumed, its recorded
        config differs, or the folder cannot be made.
    """
    processes.on_first(lambda: _open(config))
    return config.out


def _open(config: RunConfig) -> None:
    check_run(config)
    out, path = config.out, config.out / CONFIG
    if _contents(out):
        before = recorded(path)
        by_user = code_of(config)
        for name, now in (versions() | by_user).items():
            former = str(before["versions"].get(name, now)).rpartition(THEN)[2]
            if former != now:
                how = "" if name in by_user else " in the last bits"
                print(
                    f"warning: this run began with {name} {former} and goes on with "
                    f"{now}; its numbers may differ{how}",
                    file=sys.stderr,
                )
        fields = to_json(config)
        for snapshot, names in _changes(config):
            resume.tell_changes(snapshot, fields, names)
        if resume.differing(before["config"], fields, but=frozenset(MAY_DIFFER)):
            write_json(path, before | {"config": fields})
        return
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"--out {out} cannot be made: {error}") from error
    used = versions() | code_of(config)
    write_json(path, {"config": to_json(config), "versions": used})


def record_versions(folder: Path, now: Mapping[str, str]) -> None:
    """Adds versions that a run goes on with to its config.json: "0.2.0 then 0.3.0".

    One that the run did not record as it began, such as the hash of a reward's code by
    an older version, is "not recorded then ...".
    """
    path = folder / CONFIG
    before = recorded(path)
    used = dict(before["versions"])
    for name, version in now.items():
        then = str(used.get(name, UNRECORDED))
        if then.rpartition(THEN)[2] != version:
            used[name] = f"{then}{THEN}{version}"
    if used != before["versions"]:
        write_json(path, before | {"versions": used})


def write_summary(folder: Path, summary: dict[str, Any]) -> None:
    """Writes summary.json in one step; NaN and infinity raise ValueError.

    It is the last file of a run, and ends with the sums of all others (`proof`).
    """
    if processes.is_first():
        write_json(folder / run_files.SUMMARY, run_files.sealed(folder, summary))


def read_summary(folder: Path) -> dict[str, Any]:
    """Returns the contents of summary.json without its proof.

    Raises:
      InputError: the file is missing, or is not the summary of a run.
    """
    summary = parsing.read_object(
        folder / run_files.SUMMARY,
        expected="the summary of a run",
        advice="remove it, and the folder too where a sweep is to run it again",
        shape=SUMMARY,
    )
    return {name: value for name, value in summary.items() if name != sums.PROOF}


def versions() -> dict[str, str]:
    """Returns the versions and devices on which a result may depend."""
    device = jax.devices()[0]
    return {
        "python": platform.python_version(),
        "rlhf_jax": _source(),
        **{name: metadata.version(name) for name in PACKAGES},
        **entry_points.packages(),
        "devices": f"{jax.device_count()} {device.platform} ({device.device_kind})",
        "matmul_precision": precision.name(),
    }


def code_of(config: RunConfig) -> dict[str, str]:
    """Returns {"my_rewards.py": its SHA-256} of modules that options name.

    A changed reward changes the numbers as another version does. Modules that it
    imports are not followed.
    """
    options = json.dumps(to_json(config), ensure_ascii=False)
    files = {name: _file_of(name) for name in sorted({*MODULES.findall(options)})}
    return {
        f"{module}.py": f"sha256 {sums.of_file(file)[1][:12]}"
        for module, file in files.items()
        if file is not None
    }


def _file_of(module: str) -> Path | None:
    """The file of a module that is not part of this package; imports nothing."""
    places, spec = [*sys.path, os.getcwd()], None
    for part in module.split("."):
        spec = machinery.PathFinder.find_spec(part, places)
        if spec is None:
            break
        places = [*(spec.submodule_search_locations or ())]
    # A loaded module may come from elsewhere, as by an editable installation.
    origin = getattr(sys.modules.get(module), "__file__", spec and spec.origin)
    own = module.partition(".")[0] == rlhf_jax.__name__
    if origin is None or own or not origin.endswith(".py"):
        return None
    return Path(origin) if Path(origin).is_file() else None


@functools.cache
def _source() -> str:
    """The version; for a checkout also its commit, and whether files were changed."""
    package = Path(rlhf_jax.__file__).parent
    if not (package.parent / ".git").exists():
        return rlhf_jax.__version__

    def git(*arguments: str) -> str:
        return subprocess.run(
            ("git", "-C", package, *arguments),
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()

    try:
        commit = git("rev-parse", "--short=12", "HEAD")
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".")
    except (OSError, subprocess.CalledProcessError):  # no git, or no commit yet
        return rlhf_jax.__version__
    return f"{rlhf_jax.__version__} ({commit}{', changed' if changed else ''})"


def read_config(path: Path) -> dict[str, Any]:
    """Returns the config in a config.json, as JSON values; raises as `recorded`."""
    return recorded(path)["config"]


def write_json(path: Path, value: dict[str, Any]) -> None:
    """Writes strict JSON in one step; NaN and infinity raise ValueError."""
    write_text(path, sums.written(value))


def write_text(path: Path, text: str) -> None:
    """Replaces a file in one step: a crash leaves the old or the new file, whole.

    Of several processes only the first writes.

    Raises:
      WriteError: the file cannot be written; the old one stays.
    """
    if not processes.is_first():
        return
    with (
        write_errors.writing(path),
        replacing(path) as unfinished,
        unfinished.open("w", encoding="utf-8") as file,
    ):
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _contents(folder: Path) -> list[str]:
    """Names in a folder, without the lock and *.tmp files that a kill may leave."""
    if not folder.exists():
        return []
    return sorted(
        path.name
        for path in folder.iterdir()
        if path.name != lock.NAME and not path.name.endswith(UNFINISHED)
    )


def _check_writable(folder: Path) -> None:
    """Raises InputError if this user cannot write files that a resume must write."""
    snapshots = folder / "snapshots"
    for path in (*folder.glob("*.jsonl"), snapshots, *snapshots.glob("*")):
        if path.exists() and not os.access(path, os.W_OK):
            raise InputError(
                f"--resume: expected a run that this user can go on with, got no "
                f"permission to write {path}; allow that, or start a new run with "
                f"another --out"
            )


def recorded(path: Path) -> dict[str, dict[str, Any]]:
    """Returns the contents of a config.json: "config", as JSON values, and "versions".

    Raises:
      InputError: the file is missing or is not a run's config.json.
    """
    return parsing.read_object(
        path,
        expected="the config.json of a run, with the objects 'config' and 'versions'",
        advice="restore it, or give the folder of another run",
        shape={"config": {}, "versions": {}},
    )
