"""`experiments/benchmarks/plans.py`: a grid of plans resumes where it stopped."""

import json
import sys

import pytest
from benchmarks import plans
from places import RECORDED

from rlhf_jax.functional import checks
from rlhf_jax.models.families import registry
from rlhf_jax.train.plan import command

# In the place of an interpreter: the recorded plan, or what a refusal prints.
FAKE = """\
#!{python}
import pathlib, sys
options = dict(zip(sys.argv[5::2], sys.argv[6::2]))
pathlib.Path({log!r}).open("a").write(options["--chip"] + " ")
if options["--chip"] == "v5p":
    sys.exit("error: the mesh is refused\\n")
text = pathlib.Path({plan!r}).read_text()
pathlib.Path(options["--json"]).write_text(text)
"""


@pytest.fixture
def python(tmp_path, monkeypatch):
    plan = RECORDED / "plans" / "llama-3.1-8b-grpo-h100-8x8.json"
    script = tmp_path / "python"
    log = tmp_path / "compiled"
    script.write_text(FAKE.format(python=sys.executable, plan=str(plan), log=str(log)))
    script.chmod(0o755)
    monkeypatch.setattr("sys.executable", str(script))
    return script


def test_rows_are_written_as_plans_are_made_and_not_made_twice(
    python, tmp_path, capsys
):
    record = tmp_path / "grid.jsonl"
    cells = ("8B 8k v5p", "8B 8k v5e", "8B 8k h100", "8B 8k h200")
    for most in (1, 2, None):  # no GPU without its Python
        plans.main(plans.Config(record=record, cells=cells, most=most))
    rows = [json.loads(line) for line in record.read_text().splitlines()]
    assert [row["cell"]["chip"] for row in rows] == ["v5p", "v5e"]
    plans.main(plans.Config(record=record, cells=cells, gpu_python=python))
    assert (tmp_path / "compiled").read_text() == "v5p v5e h100 "  # not h200
    assert len(record.read_text().splitlines()) == 4
    lines = capsys.readouterr().out.splitlines()[-4:]
    layout = "256 | fsdp=64 / data=8,tensor=8"
    # Figures of the recorded plan; the table of its README has them too.
    assert lines[0] == (
        f"| 8B, 8k, 64 v5e | {layout} | 6.1 of 60.0 | 9.63 | 851 | 7.2% | 78% "
        f"| 93% / 1% / 6% |"
    )
    assert lines[1].startswith(
        f"| 8B, 8k, 64 v5p | {layout} | no plan: error: the mesh is refused"
    )
    assert lines[2].startswith(f"| 8B, 8k, 64 h100 | {layout} | 6.1 of 60.0 | 9.63 |")
    # 5.695 s of memory in the rollout become 3.975, beside 3.217 s of latency.
    assert lines[3].startswith(f"| 8B, 8k, 64 h200 | {layout} | 6.1 of 98.5 | 7.91 |")


@pytest.mark.cases(quick=12)
@pytest.mark.parametrize("cell", plans.CELLS, ids=lambda cell: cell.name)
def test_a_cell_has_rows_for_both_of_its_meshes(cell):
    config, options = command.parse(cell.command()[1:])
    tokens = options.prompt_length + config.batch.max_new_tokens
    assert tokens == plans.LENGTHS[cell.length]
    mesh, sampling = config.placement.policy, config.placement.sampler.mesh
    assert mesh.size == sampling.size == cell.chips
    rows, minibatches = config.batch.batch_size, config.method.num_minibatches
    assert rows == mesh.fsdp * minibatches
    assert rows % sampling.data == 0
    heads = registry.KNOWN[config.start.model].num_heads
    assert heads % sampling.tensor == 0


def test_unknown_cells_and_folders_are_told(tmp_path):
    with pytest.raises(checks.InputError, match=r"a chip of .* got 8B 9k v5e"):
        plans.Config(record=tmp_path / "grid.jsonl", cells=("8B 9k v5e",))
    with pytest.raises(checks.InputError, match="--record: expected a file in"):
        plans.Config(record=tmp_path / "none" / "grid.jsonl")
