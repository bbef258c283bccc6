"""`benchmarks.load` at toy size: every case runs within its bounds."""

import json

import places
import pytest
from benchmarks import load

from rlhf_jax.functional.checks import InputError


@pytest.mark.slow
def test_every_case_is_measured_and_a_broken_bound_ends_with_1(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", places.PYTHONPATH)
    load.main(load.Config(out=tmp_path, share=0.002))
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [row["case"] for row in rows] == [*load.CASES]
    for row in rows:
        assert row["seconds"] > 0
        assert row["mb"] > 50
        assert not row["broken"]
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]
    assert "1,000,000 rows, verify" in capsys.readouterr().out
    name = "200,000 prompts"
    monkeypatch.setitem(load.CASES, name, load.CASES[name]._replace(mb=1.0))
    with pytest.raises(SystemExit, match=r"200,000 prompts: .* mb, expected at most 1"):
        load.main(load.Config(out=tmp_path, share=0.002, cases=(name,)))


def test_a_case_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(InputError, match="--cases: expected some of 200,000 prompts;"):
        load.Config(out=tmp_path, cases=("none",))
