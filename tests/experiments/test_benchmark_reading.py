"""`experiments/benchmarks/reading.py` at toy size: every stage runs and is reported."""

import json

import pytest
from benchmarks import reading

from rlhf_jax.functional.checks import InputError


@pytest.mark.slow
def test_every_stage_has_its_seconds_and_ratio(tmp_path, capsys):
    options = reading.Config(out=tmp_path, sizes=(20, 60), chat_sizes=(4, 8))
    reading.main(options)
    printed = capsys.readouterr().out
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    stages = [row["stage"] for row in rows]
    assert len(set(stages)) == len(stages)
    assert {"encode and pair labelled", "pack", "encode preferences, chat"} < {*stages}
    for row in rows:
        assert len(row["seconds"]) == 2
        assert row["sizes"] == ([4, 8] if "chat" in row["stage"] else [20, 60])
        small, large = (
            seconds / size
            for seconds, size in zip(row["seconds"], row["sizes"], strict=True)
        )
        assert row["ratio_per_row"] == pytest.approx(large / small)
    assert "encode demonstrations" in printed
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.parametrize("sizes", [(20,), (60, 20), (20, 20)])
def test_sizes_that_cannot_be_compared_are_refused(tmp_path, sizes):
    with pytest.raises(InputError, match="at least 2 sizes, ascending"):
        reading.Config(out=tmp_path, sizes=sizes)
