"""Rows reach the disk one step late, as strict JSON, equal after crash and resume."""

import json
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.runs import loggers, metrics


class Memory:
    """A sink that records its rows."""

    def __init__(self):
        self.calls = []

    def begin(self, stage, step):
        self.calls.append(("begin", stage, step))

    def write(self, stage, step, row, active=()):
        self.calls.append((stage, step, row, *active))

    def close(self):
        self.calls.append("closed")


def stats(value: float, weight: float | None = 1.0) -> metrics.Stats:
    return {"x": (jnp.float32(value), None if weight is None else jnp.float32(weight))}


def lines(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def run(folder: Path, *, stage: str, start: int, stop: int) -> None:
    """Runs steps whose rows are functions of the step, with one sample each."""
    with metrics.Recorder(folder) as record:
        record.begin(stage, step=start)
        for step in range(start, stop):
            sums, counts = jnp.array([step, 2.0, 0.0]), jnp.array([3.0, 1.0, 0.0])
            record.write(step, stats(step / 3), positions={"k1": (sums, counts)})
            record.write_samples(step, [{"text": f"{stage} {step} é\u2028\n"}])


def test_a_row_is_sum_over_weight(tmp_path):
    with metrics.Recorder(tmp_path) as record:
        record.begin("ppo")
        record.write(0, {"loss": (jnp.float32(3), jnp.float32(4))})
        record.write(1, {"ratio_max": (jnp.float32(1.5), None)})
    assert lines(tmp_path, "metrics") == [
        '{"stage": "ppo", "step": 0, "loss": 0.75}',
        '{"stage": "ppo", "step": 1, "ratio_max": 1.5}',
    ]


def test_positions_are_means_a_place(tmp_path):
    run(tmp_path, stage="ppo", start=1, stop=3)
    with metrics.Recorder(tmp_path) as record:
        record.begin("ppo", step=3)
        record.write(3, stats(1))
        weights = jnp.array([1.0, 0.0])
        vectors = {"k1": (jnp.array([jnp.nan, 1.0]), weights), "n": (weights, weights)}
        record.write(4, stats(1), positions=vectors)
    assert lines(tmp_path, "positions") == [
        '{"stage": "ppo", "step": 1, "k1": [0.3333333333333333, 2.0, null]}',
        '{"stage": "ppo", "step": 2, "k1": [0.6666666666666666, 2.0, null]}',
        '{"stage": "ppo", "step": 4, "k1": ["NaN", null], "n": [1.0, null]}',
    ]
    assert len(lines(tmp_path, "metrics")) == 4


def large(rows):
    """Two alarms: on the latest x and on the mean of all."""
    values = [float(row["x"]) for row in rows]
    alarms_of = {"high": f"x is {values[-1]}"} if values[-1] > 2 else {}
    mean = sum(values) / len(values)
    return alarms_of | ({"mean": f"mean is {mean}"} if mean > 1.5 else {})


def test_a_row_names_the_alarms_that_are_active_at_it(tmp_path):
    memory = Memory()
    with metrics.Recorder(tmp_path, sinks=[memory], check=large) as record:
        record.begin("sft")
        record.write(0, stats(1))
        record.begin("ppo")  # whose rows are another history
        for step, value in enumerate([1, 3, 4, 0]):
            record.write(step, stats(value))
        assert not record.alarms["sft"]
    assert lines(tmp_path, "metrics")[1:] == [
        '{"stage": "ppo", "step": 0, "x": 1.0}',
        '{"stage": "ppo", "step": 1, "x": 3.0, "alarms": ["high", "mean"]}',
        '{"stage": "ppo", "step": 2, "x": 4.0, "alarms": ["high", "mean"]}',
        '{"stage": "ppo", "step": 3, "x": 0.0, "alarms": ["mean"]}',
    ]
    high, mean = ("high", 1, "x is 3.0"), ("mean", 1, "mean is 2.0")
    assert record.alarms == {"sft": [], "ppo": [high, mean]}
    assert memory.calls[-4:] == [
        ("ppo", 1, {"x": 3.0}, high, mean),
        ("ppo", 2, {"x": 4.0}, high, mean),
        ("ppo", 3, {"x": 0.0}, mean),
        "closed",
    ]


@pytest.mark.parametrize("died_after", [2, 3, 5, 6])
def test_a_resumed_run_raises_the_same_alarms(tmp_path, died_after):
    values = [1.0, 0.5, 3.0, jnp.nan, 1 / 3, 7.0, 0.1, 5.0]

    def play(folder, *, start, stop):
        folder.mkdir(exist_ok=True)
        with metrics.Recorder(folder, check=large) as record:
            record.begin("sft")
            record.begin("ppo", step=start)
            for step in range(start, stop):
                record.write(step, stats(values[step]))
        return record.alarms

    whole, parts = tmp_path / "whole", tmp_path / "parts"
    expected = play(whole, start=0, stop=8)
    assert [alarm.step for alarm in expected["ppo"]] == [2, 5, 7]
    play(parts, start=0, stop=died_after)
    assert play(parts, start=2, stop=8) == expected
    assert play(parts, start=8, stop=8) == expected  # nothing is left to do
    names = [folder / "metrics.jsonl" for folder in (whole, parts)]
    assert names[0].read_bytes() == names[1].read_bytes()


@pytest.mark.parametrize("name", ["stage", "step"])
def test_a_row_cannot_move_itself_to_another_place(tmp_path, name):
    with metrics.Recorder(tmp_path) as record:
        record.begin("ppo")
        with pytest.raises(ValueError, match=rf"without stage and step.*, got {name};"):
            record.write_samples(0, [{name: 7}])
    assert lines(tmp_path, "samples") == []


@pytest.mark.parametrize(
    ("value", "weight", "text"),
    [
        (0.0, 0.0, "null"),
        (jnp.nan, 1.0, '"NaN"'),
        (jnp.inf, 2.0, '"Infinity"'),
        (-jnp.inf, None, '"-Infinity"'),
    ],
)
def test_what_json_has_no_number_for(tmp_path, value, weight, text):
    with metrics.Recorder(tmp_path) as record:
        record.begin("ppo")
        record.write(0, stats(value, weight))
    assert lines(tmp_path, "metrics") == [
        '{"stage": "ppo", "step": 0, "x": ' + text + "}"
    ]


def test_rows_are_read_one_step_late(tmp_path):
    memory = Memory()
    with metrics.Recorder(tmp_path, sinks=[memory]) as record:
        record.begin("sft", step=4)
        record.write(4, stats(1))
        assert lines(tmp_path, "metrics") == []
        record.write(5, stats(2))
        assert len(lines(tmp_path, "metrics")) == 1
        record.flush()
        assert len(lines(tmp_path, "metrics")) == 2
        record.write(6, stats(3))
    assert memory.calls == [
        ("begin", "sft", 4),
        ("sft", 4, {"x": 1.0}),
        ("sft", 5, {"x": 2.0}),
        ("sft", 6, {"x": 3.0}),
        "closed",
    ]
    assert len(lines(tmp_path, "metrics")) == 3


def test_the_last_row_of_a_stage_belongs_to_it(tmp_path):
    with metrics.Recorder(tmp_path) as record:
        record.begin("sft")
        record.write(0, stats(1))
        record.begin("ppo")
        record.write(0, stats(2))
    rows = metrics.read(tmp_path / "metrics.jsonl")
    assert [(row["stage"], row["x"]) for row in rows] == [("sft", 1.0), ("ppo", 2.0)]


def test_timings_hold_the_step_and_its_phases(tmp_path):
    with metrics.Recorder(tmp_path) as record:
        record.begin("ppo")
        with record.phase("sample"):
            pass
        with record.phase("sample"):
            sum(range(10**5))
        record.write(0, stats(1))
        record.write(1, stats(1))
    first, second = metrics.read(tmp_path / "timings.jsonl")
    assert 0 < first["phases"]["sample"] < first["seconds"]
    assert second["phases"] == {}


@pytest.mark.parametrize("died_after", [3, 4, 6])
def test_resumed_files_equal_those_of_a_run_that_never_stopped(tmp_path, died_after):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    whole.mkdir()
    parts.mkdir()
    for folder in (whole, parts):
        run(folder, stage="sft", start=0, stop=5)
    run(whole, stage="ppo", start=0, stop=9)
    run(parts, stage="ppo", start=0, stop=died_after)
    # The snapshot of step 3 is the newest; the complete stage begins at its end.
    run(parts, stage="sft", start=5, stop=5)
    run(parts, stage="ppo", start=3, stop=9)
    for name in ("metrics", "samples", "positions"):
        files = [folder / f"{name}.jsonl" for folder in (whole, parts)]
        assert files[0].read_bytes() == files[1].read_bytes()
    timed = [(r["stage"], r["step"]) for r in metrics.read(parts / "timings.jsonl")]
    assert timed == [("sft", s) for s in range(5)] + [("ppo", s) for s in range(9)]


def test_a_last_line_that_was_cut_off_is_dropped(tmp_path):
    run(tmp_path, stage="ppo", start=0, stop=3)
    path = tmp_path / "metrics.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert len(metrics.read(path)) == 2
    run(tmp_path, stage="ppo", start=2, stop=3)
    assert path.read_bytes() == whole


@pytest.mark.parametrize("line", ["{]", "3", '{"stage": "ppo"}', ""])
def test_a_line_that_is_not_a_row_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"stage": "ppo", "step": 0}\n' + line + "\n")
    before = path.read_bytes()
    with (
        metrics.Recorder(tmp_path) as record,
        pytest.raises(InputError, match=r"metrics\.jsonl:2: expected an object"),
    ):
        record.begin("ppo", step=1)
    assert path.read_bytes() == before


