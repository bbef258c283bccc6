"""Files and exit status of every command of certificates."""

import json
import time

import pytest
from certificates.conclusion import BEYOND_EVERY_WORLD, conclude

from rlhf_jax.functional.checks import StopError


def test_all_hold(tmp_path, capsys):
    shown = [("a", True), ("a", True)]  # names may stand twice
    conclude(
        tmp_path,
        shown,
        not_covered=("groups of three",),
        figures={"rows": [1]},
        started=time.perf_counter(),
    )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary.pop("proof")["files"] == {}
    assert summary.pop("seconds") >= 0
    assert summary.pop("not_covered") == ["groups of three", *BEYOND_EVERY_WORLD]
    assert summary == {"certificates": 2, "failed": [], "rows": [1]}
    printed = capsys.readouterr().out
    assert "2 of 2 certificates hold" in printed
    assert "They say nothing of:\n  - groups of three\n  - vocabularies" in printed


def test_one_that_fails_is_named_after_the_figures_are_written(tmp_path):
    shown = [("a", True), ("b", False)]
    with pytest.raises(StopError, match="1 of 2 certificates fail: b"):
        conclude(
            tmp_path, shown, not_covered=(), figures={}, started=time.perf_counter()
        )
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["failed"] == ["b"]
