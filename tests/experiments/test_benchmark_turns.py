"""`experiments/benchmarks/turns` at toy size: both loops draw the same episodes."""

import json

import numpy as np
import pytest
from benchmarks.turns import throughput

from rlhf_jax.runs import command_line

pytestmark = pytest.mark.slow


def test_every_figure_is_there(tmp_path):
    words = ["--out", str(tmp_path), "--num-layers=1", "--hidden-size=16"]
    words += ["--num-heads=2", "--vocab-size=32", "--rows=4", "--prompt-size=3"]
    words += ["--num-turns=3", "--turn-size=8", "--observation-size=5", "--chunk=4"]
    words += ["--latencies", "0", "0.2", "--repeats=1"]
    command_line.main(throughput.main, throughput.Config, description="", argv=words)
    rows = json.loads((tmp_path / "summary.json").read_text())["turns"]
    assert [(row["latency"], row["loop"]) for row in rows] == [
        (latency, loop) for latency in (0.0, 0.2) for loop in ("episodes", "whole")
    ]
    for episodes, whole in (rows[:2], rows[2:]):
        assert 1 < episodes["run_per_sampled"] < whole["run_per_sampled"]
    assert rows[3]["waiting_share"] > rows[1]["waiting_share"]


def test_other_episodes_are_refused():
    expected = np.zeros((40, 3), np.int32)
    actual = expected.copy()
    actual[:1] = 1
    throughput.check_same(actual, expected)
    actual[:3] = 1
    with pytest.raises(RuntimeError, match="got 3 of 40 that differ"):
        throughput.check_same(actual, expected)
