"""float32 is multiplied as float32, on every device.

JAX's own default multiplies matrices of float32 in TF32 on GPUs and in bfloat16 on
TPUs, which moves log-probs by 1e-3 nats and more: sampler and trainer would be two
policies. Programs that compute in bfloat16 keep JAX's default, under which their
kernels are compiled.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax

PRECISION = "jax_default_matmul_precision"
VARIABLE = PRECISION.upper()
FLOAT32 = "highest"  # JAX's name of it


@contextlib.contextmanager
def of(dtype: str) -> Iterator[None]:
    """Programs traced in this context multiply float32 in full precision.

    It holds in all threads and in processes started meanwhile, where `dtype` is
    "float32"; else nothing changes. JAX_DEFAULT_MATMUL_PRECISION, or what JAX has been
    configured to, has precedence.

    Args:
      dtype: what the models compute in, "float32" or "bfloat16".
    """
    if jax.config.values[PRECISION] is not None or dtype != "float32":
        yield
        return
    jax.config.update(PRECISION, FLOAT32)
    # For processes that are started meanwhile, such as a sampler's.
    os.environ[VARIABLE] = FLOAT32
    try:
        yield
    finally:
        jax.config.update(PRECISION, None)
        os.environ.pop(VARIABLE, None)


def name() -> str:
    """What JAX calls the precision of now; "default" is its own."""
    return jax.config.values[PRECISION] or "default"
