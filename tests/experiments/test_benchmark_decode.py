"""`experiments/benchmarks/decode.py` at toy size: every figure is there."""

import json

import numpy as np
import pytest
from benchmarks import decode

from rlhf_jax.runs import command_line

pytestmark = pytest.mark.slow


@pytest.mark.long
def test_every_figure_is_there(tmp_path):
    words = ["--out", str(tmp_path), "--num-layers=1", "--hidden-size=16"]
    words += [
        "--num-heads=2",
        "--vocab-size=32",
        "--prompt-size=3",
        "--continuous-batching=4",
    ]
    words += ["--cache-pages", "6", "12", "--page-size=3"]
    words += ["--batches=2", "--response-size=8", "--repeats=1"]
    words += ["--rows", "2", "4", "--response-sizes", "4", "8", "--length-rows", "2"]
    command_line.main(decode.main, decode.Config, description="", argv=words)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert 1 <= summary["uneven"]["mean_length"] <= 8
    assert summary["uneven"]["ratio"] > 0
    names = ["batches", "continuous", "6 pages", "12 pages"]
    assert list(summary["uneven"]["tokens_per_second"]) == names
    memory = summary["uneven"]["temporary_mib"]
    assert list(memory) == names
    assert memory["6 pages"] < memory["12 pages"]
    assert [row["rows"] for row in summary["rows"]] == [2, 4]
    assert [row["tokens"] for row in summary["lengths"]] == [4, 8]
    assert summary["lengths"][0]["growth"] == 1.0


@pytest.mark.parametrize(
    ("places", "good"),
    [
        ([], True),
        ([(3, 2, 1), (3, 3, 7)], True),  # one draw to the next word, and what follows
        ([(3, 2, -1), (5, 0, 1)], True),
        ([(3, 2, 2)], False),
        ([(3, 2, 1), (5, 0, 1), (6, 1, 1)], False),  # of 100 more than two
    ],
)
def test_responses_may_part_by_rounding_alone(places, good):
    expected = np.random.default_rng(0).integers(10, 20, (100, 4))
    actual = expected.copy()
    for row, column, stride in places:
        actual[row, column] += stride
    if good:
        decode.check_same(actual, expected)
    else:
        with pytest.raises(RuntimeError, match=f"got {len(places)} of 100 that part"):
            decode.check_same(actual, expected)
