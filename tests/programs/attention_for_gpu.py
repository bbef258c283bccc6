"""Compiles attention by cuDNN for an absent GPU; JSON on stdout.

Run by test_cudnn.py in its own process, as JAX chooses its platforms only once.
"""

import dataclasses
import functools
import json
import re

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from rlhf_jax import config, decoder, lora, policy
from rlhf_jax.planning import compiled

ROWS, COLUMNS, HEADS = 2, 256, 8
# What XLA asks of a target, from NVIDIA's data sheet of the H100 SXM.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472 registers_per_core_limit: 65536
  registers_per_block_limit: 65536 core_count: 132 fpus_per_core: 128
  clock_rate_ghz: 1.98 l2_cache_size: 52428800 memory_bandwidth: 3352320000000
  device_memory_size: 84929347584 cuda_compute_capability { major: 9 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def models():
    """A model of grouped heads with a local layer; and one of biases with remat."""
    shape = {"vocab_size": 256, "hidden_size": HEADS * 64, "num_layers": 2}
    shape |= {"num_heads": HEADS, "max_positions": COLUMNS, "dtype": "bfloat16"}
    llama = config.llama(**shape, num_kv_heads=2, intermediate_size=1024)
    local = {"sliding_window": 64, "local_layers": (True, False)}
    return {
        "llama": dataclasses.replace(llama, **local, attention="cudnn"),
        "gpt2": dataclasses.replace(
            config.gpt2(**shape, remat="full"), attention="cudnn"
        ),
    }


def kernels(done):
    names = re.findall(r'custom_call_target="__cudnn\$(fmha\w*)"', done.as_text())
    return sorted(set(names))


def main():
    device = topologies.get_topology_desc(
        platform="cuda", target_config=H100, topology="1x1x1"
    ).devices[0]
    where = SingleDeviceSharding(device)

    def compile_(function, *args):
        placed = compiled.placed(args, jax.tree.map(lambda _: where, args))
        return compiled.program(function, *placed, device=device)

    tokens = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.int32)
    mask = jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bool_)
    adapter = lora.LoRA(rank=4)
    key = jax.eval_shape(jax.random.key, 0)
    kernels_of = {"device": device.device_kind}
    for name, model in models().items():
        init = functools.partial(decoder.init, model=model)
        adapt = functools.partial(lora.init, model=model, lora=adapter)

        def loss(params, adapters, tokens, mask, model=model):
            attached = lora.attach(params, adapters, lora=adapter)
            logprobs = policy.logprobs(attached, model=model, tokens=tokens, mask=mask)
            return -jnp.sum(logprobs, where=mask)

        params, adapters = (jax.eval_shape(make, key) for make in (init, adapt))
        done = compile_(jax.grad(loss, (0, 1)), params, adapters, tokens, mask)
        kernels_of[name] = kernels(done)
    print(json.dumps(kernels_of))


if __name__ == "__main__":
    main()
