"""`benchmarks.verifier` at toy size: every program passes on both sides."""

import json

import pytest
from benchmarks import verifier

from rlhf_jax.functional.checks import InputError
from rlhf_jax.verification.code import trial


@pytest.mark.slow
def test_every_program_is_right():
    for name in verifier.VALUES:
        for way in verifier.WAYS:
            code, tests = verifier.program(name, way, 40)
            assert trial.run_tests(code, tests, unsafe=True).why == ""
            wrong = (
                code.replace("return", "return 0,") if "return" in code else "f = id"
            )
            assert not trial.run_tests(wrong, tests, unsafe=True).right


@pytest.mark.slow
def test_both_sides_are_measured_in_turns(tmp_path, capsys, monkeypatch):
    def here(place):
        place.mkdir()
        return verifier.ROOT

    monkeypatch.setattr(verifier, "package_before", here)  # of which a copy may lack it
    options = {"number": 40, "rounds": 2, "values": ("lists",)}
    verifier.main(verifier.Config(out=tmp_path, most=99.0, **options))
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    assert [(row["value"], row["way"]) for row in rows] == [
        ("lists", way) for way in verifier.WAYS
    ]
    for row in rows:
        assert row["now"] > 0
        assert row["ratio"] == pytest.approx(row["now"] / row["before"])
    assert "ratios " in capsys.readouterr().out
    (tmp_path / "before").rmdir()
    with pytest.raises(SystemExit, match=r"at most 0\.001; lists, result; lists, arg"):
        verifier.main(verifier.Config(out=tmp_path, most=0.001, **options))


def test_values_that_there_are_not_are_refused(tmp_path):
    with pytest.raises(InputError, match="--values: expected some of lists, tuples"):
        verifier.Config(out=tmp_path, values=("none",))


def test_a_clone_without_the_commit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(verifier, "BEFORE", "0" * 40)
    with pytest.raises(InputError, match="expected a clone with commit 000000000000"):
        verifier.package_before(tmp_path)
