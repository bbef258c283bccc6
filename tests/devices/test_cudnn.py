"""Attention by cuDNN, compiled for an absent H100 (extra `plan-cuda`)."""

import importlib.util
import json
import os
import subprocess
import sys

import attention_for_gpu
import places
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("jax_cuda13_plugin") is None,
        reason="jax[cuda13] is not installed (extra plan-cuda)",
    ),
]
MODELS = ("llama", "gpt2")


@pytest.fixture(scope="module")
def program_output():
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, attention_for_gpu.__file__],
        env=environment,
        cwd=places.TESTS,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_is_called_forward_and_backward(program_output, name):
    """For full parameters and adapters; shapes are computed without the kernel."""
    assert "H100" in program_output["device"]
    kernel = "fmhaSoftmax"  # causal by itself, without a bias
    assert program_output[name] == [kernel, f"{kernel}Backward"]
