"""If a reward hangs after a signal, the run saves and ends in time, to the last bit.

The run below has the shape of an experiment, with arithmetic in the place of models.
"""

import dataclasses
import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import places
import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line, metrics, run, stops
from rlhf_jax.runs.folder import write_summary
from rlhf_jax.runs.run_config import RunConfig

HANGS_AT = 5
SECONDS = 1.5


def loops():
    while True:
        try:
            time.sleep(60)
        except BaseException:  # nothing that is raised here ends it
            continue


def counts():
    """Hangs in C without Python's lock, ignoring signals."""
    forever = "WITH RECURSIVE t(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM t)"
    sqlite3.connect(":memory:").execute(f"{forever} SELECT count(*) FROM t").fetchone()


def matches():
    """Hangs in C while holding Python's lock."""
    re.match(r"(a+)+$", "a" * 60 + "b")


HANGS = {"loops": loops, "counts": counts, "matches": matches}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    num_steps: int = 8
    snapshot_every: int = 3
    progress: bool = False
    hang: str = ""
    stop_timeout: float = SECONDS


def play(config):
    """A donated sum of noise; `ahead` advances early, like rollouts sampled ahead."""
    root = jax.random.key(config.seed)
    update = jax.jit(lambda x, ahead: 0.9 * x + ahead, donate_argnums=0)
    draw = jax.jit(lambda step: jax.random.normal(jax.random.fold_in(root, step), (9,)))
    start = {"x": jnp.zeros(9), "ahead": draw(0)}
    steps = {"only": config.num_steps}
    with (
        run.Run(config, num_steps=steps, stop_timeout=config.stop_timeout) as job,
        job.stage("only", start, meta={}) as stage,
    ):
        for step in stage.steps():
            now, stage.state["ahead"] = stage.state["ahead"], draw(step + 1)
            with stage.user_code():
                if config.hang and step == HANGS_AT and not config.resume:
                    print("hanging", flush=True)
                    HANGS[config.hang]()
                score = float(now.sum())
            stage.state["x"] = update(stage.state["x"], now)
            stage.end_step(step, {"score": (jnp.float32(score), jnp.float32(1))})
    x = np.asarray(stage.state["x"])
    write_summary(config.out, {"x": x.tolist()})


def result(folder: Path) -> dict[str, object]:
    """Rows and summary, without its checksums, as timings.jsonl varies."""
    summary = json.loads((folder / "summary.json").read_bytes())
    del summary["proof"]
    return {"metrics": (folder / "metrics.jsonl").read_bytes(), "summary": summary}


@pytest.mark.slow
@pytest.mark.parametrize(
    "hang", [pytest.param("loops", marks=pytest.mark.long), "counts", "matches"]
)
def test_a_reward_that_hangs_is_ended_in_time_and_the_run_goes_on(tmp_path, hang):
    out, whole = tmp_path / "run", tmp_path / "whole"
    command = (sys.executable, __file__, "--out", str(out), "--hang", hang)
    root = places.PYTHONPATH
    with subprocess.Popen(
        command,
        env=os.environ | {"PYTHONPATH": root},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "hanging\n"
            time.sleep(0.3)  # to be well inside
            process.send_signal(signal.SIGTERM)
            began = time.monotonic()
            _, errors = process.communicate(timeout=60)
            took = time.monotonic() - began
        finally:
            process.kill()
    assert process.returncode == 128 + signal.SIGTERM
    assert SECONDS <= took < SECONDS + 15  # with a save, on a busy machine
    message = f"step {HANGS_AT} did not come through its sampler, reward or judge"
    assert f"{message} within 1.5 s of SIGTERM" in errors
    assert f"saved as of step {HANGS_AT}; go on with" in errors
    assert "Traceback" not in errors
    assert sorted(os.listdir(out / "snapshots" / "only")) == ["3", str(HANGS_AT)]
    assert len(metrics.read(out / "metrics.jsonl")) == HANGS_AT
    play(Config(out=out, hang=hang, resume=True))
    play(Config(out=whole))
    assert result(out) == result(whole)


def test_what_returns_in_time_is_left_alone():
    """A step that ends within the limit saves as usual and leaves no thread."""
    before = signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(before)
    threads = set(threading.enumerate())  # those of other tests may end meanwhile
    with (
        stops.Deadline(30.0) as limited,
        command_line.Interrupt(on_request=limited.on_signal),
    ):
        with limited.limit(pytest.fail):
            signal.raise_signal(signal.SIGTERM)
        assert len(set(threading.enumerate()) - threads) == 1
    assert set(threading.enumerate()) <= threads
    assert signal.set_wakeup_fd(before) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0.0, 0.0)


