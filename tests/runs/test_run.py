"""A run's stages: what stops them, and what a resume requires."""

import dataclasses
import json
import os
import signal
import sys
import threading

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import metrics, run, run_config, stage, stops
from rlhf_jax.runs.snapshots import resume
from rlhf_jax.runs.snapshots.snapshots import Snapshots


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_steps: int = 10
    snapshot_every: int = 2
    progress: bool = False


def one(value):
    return jnp.float32(value), jnp.float32(1)


def skips(count, *, of="update"):
    return {f"{of}/skipped_in_a_row": (jnp.float32(count), None), "loss": one(count)}


def play(
    config,
    *,
    meta,
    skipped=lambda step: 0,
    of="update",
    stop=None,
    check=None,
    alarms=None,
):
    """Adds the step to a sum; `skipped(step)` is the update's own metric."""
    steps = []
    initial = {"sum": jnp.float32(0)}
    with (
        run.Run(config, num_steps={"only": config.num_steps}, check=check) as job,
        job.stage("only", initial, meta=meta) as stage,
    ):
        for step in stage.steps():
            if step == stop:
                break
            stage.state = {"sum": stage.state["sum"] + step}
            at = {"k1": (jnp.full(2, step), jnp.ones(2))} if step % 3 == 0 else None
            stage.end_step(step, skips(skipped(step), of=of), positions=at)
            steps.append(step)
    if alarms is not None:
        alarms += job.alarms
    return stage.state, steps


def test_a_stage_goes_on_at_its_newest_snapshot(tmp_path):
    config = Config(out=tmp_path / "run")
    play(config, meta={"reference": "a"}, stop=7)
    again = dataclasses.replace(config, resume=True)
    state, steps = play(again, meta={"reference": "a"})
    assert steps == [6, 7, 8, 9]
    assert float(state["sum"]) == sum(range(10))
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(10))
    state, steps = play(again, meta={"reference": "a"})
    assert steps == []
    assert float(state["sum"]) == sum(range(10))


@pytest.mark.parametrize("at", [3, 6, 9])  # between snapshots, and at the last step
def test_an_alarm_that_stops_the_run_saves_it_and_a_resume_goes_on(tmp_path, at):
    """Rows are read one step late: the step after the alarm's is saved as well."""
    config = Config(out=tmp_path / "run", snapshot_every=5)
    made = []

    def play_on(config):
        raised = {"check": lambda rows: {"kl": "high"} if len(rows) > at else {}}
        with (
            run.Run(
                config, num_steps={"only": 10}, stops={"kl"}.__contains__, **raised
            ) as job,
            job.stage("only", {"sum": jnp.float32(0)}, meta={}) as stage,
        ):
            for step in stage.steps():
                stage.state = {"sum": stage.state["sum"] + step}
                made.append(step)
                stage.end_step(step, {"loss": one(step)})
        return float(stage.state["sum"])

    with pytest.raises(StopError, match=rf"step {at}, kl: high .*; saved, go on with"):
        play_on(config)
    newest = resume.newest(config.out / "snapshots" / "only")
    assert newest == min(at + 2, 10) == len(made)
    again = dataclasses.replace(config, resume=True)
    assert play_on(again) == sum(range(10))
    assert made == list(range(10))
    rows = metrics.read(config.out / "metrics.jsonl")
    assert [row["step"] for row in rows if "alarms" in row] == list(range(at, 10))


@pytest.mark.parametrize("error", [ValueError("no answer"), KeyboardInterrupt()])
def test_a_reward_that_fails_loses_no_step(tmp_path, capsys, error):
    """Such as a judge whose server is gone; a second Ctrl-C stops at once."""
    config = Config(out=tmp_path / "run", snapshot_every=5)
    update = jax.jit(lambda total, step: total + step, donate_argnums=0)

    def play_on(config, *, fails, **alarms):
        with (
            run.Run(config, num_steps={"only": 10}, stop_timeout=9.0, **alarms) as job,
            job.stage("only", {"sum": jnp.float32(0)}, meta={}) as stage,
        ):
            for step in stage.steps():
                with stage.user_code():
                    if step == fails:
                        raise error
                stage.state = {"sum": update(stage.state["sum"], step)}
                stage.end_step(step, {"loss": one(step)})
        return float(stage.state["sum"]), stage.start

    alarms = {"check": lambda rows: {"kl": "high"} if len(rows) == 8 else {}}
    with pytest.raises(type(error)):
        play_on(config, fails=8, stops={"kl"}.__contains__, **alarms)
    again = dataclasses.replace(config, resume=True)
    saved = 8 if isinstance(error, ValueError) else 5
    assert ("saved as of step 8; go on" in capsys.readouterr().err) == (saved == 8)
    with pytest.raises(type(error)):
        play_on(again, fails=saved)  # the same step again
    assert play_on(again, fails=None) == (sum(range(10)), saved)
    rows = metrics.read(config.out / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(10))


