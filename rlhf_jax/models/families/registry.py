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


def _qwen2(**shape: Any) -> ModelConfig:
    """Qwen 2.5, whose windows are switched off."""
    return dataclasses.replace(
        config.llama(rope_theta=1e6, **shape), family="qwen2", attention_bias=True
    )


def _qwen3(**shape: Any) -> ModelConfig:
    plain = config.llama(
        rope_theta=1e6,
        vocab_size=151_936,
        max_positions=40_960,
        num_kv_heads=8,
        head_dim=128,
        **shape,
    )
    return dataclasses.replace(plain, family="qwen3", query_key_norm=True)


def _pythia(*, vocab_size: int = 50_304, **shape: Any) -> ModelConfig:
    plain = config.gpt2(vocab_size=vocab_size, max_positions=2048, **shape)
    return dataclasses.replace(
        plain,
        family="gpt_neox",
        positions="rope",
        rotary_dim=plain.head_dim // 4,
        activation="gelu",
        parallel_residual=True,
        tied_head=False,
    )


def _gemma(
    *, family: str, query_scalar: int, window: int, period: int, **shape: Any
) -> ModelConfig:
    """Every `period`-th layer is global; queries are scaled by query_scalar ** -0.5."""
    plain = config.llama(tied_head=True, **shape)
    return dataclasses.replace(
        plain,
        family=family,
        activation="gelu_tanh",
        norm_from_one=True,
        post_norms=True,
        query_scale=query_scalar**-0.5,
        embed_scale=plain.hidden_size**0.5,
        sliding_window=window,
        local_layers=tuple((i + 1) % period != 0 for i in range(plain.num_layers)),
    )


def _gemma_2(
    *, query_scalar: int = 256, head_dim: int = 256, **shape: Any
) -> ModelConfig:
    plain = _gemma(
        family="gemma2",
        query_scalar=query_scalar,
        window=4096,
        period=2,
        vocab_size=256_000,
        max_positions=8192,
        head_dim=head_dim,
        **shape,
    )
    return dataclasses.replace(plain, attention_softcap=50.0, logit_softcap=30.0)


def _in_every_layer(plain: ModelConfig, *, family: str, window: int) -> ModelConfig:
    """A Llama of another family, with a sliding window in every layer."""
    local = (True,) * plain.num_layers
    return dataclasses.replace(
        plain, family=family, sliding_window=window, local_layers=local
    )


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
    # Qwen team 2024, arXiv:2412.15115, table 1.
    "qwen2.5-0.5b": _qwen2(
        vocab_size=151_936,
        hidden_size=896,
        num_layers=24,
        num_heads=14,
        num_kv_heads=2,
        intermediate_size=4864,
        max_positions=32_768,
        tied_head=True,
    ),
    "qwen2.5-1.5b": _qwen2(
        vocab_size=151_936,
        hidden_size=1536,
        num_layers=28,
        num_heads=12,
        num_kv_heads=2,
        intermediate_size=8960,
        max_positions=131_072,
        tied_head=True,
    ),
    "qwen2.5-7b": _qwen2(
        vocab_size=152_064,
        hidden_size=3584,
        num_layers=28,
        num_heads=28,
        num_kv_heads=4,
        intermediate_size=18_944,
        max_positions=131_072,
    ),
    "qwen2.5-72b": dataclasses.replace(
        _qwen2(
            vocab_size=152_064,
            hidden_size=8192,
            num_layers=80,
            num_heads=64,
            num_kv_heads=8,
            intermediate_size=29_568,
            max_positions=131_072,
        ),
        norm_eps=1e-5,
    ),
    # Qwen team 2025, arXiv:2505.09388, table 1.
    "qwen3-0.6b": _qwen3(
        hidden_size=1024,
        num_layers=28,
        num_heads=16,
        intermediate_size=3072,
        tied_head=True,
    ),
    "qwen3-8b": _qwen3(
        hidden_size=4096, num_layers=36, num_heads=32, intermediate_size=12_288
    ),
    # Jiang et al. 2023, arXiv:2310.06825, table 1.
    "mistral-7b": _in_every_layer(
        _llama(**_8b, num_kv_heads=8, vocab_size=32_000, max_positions=32_768),
        family="mistral",
        window=4096,
    ),
    # Biderman et al. 2023, arXiv:2304.01373, table 1.
    "pythia-160m": _pythia(hidden_size=768, num_layers=12, num_heads=12),
    "pythia-410m": _pythia(hidden_size=1024, num_layers=24, num_heads=16),
    "pythia-1b": _pythia(hidden_size=2048, num_layers=16, num_heads=8),
    "pythia-1.4b": _pythia(hidden_size=2048, num_layers=24, num_heads=16),
    "pythia-2.8b": _pythia(hidden_size=2560, num_layers=32, num_heads=32),
    "pythia-6.9b": _pythia(
        vocab_size=50_432, hidden_size=4096, num_layers=32, num_heads=32
    ),
    "pythia-12b": _pythia(
        vocab_size=50_688, hidden_size=5120, num_layers=36, num_heads=40
    ),
    # Gemma team 2024, arXiv:2408.00118, table 1.
    "gemma-2-2b": _gemma_2(
        hidden_size=2304,
        num_layers=26,
        num_heads=8,
        num_kv_heads=4,
        intermediate_size=9216,
    ),
    "gemma-2-9b": _gemma_2(
        hidden_size=3584,
        num_layers=42,
        num_heads=16,
        num_kv_heads=8,
        intermediate_size=14_336,
    ),
    "gemma-2-27b": _gemma_2(
        hidden_size=4608,
        num_layers=46,
        num_heads=32,
        num_kv_heads=16,
        intermediate_size=36_864,
        head_dim=128,
        query_scalar=144,
    ),
    # Gemma team 2025, arXiv:2503.19786, tables 1 and 2.
    "gemma-3-1b": dataclasses.replace(
        _gemma(
            family="gemma3_text",
            query_scalar=256,
            window=512,
            period=6,
            vocab_size=262_144,
            hidden_size=1152,
            num_layers=26,
            num_heads=4,
            num_kv_heads=1,
            head_dim=256,
            intermediate_size=6912,
            max_positions=32_768,
            rope_theta=1e6,
        ),
        query_key_norm=True,
        rope_local_theta=1e4,
    ),
    # Abdin et al. 2024, arXiv:2404.14219, section 2.
    "phi-3-mini-4k": _in_every_layer(
        _llama(
            vocab_size=32_064,
            hidden_size=3072,
            num_layers=32,
            num_heads=32,
            num_kv_heads=32,
            intermediate_size=8192,
            max_positions=4096,
        ),
        family="phi3",
        window=2047,
    ),
}
