"""Starting JAX: float32 products are float32, and a failure is one line."""

import os
import subprocess
import sys

import jax
import places
import pytest

from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError

NAME = "JAX_DEFAULT_MATMUL_PRECISION"
PRODUCT = """
import os, subprocess, sys, threading
import jax
from rlhf_jax.devices import precision

x = jax.ShapeDtypeStruct((4, 4), "float32")

def tell():
    text = jax.jit(lambda x: x @ x).lower(x).as_text()
    [line] = [line for line in text.splitlines() if "dot_general" in line]
    print(line.partition("precision = ")[2].partition("]")[0], precision.name())

for dtype in ("float32", "bfloat16"):
    with precision.of(dtype):
        tell()
        thread = threading.Thread(target=tell)
        thread.start()
        thread.join()
        print(os.environ.get("JAX_DEFAULT_MATMUL_PRECISION"))
tell()
print(os.environ.get("JAX_DEFAULT_MATMUL_PRECISION"))
"""


@pytest.mark.slow
def test_float32_is_multiplied_as_float32_unless_the_user_says_otherwise():
    """In TF32, an H200's default, the check before the first update stopped a run."""
    own, asked = ["[DEFAULT, DEFAULT default"] * 2, ["[HIGH, HIGH tensorfloat32"] * 2
    told = [*["[HIGHEST, HIGHEST highest"] * 2, "highest", *own, "None", own[0], "None"]
    assert printed(None) == told
    of_user = [*asked, "tensorfloat32", *asked, "tensorfloat32", asked[0]]
    assert printed("tensorfloat32") == [*of_user, "tensorfloat32"]


def printed(precision):
    environment = {name: value for name, value in os.environ.items() if name != NAME}
    if precision is not None:
        environment[NAME] = precision
    return subprocess.run(
        [sys.executable, "-c", PRODUCT],
        cwd=places.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout.splitlines()


def test_a_device_that_another_program_has_filled_is_not_the_platforms_fault(
    monkeypatch,
):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda': no supported devices")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(InputError, match=r"^expected a device .* backend 'cuda'"):
        processes.check_platform()
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(InputError, match=r"^JAX_PLATFORMS: .* got 'cuda'"):
        processes.check_platform()
