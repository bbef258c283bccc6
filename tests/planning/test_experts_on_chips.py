"""Expert layers as compiled for real chips, against counts by hand (slow)."""

import importlib.util

import experts_for_chips as experts
import pytest
from test_targets import played

from rlhf_jax.planning import gpu_targets

pytestmark = pytest.mark.slow
CHIPS = {
    "v5e:2x2": (importlib.util.find_spec("libtpu") is None, "plan"),
    "h100:1x8": (gpu_targets.compiler() is None, "plan-cuda"),
}
MATRIX = experts.WIDTH * experts.INNER


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            chip, marks=pytest.mark.skipif(missing, reason=f"no extra {extra}")
        )
        for chip, (missing, extra) in CHIPS.items()
    ],
)
def found(request):
    return played(experts, request.param)


def test_every_row_is_multiplied_with_the_matrices_of_its_experts(found):
    """Three products forward. A gradient has two for each of them, and remat the first
    two again: what the last one returns is not needed."""
    rows = experts.PER_TOKEN * experts.LAYERS * 2 * MATRIX  # FLOPs of one product
    assert found["decoded"]["flops"] == 3 * experts.ROWS * rows
    assert found["trained"]["flops"] == 11 * experts.TOKENS * rows
    assert {one["unknown_loops"] for one in found.values()} == {0}


def test_a_decoded_token_reads_the_experts_that_its_rows_meet(found):
    missed = (1 - experts.PER_TOKEN / experts.EXPERTS) ** experts.ROWS
    met = experts.EXPERTS * (1 - missed)
    least = 2 * 3 * experts.LAYERS * met * MATRIX
    assert least < found["decoded"]["bytes"] < 1.05 * least


def test_no_rows_are_repeated_for_every_expert(found):
    """XLA repeats them for a GPU without our kernel."""
    repeated = experts.EXPERTS * experts.TOKENS * experts.PER_TOKEN * experts.WIDTH
    assert found["trained"]["temporary"] < 2 * repeated
