"""Rows reach the disk one step late, strict, and equal after any crash and resume."""

import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runtime import metrics


class Memory:
    """A sink that remembers."""

    def __init__(self):
        self.calls = []

    def begin(self, stage, step):
        self.calls.append(("begin", stage, step))

    def write(self, stage, step, row):
        self.calls.append((stage, step, row))

    def close(self):
        self.calls.append("closed")


def stats(value: float, weight: float | None = 1.0) -> metrics.Stats:
    return {"x": (jnp.float32(value), None if weight is None else jnp.float32(weight))}


def lines(folder: Path, name: str) -> list[str]:
    return (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()


def run(folder: Path, *, stage: str, start: int, stop: int) -> None:
    """Steps whose rows are functions of the step, one sample each."""
    with metrics.Recorder(folder) as record:
        record.begin(stage, step=start)
        for step in range(start, stop):
            record.write(step, stats(step / 3))
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
    for name in ("metrics", "samples"):
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
        pytest.raises(InputError, match=r"metrics\.jsonl, line 2: expected an object"),
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

        def close(self):
            written.append("closed")

    module = types.ModuleType("tensorboardX")
    module.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "tensorboardX", module)
    with metrics.Recorder(tmp_path, sinks=[metrics.TensorBoard(tmp_path)]) as record:
        record.begin("ppo")
        record.write(2, stats(1.5) | {"none": (jnp.float32(0), jnp.float32(0))})
    assert written == [str(tmp_path / "tensorboard"), ("ppo/x", 1.5, 2), "closed"]


def test_wandb_goes_on_with_its_run(tmp_path, monkeypatch):
    asked, logged = [], []

    class Run:
        def define_metric(self, *names, **options):
            logged.append((*names, options))

        def log(self, row):
            logged.append(row)

        def finish(self):
            logged.append("finished")

    def init(**options):
        asked.append(options)
        return Run()

    module = types.ModuleType("wandb")
    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    for _ in range(2):
        sink = metrics.Wandb(tmp_path, config={"seed": 1})
        with metrics.Recorder(tmp_path, sinks=[sink]) as record:
            record.begin("ppo")
            record.write(2, stats(1.5))
    assert asked[0] == asked[1]
    assert asked[0]["config"] == {"seed": 1}
    assert asked[0]["id"]
    assert logged[:3] == [
        ("ppo/*", {"step_metric": "ppo/step"}),
        {"ppo/step": 2, "ppo/x": 1.5},
        "finished",
    ]