def test_a_resumed_run_counts_the_seconds_of_earlier_starts(tmp_path):
    config = Config(out=tmp_path / "run")
    play(config, meta={}, stop=7)  # the newest snapshot has 6 steps
    path = config.out / "timings.jsonl"
    lines = path.read_text().splitlines()
    rows = [json.loads(line) | {"seconds": 2.5} for line in lines]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    again = dataclasses.replace(config, resume=True, accept_lost_rows=True)
    with run.Run(again, num_steps={"only": 10}) as job:
        assert job.seconds_before == 0
        with job.stage("only", {"sum": jnp.float32(0)}, meta={}):
            assert job.seconds_before == 6 * 2.5


def test_a_run_without_stages_has_a_folder_and_no_profile(tmp_path):
    config = Config(out=tmp_path / "run")
    with run.Run(config, num_steps={}) as job:
        assert job.alarms == []
    assert (tmp_path / "run" / "config.json").exists()
    profiled = dataclasses.replace(config, out=tmp_path / "other", profile="2:4")
    with pytest.raises(
        InputError, match="2:4: expected a program that trains step by step"
    ):
        run.Run(profiled, num_steps={})
    assert not (tmp_path / "other").exists()


def test_a_logger_that_cannot_be_imported_leaves_no_folder(tmp_path, monkeypatch):
    (tmp_path / "wandb.py").write_text("raise OSError('no room\\nfor a cache')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    config = Config(out=tmp_path / "run", wandb=True)
    with pytest.raises(InputError, match=r"--wandb: .* got: no room for a cache; pip"):
        run.Run(config, num_steps={"only": 10})
    assert not (tmp_path / "run").exists()


def test_a_run_tells_its_alarms_and_positions(tmp_path):
    def check(rows):
        return {"late": f"{len(rows)} rows"} if len(rows) in (4, 5, 8) else {}

    config = Config(out=tmp_path / "run")
    expected = [
        {"stage": "only", "name": "late", "step": step, "message": f"{step + 1} rows"}
        for step in (3, 7)
    ]
    play(config, meta={}, check=check, stop=7)
    alarms = []
    again = dataclasses.replace(config, resume=True)
    play(again, meta={}, check=check, alarms=alarms)
    assert alarms == expected
    rows = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows if "alarms" in row] == [3, 4, 7]
    positions = metrics.read(tmp_path / "run" / "positions.jsonl")
    assert [(row["step"], row["k1"]) for row in positions] == [
        (step, [step, step]) for step in (0, 3, 6, 9)
    ]


def test_a_resume_with_another_reference_is_refused(tmp_path):
    config = Config(out=tmp_path / "run")
    play(config, meta={"reference": "a"}, stop=4)
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    again = dataclasses.replace(config, resume=True)
    with pytest.raises(InputError, match=r"expected reference b.*got a; resume with"):
        play(again, meta={"reference": "b"})
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("of", "message_end"),
    [
        ("update", "so nothing was updated in these steps"),
        ("critic", "in the critic, which was not updated in these steps, while the"),
    ],
)
def test_skips_in_a_row_stop_the_run_and_leave_the_last_good_snapshot(
    tmp_path, of, message_end
):
    config = Config(out=tmp_path / "run")
    message = f"not finite 5 times in a row, {message_end}"
    with pytest.raises(stage.DivergedError, match=message):
        play(config, meta={}, skipped=lambda step: max(0, step - 2), of=of)
    # The fifth skip, of step 7, is read when step 7 is about to be saved.
    with Snapshots(tmp_path / "run" / "snapshots" / "only") as snapshots:
        assert snapshots.latest() == 6
    state, steps = play(dataclasses.replace(config, resume=True), meta={})
    assert steps == [6, 7, 8, 9]
    assert float(state["sum"]) == sum(range(10))


