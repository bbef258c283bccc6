"""Episodes on several devices: each draws in its own places what one device draws."""

import dataclasses

import jax
import numpy as np
import pytest
import tiny
from test_episodes import ROWS, Script, draw, drawn, params_of, prompts, sampler_of

from rlhf_jax import sharding

LATENCIES = {
    "none": lambda row, turn: 0.0,
    "by row": lambda row, turn: 0.01 * (ROWS - row),
}


def meshes():
    return {
        "data=2": sharding.mesh(data=2),
        "data=2, fsdp=2": sharding.mesh(data=2, fsdp=2),
    }


def close(one, several):
    """Devices have fewer rows each, which XLA may round otherwise."""
    np.testing.assert_array_equal(one.rollout.tokens, several.rollout.tokens)
    np.testing.assert_array_equal(
        one.rollout.response_mask, several.rollout.response_mask
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5),
        (one.rollout.old_logprobs, one.rollout.entropy, one.scores),
        (several.rollout.old_logprobs, several.rollout.entropy, several.scores),
    )
