"""PPO and GRPO compiled for absent TPUs and GPUs (slow)."""

import importlib.util
import json
import os
import subprocess
import sys

import context_on_tpu
import places
import plan_for_chips
import pytest
import sampler_on_tpu

from rlhf_jax.planning import gpu_targets

SLICES = {
    "v5e:2x2": pytest.param(
        ("v5e:2x2", "fsdp=4"),
        marks=pytest.mark.skipif(
            importlib.util.find_spec("libtpu") is None,
            reason="libtpu is not installed (extra plan)",
        ),
    ),
    "two v5e:2x2": pytest.param(
        ("v5e:2x2", "dcn=2,fsdp=4"),
        marks=pytest.mark.skipif(
            importlib.util.find_spec("libtpu") is None,
            reason="libtpu is not installed (extra plan)",
        ),
    ),
    # Parameters are shared inside a node, and rows by both.
    "h100:2x4": pytest.param(
        ("h100:2x4", "data=2,fsdp=4"),
        marks=pytest.mark.skipif(
            gpu_targets.compiler() is None,
            reason="JAX's plug-in for GPUs is not installed (extra plan-cuda)",
        ),
    ),
}
PROGRAMS = {
    "ppo": ["sampling", "the reward model", "the reference", "scoring and learning"],
    "grpo": ["sampling", "the reference", "learning"],
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=SLICES.values(), ids=SLICES.keys())
def planned(request):
    return request.param, played(plan_for_chips, *request.param)


def played(program, *argv):
    """The output of a program in its own process."""
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "PYTHONPATH": places.PYTHONPATH,
    }
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, program.__file__, *argv],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (extra plan)",
)
def test_a_decoded_token_reads_weights_and_cache_at_most_once_and_sends_neither():
    """Checks the loop over tokens of the program for eight v5e."""
    loop = played(sampler_on_tpu)
    assert loop["turns"] == 127
    # Sums of activations, and the logits of each device's rows.
    assert loop["collectives"] == ["all-reduce", "all-to-all"]
    assert loop["copied"] == []  # the cache is written in place
    # Less where some of either stays on the chip from token to token.
    assert 0 < loop["bytes"] < 1.15 * (loop["weights"] + loop["cache"])


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (extra plan)",
)
def test_four_chips_share_the_columns_of_a_row():
    """For four v5e: splash computes attention, and no chip has all states of a row."""
    output = played(context_on_tpu, "splash")
    assert output["kernels"] > 0
    assert output["whole keys"] > 0
    assert output["whole rows"] == 0
    assert output["own columns"] > 0


@pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (extra plan)",
)
def test_no_chip_has_the_keys_of_a_row_that_are_passed_round():
    """For four v5e: splash computes each turn while the next keys are sent."""
    output = played(context_on_tpu, "ring")
    assert output["kernels"] > 0
    assert output["passed"] > 0
    assert output["whole keys"] == output["whole rows"] == 0


@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_every_program_compiles_and_fits(planned, algorithm):
    (topology, _), plans = planned
    plan = plans[algorithm]
    assert plan["topology"] == topology
    assert plan["fits"]
    assert [one["name"] for one in plan["programs"]] == PROGRAMS[algorithm]
    for one in plan["programs"]:
        assert one["refused"] is None
        # Remat adds to what a model needs; masked pairs of attention are computed too.
        flops = plan["chips"] * one["flops"]
        assert 0.9 < flops / one["model_flops"] < 1.5, one["name"]
        assert one["seconds"]["bound"] > 0
        assert 0 < one["mfu"] < 1
    # 63 tokens after the first: the loops of the sampler do not say how many.
    assert plan["programs"][0]["turns"] == 63
    assert plan["tokens"] == 16 * 128


@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_gpus_run_cudnn_s_kernels(planned, algorithm):
    """Forward kernels in every program, backward ones in the update; none on a TPU."""
    (topology, _), plans = planned
    kernels = {name for name in plans[algorithm]["custom_calls"] if "fmha" in name}
    if topology.startswith("v5e"):
        assert not kernels
        return
    assert plans[algorithm]["attention"] == "cudnn"
    assert len([name for name in kernels if name.endswith("Backward")]) == 1
    assert len(kernels) == 2


@pytest.mark.parametrize("algorithm", PROGRAMS)
def test_gradients_alone_leave_a_node(planned, algorithm):
    """With `data` over nodes or `dcn` over slices, and `fsdp` inside them.

    The parameters are gathered inside.
    """
    (_, mesh), plans = planned
    plan = plans[algorithm]
    *others, update = plan["programs"]
    if mesh == "fsdp=4":
        assert not update["network_bytes"]
        return
    # Two layers of a group's few prompts, which slices give each other once.
    caches = 2 * 2 * 2 * (16 * 64 * 256) if "dcn" in mesh else 0
    for one in others:
        # But for what says that every row has stopped, and a group's few prompts.
        most = max(0.001 * one["sent_bytes"], caches)
        assert one["network_bytes"] < most, one["name"]
    # Each GPU of a node exchanges its quarter of the gradients with the other node, to
    # get the sum: in bfloat16 at the least, in float32 at the most.
    roles = 2 if algorithm == "ppo" else 1
    quarter = roles * plan["parameters"] / 4
    assert 2 * quarter < update["network_bytes"] < 4 * quarter
    if "dcn" in mesh:
        # Summed within a slice first: only pairs of chips exchange across.
        across = {
            (row["kind"], row["devices"])
            for row in update["collectives"]
            if row["nodes"] > 1 and row["size"] > 2**15
        }
        assert across == {("all-reduce", 2)}
