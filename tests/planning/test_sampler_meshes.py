"""The mesh that a plan chooses for sampling."""

import planned
import pytest

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train.plan import plan, sampler_meshes
from rlhf_jax.train.plan.sampler_meshes import Layout

MESH = "--placement.policy=fsdp=8"


def test_every_mesh_that_divides_chips_rows_and_heads():
    meshes = sampler_meshes.candidates(chips=8, rows=16, num_heads=8)
    shares = [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert meshes == [None, *(MeshShape(data=d, tensor=t) for d, t in shares)]
    # 4 rows are too few for 8 chips apart; 6 heads cannot be cut in 4.
    slices = sampler_meshes.candidates(chips=8, rows=4, num_heads=6, slices=2)
    assert slices == [None, MeshShape(dcn=2, data=2, tensor=2)]
    meshes = sampler_meshes.candidates(chips=8, rows=4, num_heads=6)
    assert meshes == [None, MeshShape(data=4, tensor=2)]


def test_a_layout_is_named_as_the_option_takes_it():
    layout = Layout(MeshShape(data=4, tensor=2), 7, 0.5, 0.1, None)
    assert layout.name == "data=4,tensor=2"
    assert layout.described()["seconds"] == 0.5
    refused = Layout(None, 0, float("inf"), None, "no")
    assert refused.name == "policy"
    assert refused.described()["seconds"] is None  # JSON has no infinity


def test_the_fastest_that_fits_comes_first():
    def layout(tensor, total, seconds, refused=None):
        return Layout(MeshShape(tensor=tensor), total, seconds, 0.1, refused)

    large, slow, fast = layout(1, 9, 0.1), layout(2, 7, 0.4), layout(4, 8, 0.3)
    no = layout(8, 0, float("inf"), "no")
    in_order = sampler_meshes.best_first([no, large, slow, fast], memory=8)
    assert in_order == [fast, slow, large, no]
    assert sampler_meshes.best_first([slow, large], memory=9) == [large, slow]


def test_a_command_that_does_not_sample_has_no_layouts():
    config, _ = planned.parsed("sft")
    with pytest.raises(InputError, match="--find-sampler-mesh: expected a command"):
        sampler_meshes.sampled_on(config, None)


@pytest.mark.long
@pytest.mark.slow
def test_the_plan_is_that_of_the_fastest_mesh_that_fits():
    result = plan.plan(*planned.parsed("grpo", MESH, "--find-sampler-mesh"))
    best, *others = result["sampler_meshes"]
    assert [one["mesh"] for one in (best, *others)].count("policy") == 1
    assert len(others) == 4
    assert all(best["seconds"] <= one["seconds"] for one in others)
    mesh = MeshShape(**result["sampler_mesh"])
    result_of_mesh = plan.plan(
        *planned.parsed("grpo", MESH, f"--placement.sampler={mesh}")
    )
    assert result_of_mesh["seconds"] == result["seconds"]
    assert result_of_mesh["programs"] == result["programs"]
    rollout = result_of_mesh["shares"]["rollout"] * result_of_mesh["seconds"]
    assert best["seconds"] == pytest.approx(rollout, rel=1e-6)
    [sampling] = [row for row in result_of_mesh["alive"] if row["during"] == "sampling"]
    assert best["total"] == sampling["total"]
