"""Shapes of well-known checkpoints, so that a run can be planned without any file.

The figures are those of each model's config.json on the Hugging Face hub; a test counts
their parameters against the published ones.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

from rlhf_jax.models import config
from rlhf_jax.models.config import (
    DeltaNet,
    Experts,
    GlobalHeads,
    ModelConfig,
    RopeScaling,
)
from rlhf_jax.models.families.mistral import in_every_layer
from rlhf_jax.models.families.mixtures import known


def _gpt2(
    hidden_size: int, num_layers: int, num_heads: int, **others: Any
) -> ModelConfig:
    others = {"vocab_size": 50_257, "max_positions": 1024} | others
    return config.gpt2(
        hidden_size=hidden_size, num_layers=num_layers, num_heads=num_heads, **others
    )


def _pythia(*sizes: int, vocab_size: int = 50_304) -> ModelConfig:
    plain = _gpt2(*sizes, vocab_size=vocab_size, max_positions=2048)
    return dataclasses.replace(
        plain,
        family="gpt_neox",
        positions="rope",
        rotary_dim=plain.head_dim // 4,
        activation="gelu",
        parallel_residual=True,
        tied_head=False,
    )


def _llama(
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    *,
    norm_eps: float = 1e-5,
    **others: Any,
) -> ModelConfig:
    plain = config.llama(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        intermediate_size=intermediate_size,
        **others,
    )
    return dataclasses.replace(plain, norm_eps=norm_eps)


_llama_2 = functools.partial(_llama, vocab_size=32_000, max_positions=4096)
_llama_3 = functools.partial(
    _llama, vocab_size=128_256, rope_theta=500_000.0, max_positions=8192
)
_llama_3_1 = functools.partial(
    _llama_3, max_positions=131_072, rope_scaling=RopeScaling("llama3", 8.0)
)
_llama_3_2 = functools.partial(
    _llama_3,
    max_positions=131_072,
    rope_scaling=RopeScaling("llama3", 32.0),
    tied_head=True,
)
_8B = (4096, 32, 32, 8, 14_336)
_70B = (8192, 80, 64, 8, 28_672)


def _qwen2(*sizes: int, norm_eps: float = 1e-6, **others: Any) -> ModelConfig:
    """Qwen 2.5, which switches its sliding windows off."""
    plain = _llama(*sizes, norm_eps=norm_eps, rope_theta=1e6, **others)
    return dataclasses.replace(plain, family="qwen2", attention_bias=True)


def _qwen3(*sizes: int, tied_head: bool = False) -> ModelConfig:
    plain = _llama(
        *sizes,
        norm_eps=1e-6,
        rope_theta=1e6,
        vocab_size=151_936,
        max_positions=40_960,
        head_dim=128,
        tied_head=tied_head,
    )
    return dataclasses.replace(plain, family="qwen3", query_key_norm=True)


def _gemma(
    *sizes: int, query_scalar: int = 256, window: int, period: int, **others: Any
) -> ModelConfig:
    """Every `period`-th layer is global; queries are scaled by query_scalar ** -0.5."""
    others = {"norm_eps": 1e-6, "tied_head": True, "head_dim": 256} | others
    plain = _llama(*sizes, **others)
    return dataclasses.replace(
        plain,
        activation="gelu_tanh",
        norm_from_one=True,
        post_norms=True,
        query_scale=query_scalar**-0.5,
        embed_scale=plain.hidden_size**0.5,
        sliding_window=window,
        local_layers=tuple((i + 1) % period != 0 for i in range(plain.num_layers)),
    )


def _gemma_2(*sizes: int, **others: Any) -> ModelConfig:
    lengths = {"vocab_size": 256_000, "max_positions": 8192, "window": 4096}
    return dataclasses.replace(
        _gemma(*sizes, **lengths, period=2, **others),
        family="gemma2",
        attention_softcap=50.0,
        logit_softcap=30.0,
    )


def _gemma_3(*sizes: int, **others: Any) -> ModelConfig:
    """Defaults are those of the language models of multimodal checkpoints."""
    lengths = {"vocab_size": 262_208, "max_positions": 131_072, "window": 1024}
    scaling = {"rope_theta": 1e6, "rope_scaling": RopeScaling("linear", 8.0)}
    return dataclasses.replace(
        _gemma(*sizes, **(lengths | scaling | others), period=6),
        family="gemma3_text",
        query_key_norm=True,
        rope_local_theta=1e4,
    )


def _gemma_4(
    *sizes: int, heads: GlobalHeads, max_positions: int = 131_072, **others: Any
) -> ModelConfig:
    """The language model of a multimodal one."""
    shape = {"window": 512, "period": 6} | others
    lengths = {"vocab_size": 262_144, "max_positions": max_positions}
    return dataclasses.replace(
        _gemma(*sizes, rope_theta=1e6, **lengths, **shape),
        family="gemma4_text",
        norm_from_one=False,
        rope_scaling=RopeScaling("proportional", 1.0, share=0.25),
        rope_local_theta=1e4,
        query_key_norm=True,
        query_scale=1.0,
        value_norm=True,
        layer_scale=True,
        global_heads=heads,
        logit_softcap=30.0,
    )


def _gemma_4_e(
    *sizes: int, shared_layers: int, wide: bool = False, period: int
) -> ModelConfig:
    """One that has embeddings for each layer."""
    plain = _gemma_4(*sizes, heads=GlobalHeads(512, sizes[3]), period=period)
    return dataclasses.replace(
        plain, per_layer_width=256, shared_layers=shared_layers, wide_shared_mlp=wide
    )


def _olmo_2(
    *sizes: int, vocab_size: int = 100_352, max_positions: int = 4096, **others: Any
) -> ModelConfig:
    lengths = {"vocab_size": vocab_size, "max_positions": max_positions}
    plain = _llama(*sizes, norm_eps=1e-6, rope_theta=5e5, **lengths, **others)
    return dataclasses.replace(
        plain,
        family="olmo2",
        query_key_norm=True,
        joint_head_norm=True,
        pre_norms=False,
        post_norms=True,
    )


def _olmo_3(*sizes: int) -> ModelConfig:
    yarn = RopeScaling(
        *("yarn", 8.0),
        original_max_positions=8192,
        attention_factor=0.1 * math.log(8.0) + 1.0,
    )
    lengths = {"vocab_size": 100_278, "max_positions": 65_536}
    plain = _olmo_2(*sizes, **lengths, rope_scaling=yarn)
    return dataclasses.replace(
        plain,
        family="olmo3",
        rope_local_theta=5e5,
        sliding_window=4096,
        local_layers=tuple((i + 1) % 4 != 0 for i in range(plain.num_layers)),
    )


def _smollm_3(*sizes: int) -> ModelConfig:
    lengths = {"vocab_size": 128_256, "max_positions": 65_536}
    plain = _llama(*sizes, norm_eps=1e-6, rope_theta=5e6, tied_head=True, **lengths)
    return dataclasses.replace(
        plain,
        family="smollm3",
        unrotated_layers=tuple((i + 1) % 4 == 0 for i in range(plain.num_layers)),
    )


def _granite_3_3(*sizes: int, head_dim: int, logit_divisor: float) -> ModelConfig:
    """Attention logits are multiplied by 1 / head_dim."""
    lengths = {"vocab_size": 49_159, "max_positions": 131_072}
    plain = _llama(*sizes, rope_theta=1e7, tied_head=True, head_dim=head_dim, **lengths)
    return dataclasses.replace(
        plain,
        family="granite",
        embed_scale=12.0,
        residual_scale=0.22,
        query_scale=1.0 / head_dim,
        logit_divisor=logit_divisor,
    )


def _granite_4(
    *sizes: int, head_dim: int, logit_divisor: float, residual_scale: float = 0.22
) -> ModelConfig:
    plain = _granite_3_3(*sizes, head_dim=head_dim, logit_divisor=logit_divisor)
    return dataclasses.replace(
        plain,
        family="granitemoehybrid",
        vocab_size=100_352,
        residual_scale=residual_scale,
    )


def _qwen_3_5(
    *sizes: int, value_heads: int = 32, tied_head: bool = False
) -> ModelConfig:
    """Three DeltaNets per attention layer, which rotates a quarter of every head."""
    plain = _llama(
        *sizes,
        norm_eps=1e-6,
        rope_theta=1e7,
        vocab_size=248_320,
        max_positions=262_144,
        head_dim=256,
        tied_head=tied_head,
    )
    return dataclasses.replace(
        plain,
        family="qwen3_5_text",
        rotary_dim=64,
        norm_from_one=True,
        query_key_norm=True,
        output_gate=True,
        delta_net=DeltaNet(16, value_heads, key_dim=128, value_dim=128),
        recurrent_layers=tuple((i + 1) % 4 != 0 for i in range(plain.num_layers)),
    )


def _windowed(family: str, plain: ModelConfig, *, window: int) -> ModelConfig:
    """A Llama of another family, with a sliding window in every layer."""
    return dataclasses.replace(in_every_layer(plain, window=window), family=family)


KNOWN: dict[str, ModelConfig] = {
    # Radford et al. 2019, table 2.
    "gpt2": _gpt2(768, 12, 12),
    "gpt2-medium": _gpt2(1024, 24, 16),
    "gpt2-large": _gpt2(1280, 36, 20),
    "gpt2-xl": _gpt2(1600, 48, 25),
    # Touvron et al. 2023, arXiv:2307.09288.
    "llama-2-7b": _llama_2(4096, 32, 32, 32, 11_008),
    "llama-2-13b": _llama_2(5120, 40, 40, 40, 13_824),
    "llama-2-70b": _llama_2(*_70B),
    # Grattafiori et al. 2024, arXiv:2407.21783, table 3.
    "llama-3-8b": _llama_3(*_8B),
    "llama-3-70b": _llama_3(*_70B),
    "llama-3.1-8b": _llama_3_1(*_8B),
    "llama-3.1-70b": _llama_3_1(*_70B),
    "llama-3.2-1b": _llama_3_2(2048, 16, 32, 8, 8192, head_dim=64),
    "llama-3.2-3b": _llama_3_2(3072, 28, 24, 8, 8192, head_dim=128),
    # Qwen team 2024, arXiv:2412.15115, table 1.
    "qwen2.5-0.5b": _qwen2(
        *(896, 24, 14, 2, 4864),
        vocab_size=151_936,
        max_positions=32_768,
        tied_head=True,
    ),
    "qwen2.5-1.5b": _qwen2(
        *(1536, 28, 12, 2, 8960),
        vocab_size=151_936,
        max_positions=131_072,
        tied_head=True,
    ),
    "qwen2.5-7b": _qwen2(
        *(3584, 28, 28, 4, 18_944), vocab_size=152_064, max_positions=131_072
    ),
    "qwen2.5-72b": _qwen2(
        *(8192, 80, 64, 8, 29_568),
        vocab_size=152_064,
        max_positions=131_072,
        norm_eps=1e-5,
    ),
    # Qwen team 2025, arXiv:2505.09388, table 1.
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tied_head=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12_288),
    "qwen3.5-4b": _qwen_3_5(2560, 32, 16, 4, 9216, tied_head=True),
    "qwen3.5-9b": _qwen_3_5(4096, 32, 16, 4, 12_288),
    "qwen3.5-27b": _qwen_3_5(5120, 64, 24, 4, 17_408, value_heads=48),
    # Jiang et al. 2023, arXiv:2310.06825, table 1.
    "mistral-7b": _windowed(
        "mistral", _llama(*_8B, vocab_size=32_000, max_positions=32_768), window=4096
    ),
    # Biderman et al. 2023, arXiv:2304.01373, table 1.
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "pythia-2.8b": _pythia(2560, 32, 32),
    "pythia-6.9b": _pythia(4096, 32, 32, vocab_size=50_432),
    "pythia-12b": _pythia(5120, 36, 40, vocab_size=50_688),
    # Gemma team 2024, arXiv:2408.00118, table 1.
    "gemma-2-2b": _gemma_2(2304, 26, 8, 4, 9216),
    "gemma-2-9b": _gemma_2(3584, 42, 16, 8, 14_336),
    "gemma-2-27b": _gemma_2(
        *(4608, 46, 32, 16, 36_864), head_dim=128, query_scalar=144
    ),
    # Gemma team 2025, arXiv:2503.19786, tables 1 and 2.
    "gemma-3-1b": _gemma_3(
        *(1152, 26, 4, 1, 6912),
        vocab_size=262_144,
        max_positions=32_768,
        window=512,
        rope_scaling=None,
    ),
    "gemma-3-4b": _gemma_3(2560, 34, 8, 4, 10_240),
    "gemma-3-12b": _gemma_3(3840, 48, 16, 8, 15_360),
    "gemma-3-27b": _gemma_3(5376, 62, 32, 16, 21_504, head_dim=128, query_scalar=168),
    "gemma-4-e2b": _gemma_4_e(
        *(1536, 35, 8, 1, 6144), shared_layers=20, wide=True, period=5
    ),
    "gemma-4-e4b": _gemma_4_e(2560, 42, 8, 2, 10_240, shared_layers=18, period=6),
    "gemma-4-31b": _gemma_4(
        *(5376, 60, 32, 16, 21_504),
        heads=GlobalHeads(512, 4, keys_as_values=True),
        max_positions=262_144,
        window=1024,
    ),
    "gemma-4-26b-a4b": dataclasses.replace(
        _gemma_4(
            *(2816, 30, 16, 8, 2112),
            heads=GlobalHeads(512, 2, keys_as_values=True),
            max_positions=262_144,
            window=1024,
        ),
        experts=Experts(count=128, per_token=8, beside_width=704),
    ),
    # Abdin et al. 2024, arXiv:2404.14219, section 2.
    "phi-3-mini-4k": _windowed(
        "phi3",
        _llama(3072, 32, 32, 32, 8192, vocab_size=32_064, max_positions=4096),
        window=2047,
    ),
    # Walsh et al. 2025, arXiv:2501.00656, table 2.
    "olmo-2-1b": _olmo_2(2048, 16, 16, 16, 8192),
    "olmo-2-7b": _olmo_2(4096, 32, 32, 32, 11_008),
    "olmo-2-13b": _olmo_2(5120, 40, 40, 40, 13_824),
    "olmo-2-32b": _olmo_2(5120, 64, 40, 8, 27_648),
    # Olmo team 2025, arXiv:2512.13961.
    "olmo-3-7b": _olmo_3(4096, 32, 32, 32, 11_008),
    "olmo-3-32b": _olmo_3(5120, 64, 40, 8, 27_648),
    "smollm3-3b": _smollm_3(2048, 36, 16, 4, 11_008),
    "granite-3.3-2b": _granite_3_3(
        *(2048, 40, 32, 8, 8192), head_dim=64, logit_divisor=8.0
    ),
    "granite-3.3-8b": _granite_3_3(
        *(4096, 40, 32, 8, 12_800), head_dim=128, logit_divisor=16.0
    ),
    "granite-4.0-350m": _granite_4(
        *(1024, 28, 16, 4, 2048), head_dim=64, logit_divisor=4.0, residual_scale=0.263
    ),
    "granite-4.0-1b": _granite_4(
        *(2048, 40, 16, 4, 4096), head_dim=128, logit_divisor=8.0
    ),
    "granite-4.0-micro": _granite_4(
        *(2560, 40, 40, 8, 8192), head_dim=64, logit_divisor=10.0
    ),
    **known.KNOWN,
}
