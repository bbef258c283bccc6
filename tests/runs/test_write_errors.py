"""A full disk gives one line and status 1, and no saved data is lost.

The run below meets a limit on the size of its files (RLIMIT_FSIZE), which the system
enforces in every thread as it does a full disk, with another number.
"""

import dataclasses
import errno
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import matplotlib.figure
import places
import pytest

from rlhf_jax import frozen
from rlhf_jax.checkpoints import shards
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import (
    command_line,
    folder,
    metrics,
    plots,
    run,
    run_config,
    write_errors,
)

FULL = "No space left on device"
TENSORSTORE = (
    'RESOURCE_EXHAUSTED: Error writing local file "/x/_sharding": Failed to write '
    "46930 bytes to file 21: Nothing known [os_error_code='28']"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_steps: int = 6
    snapshot_every: int = 2
    progress: bool = False


def train(config: Config) -> None:
    """A run with snapshots of 80 kB and a metric that contains the step."""
    largest = os.environ.get("LARGEST")  # bytes of a file, from step 3 on
    start = {"sum": jnp.zeros(20_000)}
    with (
        run.Run(config, num_steps={"only": config.num_steps}) as job,
        job.stage("only", start, meta={}) as stage,
    ):
        for step in stage.steps():
            if step == 3 and largest is not None:
                while not (job.folder / "snapshots" / "only" / "2").exists():
                    time.sleep(0.01)
                hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
                resource.setrlimit(resource.RLIMIT_FSIZE, (int(largest), hard))
            stage.state = {"sum": stage.state["sum"] + jnp.arange(20_000.0) * step}
            stage.end_step(
                step, {"mean": (stage.state["sum"].sum(), jnp.float32(20e3))}
            )
    folder.write_summary(job.folder, {"sum": float(stage.state["sum"].sum())})


def start(*argv: object, **environment: str) -> subprocess.CompletedProcess[str]:
    root = places.PYTHONPATH
    return subprocess.run(
        [sys.executable, __file__, *map(str, argv)],
        env=os.environ | {"PYTHONPATH": root, "TPU_SKIP_MDS_QUERY": "1"} | environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("largest", "name", "safe"),
    [
        # Snapshot 4 is begun before step 4 and waited for as snapshot 6 is to begin.
        # A row has some 45 bytes.
        (20_000, "snapshots/only/4", "snapshot 2 of only and 6 rows of metrics.jsonl"),
        (80, "metrics.jsonl", "snapshot 2 of only and 2 rows of metrics.jsonl"),
    ],
)
def test_a_full_disk_is_one_line_and_the_run_goes_on_afterwards(
    tmp_path, largest, name, safe
):
    out = tmp_path / "run"
    ended = start("--out", out, LARGEST=str(largest))
    stopped = [line for line in ended.stderr.splitlines() if "stopped" in line]
    assert ended.returncode == 1, ended.stderr
    assert ended.stderr.splitlines()[-1:] == stopped
    assert "Traceback" not in ended.stderr
    assert f"{out / name} could not be written: File too large; safe: " in stopped[0]
    assert safe in stopped[0]
    assert f"--config {out / 'config.json'} --resume" in stopped[0]
    assert start("--out", out, "--resume").returncode == 0
    assert start("--out", tmp_path / "whole").returncode == 0
    whole = tmp_path / "whole"
    rows = [(run / "metrics.jsonl").read_bytes() for run in (out, whole)]
    assert rows[0] == rows[1]
    # The proof has a digest of config.json, which names the folder.
    summaries = [json.loads((run / "summary.json").read_text()) for run in (out, whole)]
    proofs = [summary.pop("proof")["files"] for summary in summaries]
    assert summaries[0] == summaries[1]
    assert proofs[0].keys() == proofs[1].keys()
    assert proofs[0]["metrics.jsonl"] == proofs[1]["metrics.jsonl"]


def one(value):
    return jnp.float32(value), jnp.float32(1)


@pytest.mark.parametrize("name", metrics.FILES)
def test_a_record_that_cannot_be_written_is_named(tmp_path, name):
    (tmp_path / f"{name}.jsonl").symlink_to("/dev/full")
    rows = {"stats": {"x": one(1)}, "positions": {"k1": (jnp.ones(2), jnp.ones(2))}}

    def write():
        with metrics.Recorder(tmp_path) as record:
            record.write_samples(0, [{"a": 1}])
            record.write(0, **rows)

    with pytest.raises(write_errors.WriteError) as error:
        write()
    assert str(error.value) == f"{tmp_path / name}.jsonl could not be written: {FULL}"


def test_a_file_is_replaced_whole_or_stays(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    folder.write_text(path, "old")

    def refuse(descriptor):
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(write_errors.WriteError, match="Disk quota exceeded"):
        folder.write_text(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_and_figures_that_cannot_be_written(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, FULL)

    model = tmp_path / "model"
    unwritten = pytest.raises(write_errors.WriteError, match=f"model could not.*{FULL}")
    with unwritten, shards.new_folder(model):
        refuse()
    assert list(tmp_path.iterdir()) == []
    with metrics.Recorder(tmp_path) as record:
        record.begin("ppo")
        record.write(0, {"objective/kl": one(1)})
    monkeypatch.setattr(matplotlib.figure.Figure, "savefig", refuse)
    with pytest.raises(write_errors.WriteError, match=f"plots could not be .* {FULL}"):
        plots.draw(tmp_path)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.EROFS, "Read-only file system"), "Read-only file system"),
        (ValueError(TENSORSTORE), FULL),  # by its number
        (RuntimeError("Error while serializing: (os error 13)"), "Permission denied"),
        (ValueError(f"UNKNOWN: {FULL}"), FULL),
        (ValueError("two leaves have one path"), None),
        (TypeError("expected an array"), None),
    ],
)
def test_what_the_system_said(error, expected):
    assert write_errors.reason(error) == expected
    above = RuntimeError("a thread failed")
    above.__cause__ = error
    assert write_errors.reason(above) == expected


