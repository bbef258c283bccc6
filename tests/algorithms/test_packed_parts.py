"""Gradients accumulated over parts of responses, with a loss by hand and no model."""

import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax.algorithms.state import (
    PackedParts,
    accumulate_packed,
)

ROWS = {"x": jnp.asarray([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], jnp.float32)}


def loss(params, rows, *, packing):
    assert packing is None
    return (params["w"] * rows["x"]).sum() / 3, {"sum": (rows["x"].sum(), 1.0)}


@pytest.mark.parametrize(
    "members",
    [
        [[1, 1, 1]],
        [[1, 0, 0], [0, 1, 1]],
        [[0, 1, 0], [1, 0, 0], [0, 0, 1]],
        [[1, 0, 1], [0, 0, 0], [0, 1, 0]],  # a part without responses
    ],
)
def test_parts_add_up_however_many_there_are(members):
    parts = PackedParts(None, jnp.asarray(members, bool))
    params = {"w": jnp.float32(2)}
    gradient, stats = accumulate_packed(loss, params, ROWS, parts=parts)
    assert float(gradient["w"]) == pytest.approx(7, rel=1e-6)
    assert float(stats["sum"][0]) == 21
    filled = np.asarray(members).any(axis=1).sum()
    assert float(stats["sum"][1]) == filled
