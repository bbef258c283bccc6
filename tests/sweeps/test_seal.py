"""Additions to a sweep's folder after its results: figures and further runs."""

import pytest

from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import folder
from rlhf_jax.sweeps import results


def run(out, seed):
    place = out / "runs" / "cell" / f"seed_{seed}"
    place.mkdir(parents=True)
    (place / "summary.json").write_text("{}")


@pytest.fixture
def swept(tmp_path):
    run(tmp_path, 0)
    document = results.seal(tmp_path, {"question": "?"})
    folder.write_json(tmp_path / results.NAME, document)
    return tmp_path


def test_figures_are_sealed_with_the_rest(swept):
    (swept / "figures.json").write_text("{}")
    (swept / "results.json.tmp").write_text("")  # of a write that was killed
    (swept / "runs" / "cell" / "notes.txt").write_text("mine")
    added = ["figures.json", "runs/cell/notes.txt"]
    assert results.check(swept) == (2, [], [], [], added)
    results.seal_again(swept)
    assert results.check(swept) == (4, [], [], [], [])
    (swept / "figures.json").write_text("{ }")
    assert results.check(swept).faults == ["figures.json: 3 bytes, expected 2"]
    results.seal_again(swept)
    assert results.check(swept) == (4, [], [], [], [])
    (swept / "runs/cell/seed_0/summary.json").write_text("{ }")
    with pytest.raises(InputError, match=r"summary.json: 3 bytes, expected 2\ngive"):
        results.seal_again(swept)


def test_results_of_before_a_start_that_was_stopped_are_not_proven(swept):
    results.unseal(swept)
    run(swept, 1)
    checked = results.check(swept)
    assert checked.faults == []
    assert "after a start that was stopped" in checked.unproven[0]
    results.seal_again(swept)
    assert results.check(swept) == (3, [], [], [], [])


def test_a_folder_without_results_stays_without(tmp_path):
    results.unseal(tmp_path)
    results.seal_again(tmp_path)
    assert list(tmp_path.iterdir()) == []