def test_an_error_keeps_the_last_row_and_ctrl_c_does_not_wait_for_it(tmp_path):
    def fail(error):
        with metrics.Recorder(tmp_path) as record:
            record.begin("ppo")
            record.write(0, stats(1))
            raise error

    with pytest.raises(RuntimeError):
        fail(RuntimeError())
    assert len(lines(tmp_path, "metrics")) == 1
    with pytest.raises(KeyboardInterrupt):
        fail(KeyboardInterrupt())
    assert lines(tmp_path, "metrics") == []


@pytest.mark.slow
def test_writing_does_not_wait_for_the_device(tmp_path):
    @jax.jit
    def slow(x):
        return jax.lax.fori_loop(0, 100, lambda i, x: jnp.tanh(x @ x), x)[0, 0]

    x = jnp.full((500, 500), 0.1)
    slow(x).block_until_ready()
    with metrics.Recorder(tmp_path) as record:
        record.begin("ppo")
        value = slow(x)
        record.write(0, {"x": (value, jnp.float32(1))})
        assert not value.is_ready()
    assert metrics.read(tmp_path / "metrics.jsonl")[0]["x"] == float(value)


def test_tensorboard_gets_what_was_measured(tmp_path, monkeypatch):
    written = []

    class SummaryWriter:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, *scalar):
            written.append(scalar)

        def add_text(self, *text):
            written.append(text)

        def close(self):
            written.append("closed")

    module = types.ModuleType("tensorboardX")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    sinks = [loggers.TensorBoard(tmp_path)]
    with metrics.Recorder(tmp_path, sinks=sinks, check=large) as record:
        record.begin("ppo")
        record.write(2, stats(1.25) | {"none": (jnp.float32(0), jnp.float32(0))})
        record.write(3, stats(2.5))
        record.write(4, stats(2.5))
    assert written == [
        str(tmp_path / "tensorboard"),
        ("ppo/x", 1.25, 2),
        ("ppo/x", 2.5, 3),
        ("ppo/alarms/high", "x is 2.5", 3),
        ("ppo/alarms/mean", "mean is 1.875", 3),
        ("ppo/x", 2.5, 4),
        "closed",
    ]