@pytest.mark.parametrize("error", [InputError("wrong"), frozen.ReferenceMovedError()])
def test_what_is_told_already_is_not_a_failed_write(error):
    error.__cause__ = OSError(errno.ENOSPC, FULL)
    with pytest.raises(type(error)) as raised, write_errors.writing(Path("x")):
        raise error
    assert raised.value is error


def ending(function, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        command_line.main(
            function, Config, description="", argv=["--out", str(tmp_path / "run")]
        )
    return exit_.value.code, capsys.readouterr().err


def test_a_failed_write_of_an_experiment_s_own(tmp_path, capsys):
    def full(config):
        raise OSError(errno.ENOSPC, FULL)

    status, printed = ending(full, tmp_path, capsys)
    assert status == 1
    assert printed == (
        f"stopped: a file could not be written: {FULL}; no snapshot is complete yet; "
        f"make room there, then start again, as nothing was written yet\n"
    )


def test_a_permission_elsewhere_is_no_failed_write(tmp_path):
    """A file that a reward reads, say: the user's error keeps its traceback."""

    def forbidden(config):
        raise PermissionError(errno.EACCES, "Permission denied", "/else/data")

    argv = ["--out", str(tmp_path / "run")]
    with pytest.raises(PermissionError):
        command_line.main(forbidden, Config, description="", argv=argv)


def test_an_out_that_cannot_be_written_is_told_before_the_run(
    tmp_path, capsys, monkeypatch
):
    # Root may write anywhere, so the system's answer is replaced.
    access = os.access
    closed = tmp_path / "run"
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: Path(path) != closed and access(path, mode),
    )
    status, printed = ending(pytest.fail, tmp_path, capsys)
    assert status == 2
    assert printed.startswith(f"error: --out {closed}: expected a folder that can be")
    assert printed.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["metrics.jsonl", "snapshots"])
def test_a_resume_that_could_not_write_is_told_before_the_run(
    tmp_path, capsys, monkeypatch, name
):
    config = Config(out=tmp_path / "run")
    train(dataclasses.replace(config, num_steps=2))

    def never(config: Config) -> None:
        pytest.fail("the run is called")

    closed = tmp_path / "run" / name
    access = os.access
    monkeypatch.setattr(
        os,
        "access",
        lambda path, mode: Path(path) != closed and access(path, mode),
    )
    argv = ["--config", str(tmp_path / "run" / "config.json"), "--resume"]
    with pytest.raises(SystemExit) as exit_:
        command_line.main(never, Config, description="", argv=argv)
    assert exit_.value.code == 2
    assert f"got no permission to write {closed}" in capsys.readouterr().err


if __name__ == "__main__":
    command_line.main(train, Config, description="A tiny run.", argv=sys.argv[1:])


def test_a_place_for_a_file(tmp_path):
    def check(name):
        write_errors.check_place(
            tmp_path / name,
            option="--html",
            called="page",
            is_own=lambda path: path.read_text() == "own",
        )

    (tmp_path / "own").write_text("own")
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "loop").symlink_to("loop")
    os.mkfifo(tmp_path / "pipe")
    check("new")
    check("own")
    for name, got in {
        "mine": "got another file, which would be lost; choose another name or remove",
        "": "got a folder; name a file in it",
        "loop": "got no regular file; choose another",
        "pipe": "got no regular file; choose another",
        "none/new": "expected a file in a folder that exists, got no .*/none; make it",
        "mine/new": "expected a file in a folder that exists, got no .*/mine; make it",
        "x" * 300: "got File name too long; choose another",
        "a\0b": "got .*embedded null (byte|character).*; choose another",
    }.items():
        with pytest.raises(InputError, match=rf"^--html .*{got}") as refusal:
            check(name)
        assert "\0" not in str(refusal.value)
