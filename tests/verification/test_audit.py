"""`rlhf-jax audit-verifier` on small data, with few of the cheats."""

import json

import pytest

from rlhf_jax.train import main
from rlhf_jax.verification.audit import audit
from rlhf_jax.verification.code import trial
from rlhf_jax.verification.isolation import processes

ROW = {
    "tests": ["assert add(2, 3) == 5", "assert add(0, 0) == 0"],
    "solution": "def add(a, b):\n    return a + b",
}
FEW = """
[shared]
add = ["assert add(2, 3) == 5"]

[[program]]
name = "wrong"
code = "add = lambda a, b: 4"
tests = "add"

[[program]]
name = "true"
code = "def answer(*a): return True"
"""


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command on rows; (status, standard output, standard error)."""
    (tmp_path / "few.toml").write_text(FEW)
    monkeypatch.setattr(audit, "CHEATS", tmp_path / "few.toml")

    def on(*rows, options=()):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        status = 0
        try:
            main.main(["audit-verifier", str(file), "--unsafe-verifier", *options])
        except SystemExit as error:
            status = error.code
        return (status, *capsys.readouterr())

    return on


def test_solutions_earn_one_and_cheats_nothing(run):
    status, out, _ = run(ROW, ROW)
    assert status == 0
    cells = [line.split("│")[2:-1] for line in out.splitlines() if "│" in line]
    # Two solutions; one cheat with tests of its own, and one on two rows.
    assert [[int(cell) for cell in row] for row in cells] == [
        [2, 2, 0, 0, 0],
        [3, 0, 0, 0, 0],
    ]
    assert out.endswith("every solution earns 1, and no cheat does\n")
    assert "│      2 │" in run(ROW, ROW, options=("--num-rows", "1"))[1]


def test_what_is_not_as_it_should_be_is_named(run):
    weak = ROW | {"tests": "assert add(1, 2)"}
    wrong = ROW | {"solution": "def add(a, b):\n    return a - b"}
    status, _, error = run(ROW, wrong, weak)
    assert status == 1
    assert "got 1 solutions that do not and 1 cheats that do" in error
    assert "solution of rows.jsonl:2: AssertionError" in error
    assert "cheat of rows.jsonl:3: true" in error


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (
            {"tests": "assert 1"},
            "rows.jsonl:1: expected a text in 'solution', got None",
        ),
        (
            {"solution": "x = 1"},
            "rows.jsonl:1: expected a field 'tests', got 'solution'",
        ),
    ],
)
def test_rows_without_tests_or_solutions_are_refused(run, row, words):
    status, _, error = run(row)
    assert status == 2
    assert words in error


@pytest.mark.parametrize("option", ["--num-workers=0", "--num-rows=-1"])
def test_a_number_of_none_is_refused(run, option):
    status, _, error = run(ROW, options=(option,))
    assert status == 2
    name, _, number = option.partition("=")
    assert f"{name}: expected" in error
    assert f"got {number}" in error


def test_without_isolation_it_says_how_to_go_on(tmp_path, monkeypatch, capsys):
    (tmp_path / "rows.jsonl").write_text(json.dumps(ROW))
    none = processes.Isolation("none", "no program bwrap")
    monkeypatch.setattr(trial, "isolation", lambda: none)
    with pytest.raises(SystemExit) as ended:
        main.main(["audit-verifier", str(tmp_path / "rows.jsonl")])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error.startswith("error: expected a system that can isolate generated code")
    assert "no program bwrap" in error
    assert "--unsafe-verifier" in error
