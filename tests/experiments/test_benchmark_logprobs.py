"""`experiments/benchmarks/logprobs.py` at toy size: the sides agree."""

import json
import sys

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from benchmarks import logprobs, resident

from rlhf_jax.runs import command_line

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/self/status"),
]


def test_the_sides_agree(tmp_path):
    words = ["--out", str(tmp_path), "--rows=2", "--columns=9", "--width=16"]
    words += ["--words=40", "--rounds=1", "--repeats=1"]
    command_line.main(logprobs.main, logprobs.Config, description="", argv=words)
    summary = json.loads((tmp_path / "summary.json").read_text())
    ours, plain = summary["sides"]
    assert ours["side"] == "rlhf_jax"
    assert ours["apart"] == 0.0
    assert plain["apart"] < 1e-4
    assert min(ours["seconds"], plain["seconds"]) > 0
    assert min(ours["compiler_mib"], plain["compiler_mib"]) > 0


@pytest.mark.parametrize("name", logprobs.SIDES)
def test_each_side_computes_what_the_oracle_does(name):
    arrays = resident.inputs(rows=2, columns=9, width=16, words=40)
    hidden, head, tokens = (arrays[key] for key in ("hidden", "head", "tokens"))
    output = logprobs.SIDES[name](*map(jnp.asarray, (hidden, head, tokens)))
    logits = hidden.astype(np.float64) @ head.T.astype(np.float64)
    np.testing.assert_allclose(
        output[0], oracles.token_logprobs(logits, tokens), rtol=0, atol=1e-5
    )
    assert np.asarray(output[0])[:, 1:].std() > 0.1  # not the same number everywhere
