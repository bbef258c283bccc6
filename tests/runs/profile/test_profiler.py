"""A window of a run's steps is traced, and nothing else of the run changes."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.runs import metrics, run, run_config
from rlhf_jax.runs.profile import profiler, trace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(run_config.RunConfig):
    num_steps: int = 6
    snapshot_every: int = 2
    progress: bool = False


@jax.jit
def update(total, step):
    with jax.named_scope("loss"):
        return total + jnp.sin(step.astype(jnp.float32))


# Two texts in a row with segments, none in the next; then masks of one text a row.
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 0], [0, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1]])
RESPONSES = jnp.array(
    [[0, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 0, 1]], bool
)
LENGTHS = [(1, 2), (0, 2), (5, 1)]
BY_MASK = [(1, 4), (5, 1)]


def play(config, *, stages=("first", "last"), fail_at=None):
    """A sum of sines in each stage; what was traced while each step ran."""
    with run.Run(config, num_steps=dict.fromkeys(stages, config.num_steps)) as job:
        for name in stages:
            with job.stage(name, {"sum": jnp.float32(0)}, meta={}) as stage:
                for step in stage.steps():
                    if (name, step) == ("last", fail_at):
                        raise RuntimeError("a defect")
                    with stage.user_code():
                        pass
                    total = update(stage.state["sum"], jnp.int32(step))
                    stage.state = {"sum": total}
                    stats = {"sum": (total, jnp.float32(1))}
                    texts = [(SEGMENTS, RESPONSES), (SEGMENTS > 0, RESPONSES)]
                    stage.end_step(step, stats, texts=texts)


def traces(config):
    return sorted((config.out / "profile").rglob("*.xplane.pb"))


def steps_of(path):
    """The steps that a trace has annotations of."""
    return sorted(
        dict(event.stats)["step_num"]
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
        if event.name == "step"
    )


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    config = Config(out=tmp_path_factory.mktemp("plain") / "run")
    play(config)
    assert profiler.read(config.out) is None
    assert not (config.out / "profile").exists()
    return config


def test_the_steps_of_the_last_stage_are_traced(tmp_path, plain):
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="2:5")
    play(config)
    (path,) = traces(config)
    assert steps_of(path) == [2, 3, 4]
    times = trace.times(path)
    assert list(times.scopes) == ["loss"]
    profiled = profiler.read(config.out)
    assert profiled is not None
    assert (profiled.stage, profiled.first, profiled.end) == ("last", 2, 5)
    assert profiled.steps == 3
    assert config.out / profiled.trace == path
    assert 0 < times.busy < profiled.seconds
    assert profiled.texts == [[*LENGTHS, *BY_MASK]] * 3
    # To the bit, as a trace reads and does not compute.
    for name in ("metrics.jsonl", "samples.jsonl", "positions.jsonl"):
        mine, theirs = ((each.out / name).read_bytes() for each in (config, plain))
        assert mine == theirs


def test_a_resume_within_the_window_traces_what_is_left(tmp_path, plain):
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="1:6")
    with pytest.raises(RuntimeError, match="a defect"):
        play(config, fail_at=3)  # with snapshot 2
    profiled = profiler.read(config.out)
    assert profiled is None  # of a window that was not finished
    play(dataclasses.replace(config, resume=True))
    profiled = profiler.read(config.out)
    assert profiled is not None
    assert (profiled.first, profiled.end) == (2, 6)
    assert steps_of(config.out / profiled.trace) == [2, 3, 4, 5]
    assert len(profiled.texts) == 4
    rows = (config.out / "metrics.jsonl").read_bytes()
    assert rows == (plain.out / "metrics.jsonl").read_bytes()
    # A resume that has no step left keeps what there is.
    before = json.loads((config.out / "profile" / "window.json").read_text())
    play(dataclasses.replace(config, resume=True, profile="1:2"))
    assert json.loads((config.out / "profile" / "window.json").read_text()) == before


def test_a_run_that_fails_leaves_the_profiler_free(tmp_path, plain):
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="2:5")
    with pytest.raises(RuntimeError, match="a defect"):
        play(config, fail_at=4)
    with jax.profiler.trace(tmp_path / "another"):  # refused while one is under way
        pass


def test_the_time_of_starting_and_stopping_is_no_step_s(tmp_path, plain, monkeypatch):
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="2:4")
    waited = []

    def wait(*_, **__):
        waited.append(run.jax.block_until_ready(jnp.float32(0)))
        profiler.time.sleep(0.3)

    monkeypatch.setattr(profiler.jax.profiler, "start_trace", wait)

    def stop():
        wait()
        path = config.out / "profile" / "plugins" / "a.xplane.pb"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")

    monkeypatch.setattr(profiler.jax.profiler, "stop_trace", stop)
    play(config)
    assert len(waited) == 2
    profiled = profiler.read(config.out)
    assert profiled is not None
    assert profiled.seconds < 0.3
    rows = metrics.read(config.out / "timings.jsonl")
    mine = [row["seconds"] for row in rows if row["stage"] == "last"]
    assert len(mine) == 6
    assert max(mine[2:5]) < 0.3


def test_lengths_are_counted_by_row_and_segment():
    lengths = profiler._lengths([(np.asarray(SEGMENTS), np.asarray(RESPONSES))])
    assert lengths == LENGTHS