def test_wandb_goes_on_with_its_run(tmp_path, monkeypatch):
    options_of_runs, logged = [], []

    class Run:
        def define_metric(self, *names, **options):
            logged.append((*names, options))

        def log(self, row):
            logged.append(row)

        def alert(self, *, title, text):
            logged.append((title, text))

        def finish(self):
            logged.append("finished")

    def init(**options):
        options_of_runs.append(options)
        return Run()

    module = types.ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    for _ in range(2):
        sink = loggers.Wandb(tmp_path, config={"seed": 1})
        with metrics.Recorder(tmp_path, sinks=[sink], check=large) as record:
            record.begin("ppo", step=2)
            record.write(2, stats(2.5))
    assert options_of_runs[0] == options_of_runs[1]
    assert options_of_runs[0]["config"] == {"seed": 1}
    assert options_of_runs[0]["id"]
    assert logged[:5] == [
        ("ppo/*", {"step_metric": "ppo/step"}),
        {"ppo/step": 2, "ppo/x": 2.5},
        ("ppo step 2: high", "x is 2.5"),
        ("ppo step 2: mean", "mean is 2.5"),
        "finished",
    ]


def test_an_alarm_stops_the_run_once_its_row_is_written(tmp_path):
    with metrics.Recorder(tmp_path, check=large, stops="high".__eq__) as record:
        record.begin("ppo")
        for step, value in enumerate([1, 3]):
            record.write(step, stats(value))
        message = r"step 1, high: x is 3\.0 \(--alarms\.stop\)"
        with pytest.raises(StopError, match=message):
            record.write(2, stats(1))
    assert lines(tmp_path, "metrics") == [
        '{"stage": "ppo", "step": 0, "x": 1.0}',
        '{"stage": "ppo", "step": 1, "x": 3.0, "alarms": ["high", "mean"]}',
    ]
    with metrics.Recorder(tmp_path, check=large, stops="other".__eq__) as record:
        record.begin("ppo", step=1)
        record.write(1, stats(3))
    assert len(lines(tmp_path, "metrics")) == 2


def test_waits_of_any_sampler_are_read_again(tmp_path):
    """A queue has waits of trainer and sampler; outside samplers name their own."""
    path = tmp_path / "timings.jsonl"
    rows = [
        {"stage": "grpo", "step": 0, "seconds": 1.0, "waits": {"hand_over": 0.1}},
        {"stage": "grpo", "step": 1, "seconds": 1.0, "waits": {"trainer": 0.5}},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert metrics.read(path) == rows


def test_the_first_row_is_that_of_step_0_or_none():
    rows = [{"stage": "ppo", "step": step} for step in (0, 1)]
    assert metrics.first(rows) == rows[0]
    assert metrics.first(rows[1:]) == metrics.first([]) == {}
