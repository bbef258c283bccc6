"""A checkpoint is never in host memory twice: it is read to its final place."""

import json
import os
import subprocess
import sys

import jax
import places
import pytest

from rlhf_jax import config, decoder, hf

MODEL = config.llama(
    vocab_size=32000,
    hidden_size=1024,
    num_layers=6,
    num_heads=8,
    num_kv_heads=8,
    intermediate_size=2816,
    max_positions=512,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint") / "model"
    init = jax.jit(decoder.init, static_argnames=("model",))
    hf.save(folder, MODEL, init(jax.random.key(0), model=MODEL))
    return folder


@pytest.mark.long
@pytest.mark.parametrize("devices", [1, 8])
def test_loading_takes_little_more_than_what_is_loaded(checkpoint, devices):
    """On the CPU the devices' memory is the host's, so that all of it is counted.

    2.6 GB for a checkpoint of 2 GB leaves 0.6 GB for Python and read buffers.
    """
    done = subprocess.run(
        [
            *(sys.executable, places.PROGRAMS / "load_checkpoint.py"),
            *(checkpoint, str(devices)),
        ],
        env=os.environ
        | {
            "PYTHONPATH": places.PYTHONPATH,
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sizes = json.loads(done.stdout)
    assert sizes["size"] == 4 * decoder.num_parameters(MODEL)
    assert sizes["at_most"] - sizes["before"] < 1.25 * sizes["size"]
