"""Matrix products of float32 are computed in float32 on every device.

JAX's own default multiplies float32 matrices in TF32 on GPUs and in bfloat16 on TPUs,
which changes log-probs by 1e-3 nats and more: sampler and trainer would be two
policies. Programs that compute in bfloat16 keep JAX's default.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import jax

PRECISION = "jax_default_matmul_precision"
VARIABLE = PRECISION.upper()
FLOAT32 = "highest"  # JAX's name for float32 products


@contextlib.contextmanager
def of(dtype: str) -> Iterator[None]:
    """A context in which programs multiply float32 in full precision.

    It applies to all threads, and to processes started within it, if `dtype` is
    "float32". JAX_DEFAULT_MATMUL_PRECISION and JAX's configuration have precedence.

    Args:
      dtype: compute dtype of the models, "float32" or "bfloat16".
    """
    if jax.config.values[PRECISION] is not None or dtype != "float32":
        yield
        return
    jax.config.update(PRECISION, FLOAT32)
    # For processes started within the context, such as a sampler's.
    os.environ[VARIABLE] = FLOAT32
    try:
        yield
    finally:
        jax.config.update(PRECISION, None)
        os.environ.pop(VARIABLE, None)


def name() -> str:
    """JAX's name for the current precision; "default" is its own."""
    return jax.config.values[PRECISION] or "default"
