"""How fast this machine multiplies and copies float32, as one JSON line.

The best of several products of [n, n] matrices, n of 1024 and 2048, and of several
x + 1 over 256 MiB, read and written. On an accelerator also its maker's peaks, where
`runtime/chips.py` has them (products in bfloat16).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.runtime import chips

Array = jax.Array
REPEATS = 12
COPIED = 2**26  # numbers


def best(program: Callable[..., Any], *arguments: Array) -> float:
    """Seconds of the fastest of several calls."""
    jax.block_until_ready(program(*arguments))
    found = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        found.append(time.perf_counter() - began)
    return min(found)


def main() -> None:
    product = jax.jit(lambda left, right: left @ right)
    squares = {n: jax.random.normal(jax.random.key(n), (n, n)) for n in (1024, 2048)}
    flops = max(2 * n**3 / best(product, x, x) for n, x in squares.items())
    numbers = jnp.ones(COPIED, jnp.float32)
    moved = 2 * numbers.nbytes / best(jax.jit(lambda x: x + 1), numbers)
    device = jax.devices()[0]
    chip = chips.of_device(device)
    line = {
        "matmul_flops": flops,
        "copy_bytes": moved,
        "backend": jax.default_backend(),
        "device": device.device_kind,
        "peak_flops": None if chip is None else chip.flops,
        "peak_bytes": None if chip is None else chip.bandwidth,
    }
    print(json.dumps(line))


if __name__ == "__main__":
    main()
