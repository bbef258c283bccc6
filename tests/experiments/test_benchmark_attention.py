"""The attention benchmark at toy size: engines agree, and ratios share a baseline."""

import pytest
from benchmarks import attention


@pytest.mark.slow
def test_engines_agree_on_packed_rows(tmp_path):
    options = attention.Config(
        out=tmp_path / "run", columns=(64,), heads=4, kv_heads=2, head_dim=8, texts=3
    )
    *_, segments = attention.inputs(options, columns=64)
    assert [int((segments == text).sum()) for text in (1, 2, 3)] == [22, 21, 21]
    first, second = attention.measure(options, columns=64)
    assert (first["engine"], second["engine"]) == ("xla", "blockwise")
    assert first["ratio"] == first["memory_ratio"] == 1
    assert first["apart"] == 0
    assert 0 < second["apart"] < 1e-4
    assert second["temporary_mib"] > 0