def test_fewer_skips_do_not_stop_it(tmp_path):
    config = Config(out=tmp_path / "run")
    _, steps = play(config, meta={}, skipped=lambda step: step % 5)
    assert steps == list(range(10))


@pytest.fixture
def handlers():
    """The handlers of a run's signals, which must be the same afterwards."""

    def now():
        names = (signal.SIGTERM, signal.SIGINT, signal.SIGVTALRM)
        return [signal.getsignal(name) for name in names], signal.set_wakeup_fd(-1)

    before = now()
    signal.set_wakeup_fd(before[1])
    yield now
    for number, handler in zip(
        (signal.SIGTERM, signal.SIGINT, signal.SIGVTALRM), before[0], strict=True
    ):
        signal.signal(number, handler)


def open_files():
    return sorted(os.listdir("/dev/fd"))


def test_a_run_that_cannot_be_entered_leaves_nothing_behind(
    tmp_path, monkeypatch, handlers
):
    """The last step of entering fails: the deadline's thread does not start."""
    before, files = handlers(), len(open_files())
    config = Config(out=tmp_path / "run")

    def start(thread):
        raise RuntimeError("can't start new thread")

    job = run.Run(config, num_steps={"only": 2}, stop_timeout=5.0)
    monkeypatch.setattr(threading.Thread, "start", start)
    with pytest.raises(RuntimeError, match="can't start"), job:
        raise AssertionError("entered")
    monkeypatch.undo()
    assert handlers() == before
    assert len(open_files()) == files
    assert not (tmp_path / "run" / "run.lock").exists()


def test_a_deadline_that_fails_at_the_end_leaves_nothing_behind(
    tmp_path, monkeypatch, handlers
):
    before = handlers()
    config = Config(out=tmp_path / "run")
    leave = stops.Deadline.__exit__

    def left(self, *exception):
        leave(self, *exception)
        raise BlockingIOError("the pipe is full")

    monkeypatch.setattr(stops.Deadline, "__exit__", left)
    job = run.Run(config, num_steps={"only": 2}, stop_timeout=5.0)
    job.record.begin("only")
    with pytest.raises(BlockingIOError, match="the pipe is full"), job:
        job.record.write(0, {"loss": one(3)})
    assert handlers() == before
    assert not (tmp_path / "run" / "run.lock").exists()
    (row,) = metrics.read(tmp_path / "run" / "metrics.jsonl")
    assert row["loss"] == 3


def test_a_stage_without_steps_is_refused_before_the_folder_is_made(tmp_path):
    with pytest.raises(InputError, match="only: expected at least 1 step, got 0"):
        play(Config(out=tmp_path / "run", num_steps=0), meta={})
    assert not (tmp_path / "run").exists()


def test_a_step_is_dispatched_before_the_stats_of_the_last_are_read(
    tmp_path, monkeypatch
):
    config = Config(out=tmp_path / "run", num_steps=4, snapshot_every=9)
    order = []
    whole = processes.whole

    def read(tree):
        if isinstance(tree, list):  # not the digests of a snapshot
            order.append(f"read {float(tree[0]['x'][0]):.0f}")
        return whole(tree)

    monkeypatch.setattr(processes, "whole", read)
    update = jax.jit(lambda total, step: total + step, donate_argnums=0)
    with (
        run.Run(config, num_steps={"only": config.num_steps}) as job,
        job.stage("only", {"total": jnp.zeros(())}, meta={}) as stage,
    ):
        for step in stage.steps():
            stage.state["total"] = update(stage.state["total"], step)
            order.append(f"dispatch {step}")
            stage.end_step(step, {"x": one(step)})
    assert order == [
        *("dispatch 0", "dispatch 1", "read 0", "dispatch 2", "read 1"),
        *("dispatch 3", "read 2", "read 3"),  # the last is flushed
    ]
