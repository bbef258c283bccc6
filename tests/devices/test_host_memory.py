"""A reference in host memory, compiled for a TPU (extra `plan`)."""

import functools
import importlib.util
import json
import os
import subprocess
import sys

import compile_for_tpu
import jax
import places
import pytest

from rlhf_jax import decoder
from rlhf_jax.roles.reference import storage

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
    ),
]


@pytest.fixture(scope="module")
def program_output():
    script = places.PROGRAMS / "compile_for_tpu.py"
    # No machine is asked what it is, another process may compile too, and XLA is left
    # as a real run has it.
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "TPU_SKIP_MDS_QUERY": "1",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    environment.pop("XLA_FLAGS", None)
    done = subprocess.run(
        [sys.executable, script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def params():
    return jax.eval_shape(
        lambda: decoder.init(jax.random.key(0), model=compile_for_tpu.MODEL)
    )


def peak(memory):
    return memory["argument"] + memory["temporary"]


@pytest.mark.parametrize("way", ["host", "host-int8"])
def test_a_reference_on_the_host_is_a_host_argument(program_output, params, way):
    freeze = functools.partial(storage.store, **storage.WAYS[way])
    size = storage.nbytes(jax.eval_shape(freeze, params))
    assert size <= program_output[way]["host_argument"] <= 1.02 * size  # rows of a tile
    assert program_output[way]["argument"] <= program_output["none"]["argument"] + 2**14


@pytest.mark.parametrize("way", ["host", "host-int8"])
def test_the_device_holds_two_layers_and_the_embedding_at_most(
    program_output, params, way
):
    """Beyond the peak of scoring without a reference, which is the critic's pass."""
    layer = storage.nbytes(params["layers"]) / compile_for_tpu.MODEL.num_layers
    room = 2 * layer + storage.nbytes(params["embed"])
    assert peak(program_output[way]) <= peak(program_output["none"]) + room


def test_a_reference_on_the_device_takes_its_storage(program_output, params):
    whole = storage.nbytes(params)
    assert (
        program_output["none"]["host_argument"]
        == program_output["copy"]["host_argument"]
        == 0
    )
    for way, share in (("copy", 1.0), ("int8", 0.26)):
        more = program_output[way]["argument"] - program_output["none"]["argument"]
        assert more == pytest.approx(share * whole, rel=0.08)
