"""Splash attention compiled for an absent TPU (extra `plan`)."""

import importlib.util
import json
import os
import subprocess
import sys

import attention_for_tpu
import places
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
    ),
]


@pytest.fixture(scope="module")
def program_output():
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, attention_for_tpu.__file__],
        env=environment,
        cwd=places.TESTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("form", attention_for_tpu.FORMS)
def test_kernels_are_called_and_no_logits_are_held(program_output, form):
    short, long = (
        program_output[f"{form}, {size}"] for size in attention_for_tpu.COLUMNS
    )
    names = [name.split("_segmented")[0] for name in long["kernels"]]
    assert names == ["splash_mha_dkv", "splash_mha_dq", "splash_mha_fwd"]
    names = [name.split("_segmented")[0] for name in short["kernels"]]
    assert names == ["splash_mha_dkv", "splash_mha_fwd"]  # one for all gradients
    for program, columns in zip((short, long), attention_for_tpu.COLUMNS, strict=True):
        # Of the logits of one head, in bytes.
        assert program["temporary"] < 4 * columns**2 / 8
