"""How JAX is started: float32 is float32, and what fails is a line."""

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
import os
import jax
from rlhf_jax.devices import processes

processes.start_jax()
x = jax.ShapeDtypeStruct((4, 4), "float32")
print(jax.jit(lambda x: x @ x).lower(x).as_text())
print(processes.matmul_precision(), os.environ.get("JAX_DEFAULT_MATMUL_PRECISION"))
"""


@pytest.mark.parametrize(
    ("asked", "compiled", "told"),
    [
        (None, "precision = [HIGHEST, HIGHEST]", "highest highest"),
        ("tensorfloat32", "precision = [HIGH, HIGH]", "tensorfloat32 tensorfloat32"),
    ],
)
def test_float32_is_multiplied_as_float32_unless_the_user_says_otherwise(
    asked, compiled, told
):
    """In TF32, an H200's default, the check before the first update stopped a run."""
    environment = {name: value for name, value in os.environ.items() if name != NAME}
    if asked is not None:
        environment[NAME] = asked
    printed = subprocess.run(
        [sys.executable, "-c", PRODUCT],
        cwd=places.ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    ).stdout
    assert compiled in printed
    assert printed.splitlines()[-1] == told


def test_a_device_that_another_program_has_filled_is_not_the_platforms_fault(
    monkeypatch,
):
    def devices():
        raise RuntimeError("Unable to initialize backend 'cuda': no supported devices")

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    with pytest.raises(InputError, match=r"^expected a device .* backend 'cuda'"):
        processes.start_jax()
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(InputError, match=r"^JAX_PLATFORMS: .* got 'cuda'"):
        processes.start_jax()
