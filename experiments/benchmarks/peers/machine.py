"""Measures the machine's rates of products and copies in float32, as one JSON line.

The rates are the best of several products of [n, n] matrices with n of 1024 and 2048,
and of several x + 1 over 256 MiB in place, because a new array would cost page faults.
For an accelerator in `planning/chips.py` the line also has the manufacturer's peaks
(products in bfloat16).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from rlhf_jax.planning import chips

Array = jax.Array
REPEATS = 12
COPIED = 2**26  # numbers in a copy


def best(program: Callable[[Array], Array], array: Array) -> float:
    """Seconds of the fastest of several calls, each on the previous result."""
    array = jax.block_until_ready(program(array))
    seconds = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        array = jax.block_until_ready(program(array))
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    product = jax.jit(lambda square: square @ square)
    squares = {n: jnp.eye(n) for n in (1024, 2048)}  # powers of it stay finite
    flops = max(2 * n**3 / best(product, square) for n, square in squares.items())
    increment = jax.jit(lambda numbers: numbers + 1, donate_argnums=0)
    moved = 2 * 4 * COPIED / best(increment, jnp.zeros(COPIED, jnp.float32))
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