def test_a_tick_does_not_wait_where_it_holds_the_lock():
    """Else the thread that saves and ends the process would wait for the tick."""
    limited = stops.Deadline(1e-9)
    limited._save = str  # as `limit` has it at its ends
    limited._until = 0.0
    with limited._changed:
        tick = threading.Thread(target=limited._on_tick, args=(0, None), daemon=True)
        tick.start()
        tick.join(10)
    assert not tick.is_alive()


def ended(monkeypatch, save, *, late):
    """(status, message) of a process that a deadline ends."""
    lines, status, over = [], [], threading.Event()

    def leave(code):
        status.append(code)
        over.set()

    monkeypatch.setattr(stops.os, "_exit", leave)
    monkeypatch.setattr(stops.os, "write", recorded(lines))
    with stops.Deadline(0.05) as limited, command_line.Interrupt():
        if late:
            signal.raise_signal(signal.SIGINT)
            time.sleep(0.2)  # the limit is over, and nothing that may hang was begun
            assert status == []
        with limited.limit(save):
            if not late:
                signal.raise_signal(signal.SIGINT)
            assert over.wait(30)
    return status, "".join(lines)


def recorded(lines):
    write = os.write

    def to(fd, text):
        if fd != 2:
            return write(fd, text)
        lines.append(text.decode())
        return len(text)

    return to


@pytest.mark.parametrize("late", [False, True])
def test_it_saves_only_where_code_may_hang(monkeypatch, late):
    saved = []

    def save(signum):
        saved.append(signum)
        return "saved"

    status, printed = ended(monkeypatch, save, late=late)
    assert (status, saved) == ([130], [signal.SIGINT])
    assert printed.endswith("saved\n")


def test_a_save_that_fails_is_told_and_ends_the_process_too(monkeypatch):
    def save(signum):
        raise OSError("no space left")

    status, printed = ended(monkeypatch, save, late=False)
    assert status == [1]
    assert "expected to save, got OSError: no space left; earlier snapshots" in printed


def test_a_snapshot_waits_no_longer_for_what_is_still_drawn(tmp_path, monkeypatch):
    lines, status, ahead = [], [], Future()

    def leave(code):
        status.append(code)
        ahead.set_result(jnp.zeros(9))

    monkeypatch.setattr(stops.os, "_exit", leave)
    monkeypatch.setattr(stops.os, "write", recorded(lines))
    config = Config(out=tmp_path / "run", progress=False)
    with (
        run.Run(config, num_steps={"only": 8}, stop_timeout=0.05) as job,
        job.stage("only", {"ahead": jnp.zeros(9)}, meta={}) as stage,
    ):
        stage.state["ahead"] = ahead
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(command_line.Interrupted):
            stage.end_step(0, {"score": (jnp.float32(0), jnp.float32(1))})
    assert status == [128 + signal.SIGTERM]
    assert "its rollouts are not drawn; earlier snapshots are kept" in "".join(lines)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan"), float("inf")])
def test_a_limit_is_a_time(seconds):
    with pytest.raises(InputError, match="stop_timeout: expected a finite number"):
        stops.Deadline(seconds)


if __name__ == "__main__":
    command_line.main(play, Config, description="A tiny run.")
