"""Which mesh a plan takes for sampling."""

import pytest

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import plan
from rlhf_jax.planning.plan_options import Options
from rlhf_jax.planning.sampler import meshes
from rlhf_jax.planning.sampler.meshes import Layout

TINY = {
    "vocab_size": 128,
    "hidden_size": 64,
    "num_layers": 2,
    "num_heads": 8,
    "prompt_length": 6,
    "max_new_tokens": 4,
    "batch_size": 16,
    "algorithm": "grpo",
    "chip": "v5e",
    "mesh": MeshShape(fsdp=8),
}


def test_every_mesh_that_divides_chips_rows_and_heads():
    found = meshes.candidates(chips=8, rows=16, num_heads=8)
    shares = [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert found == [None, *(MeshShape(data=d, tensor=t) for d, t in shares)]
    # 4 rows are too few for 8 chips apart; 6 heads cannot be cut in 4.
    found = meshes.candidates(chips=8, rows=4, num_heads=6)
    assert found == [None, MeshShape(data=4, tensor=2)]


def test_a_layout_is_named_as_the_option_takes_it():
    layout = Layout(MeshShape(data=4, tensor=2), 7, 0.5, 0.1, None)
    assert layout.name == "data=4,tensor=2"
    assert layout.described()["seconds"] == 0.5
    refused = Layout(None, 0, float("inf"), None, "no")
    assert refused.name == "--mesh"
    assert refused.described()["seconds"] is None  # JSON has no infinity


def test_the_fastest_that_fits_comes_first():
    def layout(tensor, total, seconds, refused=None):
        return Layout(MeshShape(tensor=tensor), total, seconds, 0.1, refused)

    large, slow, fast = layout(1, 9, 0.1), layout(2, 7, 0.4), layout(4, 8, 0.3)
    no = layout(8, 0, float("inf"), "no")
    found = meshes.best_first([no, large, slow, fast], memory=8)
    assert found == [fast, slow, large, no]
    assert meshes.best_first([slow, large], memory=9) == [large, slow]


def test_it_is_looked_for_or_given():
    with pytest.raises(InputError, match="expected --sampler-mesh or --find-sampler-m"):
        Options(**TINY, sampler_mesh=MeshShape(data=8), find_sampler_mesh=True)
    sft = TINY | {"algorithm": "sft"}
    with pytest.raises(InputError, match="--find-sampler-mesh: expected none with"):
        Options(**sft, find_sampler_mesh=True)


@pytest.mark.long
@pytest.mark.slow
def test_the_plan_is_that_of_the_fastest_mesh_that_fits():
    found = plan.plan(Options(**TINY, find_sampler_mesh=True))
    best, *others = found["sampler_meshes"]
    assert [one["mesh"] for one in (best, *others)].count("--mesh") == 1
    assert len(others) == 4
    assert all(best["seconds"] <= one["seconds"] for one in others)
    mesh = MeshShape(**found["sampler_mesh"])
    assert best["mesh"] in found["command"]
    given = plan.plan(Options(**TINY, sampler_mesh=mesh))
    assert given["seconds"] == found["seconds"]
    assert given["programs"] == found["programs"]
    rollout = given["shares"]["rollout"] * given["seconds"]
    assert best["seconds"] == pytest.approx(rollout, rel=1e-6)
    [sampling] = [row for row in given["alive"] if row["during"] == "sampling"]
    assert best["total"] == sampling["total"]
