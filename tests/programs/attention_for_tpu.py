"""Compiles splash attention's gradients for an absent TPU; JSON on stdout.

Run by test_splash_on_tpu.py in its own process: JAX chooses its platforms only once.
"""

import json
import re

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from rlhf_jax.models.attention.splash import attend_splash
from rlhf_jax.models.positions import AttentionMask
from rlhf_jax.planning import compiled

HEADS, KV_HEADS, HEAD_DIM = 8, 4, 128
COLUMNS = (4096, 16384)  # the last by two kernels in the backward pass
FORMS = {"causal": {}, "either window, soft cap": {"window": True, "softcap": 50.0}}


def main():
    device = compiled.target("v5e:2x2")
    where = SingleDeviceSharding(device)

    def shape(*sizes, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=where)

    measured = {}
    for columns in COLUMNS:
        for form, options in FORMS.items():

            def loss(query, key, value, segments, window, options=options, n=columns):
                how = dict(options)
                if "window" in how:
                    how |= {"window": window, "windows": (512, n)}
                mask = AttentionMask(segments=segments, **how)
                y = attend_splash(query, (key, value), mask=mask)
                return y.astype(jnp.float32).sum()

            done = compiled.program(
                jax.grad(loss, (0, 1, 2)),
                shape(1, HEADS, columns, HEAD_DIM),
                shape(1, KV_HEADS, columns, HEAD_DIM),
                shape(1, KV_HEADS, columns, HEAD_DIM),
                shape(1, columns, dtype=jnp.int32),
                shape(dtype=jnp.int32),
                device=device,
            )
            kernels = re.findall(r"(splash_m[hq]a_\w+?)(?:[.\"\\]|$)", done.as_text())
            measured[f"{form}, {columns}"] = {
                "kernels": sorted(set(kernels)),
                "temporary": done.memory_analysis().temp_size_in_bytes,
            }
    print(json.dumps(measured))


if __name__ == "__main__":
    main()
