"""The list of broken formulas: each replaces an existing line and fails its test."""

import subprocess
import sys

import formula_mutants
import pytest
import test_update_formulas
from places import ROOT

FORMULAS = formula_mutants.formulas()
SHARES = 16  # of the list; a run of the slow tier takes one, by the commit


def test_each_breaks_one_place_that_is_there():
    for formula in FORMULAS:
        source = (ROOT / "rlhf_jax" / formula.file).read_text()
        assert source.count(formula.old) == 1, formula.name
        assert formula.new != formula.old, formula.name
        file, _, name = formula.test.partition("::")
        assert (ROOT / file).exists(), formula.name
        start, _, case = name.partition("[")
        cases = [
            known for known in test_update_formulas.CASES if known.startswith(case)
        ]
        assert not case or len(cases) == 1, formula.name
        if name:
            assert f"def {start}" in (ROOT / file).read_text(), formula.name


@pytest.mark.slow
def test_a_share_of_them_dies(tmp_path):
    commit = subprocess.run(
        ("git", "rev-parse", "HEAD"), cwd=ROOT, capture_output=True, text=True
    )
    # By the last digit: the first ones choose the sixth of the tier that CI runs.
    share = int(commit.stdout or "0", 16) % SHARES
    done = subprocess.run(
        [
            sys.executable,
            formula_mutants.__file__,
            f"--share={share}/{SHARES}",
            "--jobs=1",
            f"--work={tmp_path}",
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count(": dies by tests/") == len(FORMULAS[share::SHARES])
