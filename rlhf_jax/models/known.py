"""Shapes of well-known checkpoints, so that a run can be planned without any file.

The figures are those of each model's config.json on the Hugging Face hub; a test counts
their parameters against the published ones.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from rlhf_jax.models import config
from rlhf_jax.models.config import ModelConfig, RopeScaling

LLAMA_3_1 = RopeScaling(kind="llama3", factor=8.0)
LLAMA_3_2 = RopeScaling(kind="llama3", factor=32.0)


def _llama(**shape: Any) -> ModelConfig:
    return dataclasses.replace(config.llama(**shape), norm_eps=1e-5)


_gpt2 = functools.partial(config.gpt2, vocab_size=50257, max_positions=1024)
_llama_2 = functools.partial(_llama, vocab_size=32000, max_positions=4096)
_llama_3 = functools.partial(
    _llama, vocab_size=128256, rope_theta=500_000.0, num_kv_heads=8
)
_llama_3_1 = functools.partial(_llama_3, max_positions=131_072, rope_scaling=LLAMA_3_1)
_llama_3_2 = functools.partial(
    _llama_3, max_positions=131_072, rope_scaling=LLAMA_3_2, tied_head=True
)
_8b: dict[str, Any] = {
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "intermediate_size": 14336,
}
_70b: dict[str, Any] = {
    "hidden_size": 8192,
    "num_layers": 80,
    "num_heads": 64,
    "intermediate_size": 28672,
}

KNOWN: dict[str, ModelConfig] = {
    # Radford et al. 2019, table 2.
    "gpt2": _gpt2(hidden_size=768, num_layers=12, num_heads=12),
    "gpt2-medium": _gpt2(hidden_size=1024, num_layers=24, num_heads=16),
    "gpt2-large": _gpt2(hidden_size=1280, num_layers=36, num_heads=20),
    "gpt2-xl": _gpt2(hidden_size=1600, num_layers=48, num_heads=25),
    # Touvron et al. 2023, arXiv:2307.09288.
    "llama-2-7b": _llama_2(
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        intermediate_size=11008,
    ),
    "llama-2-13b": _llama_2(
        hidden_size=5120,
        num_layers=40,
        num_heads=40,
        num_kv_heads=40,
        intermediate_size=13824,
    ),
    "llama-2-70b": _llama_2(**_70b, num_kv_heads=8),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3.
    "llama-3-8b": _llama_3(**_8b, max_positions=8192),
    "llama-3-70b": _llama_3(**_70b, max_positions=8192),
    "llama-3.1-8b": _llama_3_1(**_8b),
    "llama-3.1-70b": _llama_3_1(**_70b),
    "llama-3.2-1b": _llama_3_2(
        hidden_size=2048,
        num_layers=16,
        num_heads=32,
        head_dim=64,
        intermediate_size=8192,
    ),
    "llama-3.2-3b": _llama_3_2(
        hidden_size=3072,
        num_layers=28,
        num_heads=24,
        head_dim=128,
        intermediate_size=8192,
    ),
}
