"""`experiments/benchmarks/plans.py`: a grid of plans that goes on where it was."""

import json
import sys

import pytest
from benchmarks import plans
from places import RECORDED

from rlhf_jax.functional import checks

# In the place of an interpreter: the recorded plan, or what a refusal prints.
FAKE = """\
#!{python}
import pathlib, sys
options = dict(zip(sys.argv[4::2], sys.argv[5::2]))
if options["--chip"] == "v5p":
    sys.exit("error: the mesh is refused\\n")
text = pathlib.Path({plan!r}).read_text()
pathlib.Path(options["--json"]).write_text(text)
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    plan = RECORDED / "plans" / "llama-3.1-8b-grpo-h100-8x8.json"
    script = tmp_path / "python"
    script.write_text(FAKE.format(python=sys.executable, plan=str(plan)))
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    return script


def test_rows_are_written_as_plans_are_made_and_not_made_twice(
    python, tmp_path, capsys
):
    record = tmp_path / "grid.jsonl"
    asked = ("8B 8k v5e", "8B 8k v5p", "8B 8k h100")
    for most in (1, 2, None):  # no GPU without its Python
        plans.main(plans.Config(record=record, cells=asked, most=most))
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["cell"]["chip"] for row in rows] == ["v5e", "v5p"]
    plans.main(plans.Config(record=record, cells=asked, gpu_python=python))
    assert len(record.read_text().splitlines()) == 3
    told = capsys.readouterr().out.splitlines()[-3:]
    # Figures of the recorded plan; the table of its README has them too.
    assert told[0] == (
        "| 8B, 8k, 64 v5e | 6.1 of 60.0 | 8.25 | 993 | 8.4% | 68% | 91% / 2% / 8% |"
    )
    assert told[1].startswith("| 8B, 8k, 64 v5p | no plan: error: the mesh is refused")
    assert told[2].startswith("| 8B, 8k, 64 h100 | 6.1 of 60.0 |")


def test_a_cell_is_a_share_of_chips_and_a_row_per_chip_at_a_time():
    for cell in plans.CELLS:
        options = dict(zip(cell.options()[::2], cell.options()[1::2], strict=True))
        tokens = int(options["--prompt-length"]) + int(options["--max-new-tokens"])
        assert tokens == plans.LENGTHS[cell.length]
        axes = dict(axis.split("=") for axis in options["--mesh"].split(","))
        fsdp, context = int(axes["fsdp"]), int(axes.get("context", 1))
        assert fsdp * context == cell.chips
        update = int(options["--batch-size"]) // int(options["--num-minibatches"])
        assert update == fsdp


def test_unknown_cells_and_folders_are_told(tmp_path):
    with pytest.raises(checks.InputError, match=r"a chip of .* got 8B 9k v5e"):
        plans.Config(record=tmp_path / "grid.jsonl", cells=("8B 9k v5e",))
    with pytest.raises(checks.InputError, match="--record: expected a file in"):
        plans.Config(record=tmp_path / "none" / "grid.jsonl")
