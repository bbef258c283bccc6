"""A window of a run's steps is traced, without any other change to the run."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.runs import metrics, run, run_config
from rlhf_jax.runs.profile import Window, profiler, trace


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
ALL = Window(0, 100)
LENGTHS = [profiler.Text(1, 2), profiler.Text(0, 2), profiler.Text(5, 1)]
BY_MASK = [profiler.Text(1, 4), profiler.Text(5, 1)]


def play(config, *, stages=("first", "last"), fail_at=None):
    """Sums sines in each stage; records whether each step was traced."""
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
    """The steps annotated in a trace."""
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
    assert profiler.read(config.out, window=ALL) is None
    assert not (config.out / "profile").exists()
    return config


@pytest.mark.slow
def test_the_steps_of_the_last_stage_are_traced(tmp_path, plain):
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="2:5")
    play(config)
    (path,) = traces(config)
    assert steps_of(path) == [2, 3, 4]
    times = trace.times(path)
    assert list(times.scopes) == ["loss"]
    profiled = profiler.read(config.out, window=ALL)
    assert profiled is not None
    assert (profiled.stage, profiled.first, profiled.end) == ("last", 2, 5)
    assert profiled.steps == 3
    assert config.out / profiled.trace == path
    assert 0 < times.busy < profiled.seconds
    assert profiled.texts == [[*LENGTHS, *BY_MASK]] * 3
    # To the bit, as a trace reads and does not compute.
    for name in ("metrics.jsonl", "samples.jsonl", "positions.jsonl"):
        mine, theirs = (
            (config_of_run.out / name).read_bytes() for config_of_run in (config, plain)
        )
        assert mine == theirs


@pytest.mark.slow
def test_a_resume_within_the_window_traces_what_is_left(tmp_path, plain):
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="1:6")
    with pytest.raises(RuntimeError, match="a defect"):
        play(config, fail_at=3)  # with snapshot 2
    profiled = profiler.read(config.out, window=ALL)
    assert profiled is None  # of a window that was not finished
    play(dataclasses.replace(config, resume=True))
    profiled = profiler.read(config.out, window=ALL)
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


@pytest.mark.slow
def test_a_run_that_fails_leaves_the_profiler_free(tmp_path, plain):
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="2:5")
    with pytest.raises(RuntimeError, match="a defect"):
        play(config, fail_at=4)
    with jax.profiler.trace(tmp_path / "another"):  # refused while one is under way
        pass


@pytest.mark.slow
def test_a_trace_that_was_given_up_leaves_no_file(tmp_path, plain):
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="1:2")
    play(config, stages=("last",))
    files = {path for path in config.out.rglob("profile/**/*") if path.is_file()}
    more = dataclasses.replace(config, resume=True, num_steps=12, profile="7:11")
    with pytest.raises(RuntimeError, match="a defect"):
        play(more, stages=("last",), fail_at=9)
    files_left = {path for path in config.out.rglob("profile/**/*") if path.is_file()}
    assert files_left == files
    other = dataclasses.replace(plain, out=tmp_path / "other", profile="2:5")
    with pytest.raises(RuntimeError, match="a defect"):
        play(other, stages=("last",), fail_at=4)
    assert not (other.out / "profile").exists()


@pytest.mark.slow
def test_a_resume_after_the_window_says_so(tmp_path, plain, capsys):
    config = dataclasses.replace(plain, out=tmp_path / "run")
    with pytest.raises(RuntimeError, match="a defect"):
        play(config, fail_at=5)
    capsys.readouterr()
    play(dataclasses.replace(config, resume=True, profile="1:4"))
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "warning: --profile 1:4: last goes on at step 4, after these steps; nothing is "
        "traced"
    )
    # Of a run that has a profile of these steps there is nothing to say.
    whole = dataclasses.replace(plain, out=tmp_path / "whole", profile="1:4")
    play(whole)
    capsys.readouterr()
    play(dataclasses.replace(whole, resume=True))
    assert capsys.readouterr().err == ""


@pytest.mark.slow
def test_a_profile_is_read_of_the_steps_that_are_asked_for(tmp_path, plain):
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="2:4")
    play(config)
    for first, end in ((2, 4), (1, 4), (2, 5)):
        assert profiler.read(config.out, window=Window(first, end)) is not None
    for first, end in ((3, 4), (2, 3), (0, 2)):
        assert profiler.read(config.out, window=Window(first, end)) is None
    assert profiler.read(config.out, window=None) is None


def test_devices_count_and_the_profiler_does_not(tmp_path, plain, monkeypatch):
    """Time for which devices lag behind at a boundary counts to the steps."""
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="2:4")
    order, clock = [], [0.0]  # which only what is spent here moves on
    real = jax.block_until_ready

    def spend(seconds):
        clock[0] += seconds

    def wait(arrays):
        if isinstance(arrays, list):  # all that are alive
            order.append("wait")
            spend(0.3)
        return real(arrays)

    def start(*_, **__):
        order.append("start")
        spend(0.7)

    def stop():
        start()
        order[-1] = "stop"
        path = config.out / "profile" / "plugins" / "a.xplane.pb"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")

    monkeypatch.setattr(profiler.time, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(profiler.jax, "block_until_ready", wait)
    monkeypatch.setattr(profiler.jax.profiler, "start_trace", start)
    monkeypatch.setattr(profiler.jax.profiler, "stop_trace", stop)
    play(config, stages=("last",))
    assert order == ["wait", "start", "wait", "stop"]
    profiled = profiler.read(config.out, window=ALL)
    assert profiled is not None
    # The second wait, neither start nor stop.
    assert profiled.seconds == pytest.approx(0.3)
    rows = metrics.read(config.out / "timings.jsonl")
    seconds = [row["seconds"] for row in rows]
    assert seconds == pytest.approx([0, 0, 0.3, 0.3, 0, 0], abs=1e-3)


def test_programs_that_the_window_compiles_are_counted(tmp_path, plain, monkeypatch):
    config = dataclasses.replace(plain, out=tmp_path / "run", profile="3:6")
    steps = iter(range(100))

    @jax.jit
    def grown(total, step):
        return total + step.astype(jnp.float32).sum()

    def once(total, step):
        at = next(steps)
        return grown(total, jnp.full(max(at - 2, 1), step))  # new at 4 and 5

    monkeypatch.setitem(globals(), "update", once)
    play(config, stages=("last",))
    profiled = profiler.read(config.out, window=ALL)
    assert profiled is not None
    assert profiled.device == "cpu"
    assert profiled.devices == jax.device_count()
    assert profiled.processes == 1
    rows = metrics.read(config.out / "timings.jsonl")
    of_rows = [sum(row.get("compiled", {}).values()) for row in rows]
    assert profiled.compiled == sum(of_rows[3:6]) >= 2


@pytest.mark.slow
def test_lengths_are_counted_by_row_and_segment():
    lengths = profiler._lengths([(np.asarray(SEGMENTS), np.asarray(RESPONSES))])
    assert lengths == LENGTHS
    mask = np.array([[0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0]], bool)
    sampled = np.array([[0, 0, 0, 1, 1, 0, 1, 0], [0, 0, 0, 0, 0, 0, 0, 0]], bool)
    of_turns = profiler._lengths([(mask, sampled)])
    assert of_turns == [profiler.Text(2, 3, 2), profiler.Text(5, 0)]
