"""One process at a time may use a run folder; its lock ends with the process."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import places
import pytest
from test_kill import main, result

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import lock

# Holds the lock of a folder until its stdin is closed, without the code under test.
HOLDER = """
import fcntl, json, sys
file = open(sys.argv[1], "w")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write(json.dumps({"process": 17, "host": "elsewhere", "since": "noon"}))
file.flush()
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path):
    """A process that has locked tmp_path/run."""
    (tmp_path / "run").mkdir()
    command = [sys.executable, "-c", HOLDER, tmp_path / "run" / "run.lock"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def is_locked(path: Path) -> bool:
    """Whether another process could not lock the file now."""
    command = """
import fcntl, sys
try:
    fcntl.lockf(open(sys.argv[1], "r+"), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(3)
"""
    status = subprocess.run([sys.executable, "-c", command, path], check=False)
    assert status.returncode in (0, 3)
    return status.returncode == 3


def test_a_second_process_is_told_who_holds_it(tmp_path, holder):
    out = tmp_path / "run"
    with pytest.raises(InputError) as error, lock.hold(out):
        pytest.fail("two processes hold the lock")
    assert "process 17 on elsewhere, since noon" in str(error.value)
    assert str(out) in str(error.value)
    assert (out / "run.lock").exists()  # it is the holder's


def test_a_killed_process_holds_nothing(tmp_path, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "run" / "run.lock").exists()
    with lock.hold(tmp_path / "run"):
        assert is_locked(tmp_path / "run" / "run.lock")
    assert list((tmp_path / "run").iterdir()) == []


def test_the_lock_is_held_until_the_outermost_gives_it_back(tmp_path):
    path = tmp_path / "a" / "run" / "run.lock"
    with lock.hold(path.parent):
        with lock.hold(path.parent):
            assert is_locked(path)
        assert is_locked(path)
        holder = json.loads(path.read_bytes())  # closing it gives the lock back
        assert holder["process"] == os.getpid()
    assert list(tmp_path.iterdir()) == []  # nothing came into what was made


def test_what_came_into_the_folder_stays(tmp_path):
    with lock.hold(tmp_path / "run"):
        (tmp_path / "run" / "config.json").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.json"]


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, capsys, code):
    def refuse(descriptor, operation):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with lock.hold(tmp_path):
        pass
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1
    assert f"{tmp_path} has no locks ({os.strerror(code)})" in warning


def test_two_names_of_a_folder_are_one_lock(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with lock.hold(tmp_path / "run"), lock.hold(tmp_path / "link" / "."):
        pass
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
def test_two_runs_in_one_folder_and_a_resume_right_after_a_kill(tmp_path):
    """The second is refused while the first lives, and accepted once it is dead."""
    options = ("--snapshot-every", "2", "--num-steps", "20")
    main("--out", tmp_path / "whole", *options)
    script = Path(__file__).with_name("test_kill.py")
    command = (sys.executable, script, "--out", tmp_path / "run", *options, "--resume")
    environment = os.environ | {
        "SECONDS_A_STEP": "0.1",
        "PYTHONPATH": places.PYTHONPATH,
    }
    metrics = tmp_path / "run" / "metrics.jsonl"
    with subprocess.Popen(command, env=environment) as first:
        while first.poll() is None and (
            not metrics.exists() or metrics.read_bytes().count(b"\n") < 5
        ):
            time.sleep(0.005)
        second = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False
        )
        assert second.returncode == 2
        assert f"process {first.pid} on " in second.stderr
        assert second.stderr.count("\n") == 1
        assert first.poll() is None  # still running, and undisturbed
        first.send_signal(signal.SIGKILL)
        first.wait()
    subprocess.run(command, env=environment, check=True)
    assert result(tmp_path / "run") == result(tmp_path / "whole")
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_system_without_posix_locks_is_refused_and_left_as_it_was(
    tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.setattr(sys, "platform", "win32")
    message = (
        r"run: expected a POSIX system such as Linux.*got win32; start the run there"
    )
    with pytest.raises(InputError, match=message), lock.hold(tmp_path / "run"):
        raise AssertionError("held")
    assert not (tmp_path / "run").exists()
