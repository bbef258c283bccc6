"""`experiments/benchmark_logprobs.py` at toy size: the sides agree."""

import json
import sys

import benchmark_logprobs
import pytest

from rlhf_jax import cli

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]


def test_the_sides_agree(tmp_path):
    words = ["--out", str(tmp_path), "--rows=2", "--columns=9", "--width=16"]
    words += ["--words=40", "--rounds=1", "--repeats=1"]
    cli.main(
        benchmark_logprobs.main, benchmark_logprobs.Config, description="", argv=words
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    ours, plain = summary["sides"]
    assert ours["side"] == "rlhf_jax"
    assert ours["apart"] == 0.0
    assert plain["side"] != ours["side"]
    assert plain["apart"] < 1e-4
    assert min(ours["seconds"], plain["seconds"]) > 0
    assert min(ours["compiler_mib"], plain["compiler_mib"]) > 0
