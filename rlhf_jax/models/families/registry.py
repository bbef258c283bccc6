"""Shapes of well-known checkpoints, so that a run can be planned without any file.

The figures are those of each model's config.json on the Hugging Face hub, without the
options that a family reads the same if they are missing. A test counts the parameters
against the published ones.
"""

from __future__ import annotations

import functools
from typing import Any

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import (
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    granite,
    granite4,
    keys,
    llama,
    mistral,
    olmo2,
    olmo3,
    phi3,
    qwen2,
    qwen3,
    smollm3,
)
from rlhf_jax.models.families.hybrids import gemma4, qwen3_5
from rlhf_jax.models.families.mixtures import gpt_oss, mixtral, qwen3_moe

_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
)


def _read(family: keys.Family, *sizes: int, **options: Any) -> ModelConfig:
    """The model of a config.json with these sizes, in the order above, and options."""
    return family.config_from_hf({**dict(zip(_SIZES, sizes, strict=False)), **options})


def _gpt2(n_embd: int, n_layer: int, n_head: int) -> ModelConfig:
    lengths = {"vocab_size": 50_257, "n_positions": 1024}
    sizes = {"n_embd": n_embd, "n_layer": n_layer, "n_head": n_head}
    return gpt2.config_from_hf(lengths | sizes)


def _pythia(*sizes: int, vocab_size: int = 50_304) -> ModelConfig:
    return _read(
        gpt_neox.FAMILY,
        *sizes,
        intermediate_size=4 * sizes[0],
        vocab_size=vocab_size,
        max_position_embeddings=2048,
    )


def _llama_3_scaled(factor: float) -> dict[str, Any]:
    """Options of Llama 3.1 and 3.2, whose context was stretched."""
    scaling = {"rope_type": "llama3", "factor": factor}
    scaling |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 8192}
    return {"max_position_embeddings": 131_072, "rope_scaling": scaling}


_llama_2 = functools.partial(
    *(_read, llama.FAMILY),
    vocab_size=32_000,
    max_position_embeddings=4096,
    rms_norm_eps=1e-5,
)
_llama_3 = functools.partial(
    *(_read, llama.FAMILY),
    vocab_size=128_256,
    max_position_embeddings=8192,
    rms_norm_eps=1e-5,
    rope_theta=500_000.0,
)
_llama_3_1 = functools.partial(_llama_3, **_llama_3_scaled(8.0))
_llama_3_2 = functools.partial(
    _llama_3, **_llama_3_scaled(32.0), tie_word_embeddings=True
)
_8B = (4096, 32, 32, 8, 14_336)
_70B = (8192, 80, 64, 8, 28_672)
_qwen2 = functools.partial(
    *(_read, qwen2.FAMILY), rope_theta=1e6, max_position_embeddings=131_072
)
_qwen3 = functools.partial(
    *(_read, qwen3.FAMILY),
    vocab_size=151_936,
    max_position_embeddings=40_960,
    rope_theta=1e6,
)
_qwen3_5 = functools.partial(
    *(_read, qwen3_5.FAMILY),
    vocab_size=248_320,
    max_position_embeddings=262_144,
    rope_theta=1e7,
)
_gemma_2 = functools.partial(
    *(_read, gemma2.FAMILY), vocab_size=256_000, max_position_embeddings=8192
)
_gemma_3 = functools.partial(
    *(_read, gemma3.FAMILY),
    sliding_window=1024,
    rope_scaling={"rope_type": "linear", "factor": 8.0},
)
_gemma_4 = functools.partial(
    *(_read, gemma4.FAMILY),
    max_position_embeddings=131_072,
    final_logit_softcapping=30.0,
)
_olmo_2 = functools.partial(
    *(_read, olmo2.FAMILY),
    vocab_size=100_352,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=5e5,
)
_olmo_3 = functools.partial(
    *(_read, olmo3.FAMILY),
    vocab_size=100_278,
    max_position_embeddings=65_536,
    rms_norm_eps=1e-6,
    rope_scaling={
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
    },
)


def _granite(
    family: keys.Family, *sizes: int, logits_scaling: float, **options: Any
) -> ModelConfig:
    """Attention logits are divided by the dimensions of a head."""
    hidden_size, _, num_heads, *_ = sizes
    return _read(
        family,
        *sizes,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_theta=1e7,
        tie_word_embeddings=True,
        embedding_multiplier=12.0,
        attention_multiplier=num_heads / hidden_size,
        logits_scaling=logits_scaling,
        **{"residual_multiplier": 0.22} | options,
    )


def _granite_4(*sizes: int, **options: Any) -> ModelConfig:
    return _granite(
        granite4.FAMILY,
        *sizes,
        vocab_size=100_352,
        shared_intermediate_size=sizes[-1],
        num_local_experts=0,
        layer_types=["attention"] * sizes[1],
        position_embedding_type="rope",
        **options,
    )


def _gpt_oss(num_layers: int, experts: int) -> ModelConfig:
    return _read(
        gpt_oss.FAMILY,
        *(2880, num_layers, 64, 8, 2880),
        vocab_size=201_088,
        max_position_embeddings=131_072,
        num_local_experts=experts,
        rope_scaling={
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
        },
    )


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
    "llama-3.2-1b": _llama_3_2(2048, 16, 32, 8, 8192),
    "llama-3.2-3b": _llama_3_2(3072, 28, 24, 8, 8192),
    # Qwen team 2024, arXiv:2412.15115, table 1.
    "qwen2.5-0.5b": _qwen2(
        *(896, 24, 14, 2, 4864),
        vocab_size=151_936,
        max_position_embeddings=32_768,
        tie_word_embeddings=True,
    ),
    "qwen2.5-1.5b": _qwen2(
        *(1536, 28, 12, 2, 8960), vocab_size=151_936, tie_word_embeddings=True
    ),
    "qwen2.5-7b": _qwen2(*(3584, 28, 28, 4, 18_944), vocab_size=152_064),
    "qwen2.5-72b": _qwen2(
        *(8192, 80, 64, 8, 29_568), vocab_size=152_064, rms_norm_eps=1e-5
    ),
    # Qwen team 2025, arXiv:2505.09388, table 1.
    "qwen3-0.6b": _qwen3(1024, 28, 16, 8, 3072, tie_word_embeddings=True),
    "qwen3-8b": _qwen3(4096, 36, 32, 8, 12_288),
    "qwen3.5-4b": _qwen3_5(2560, 32, 16, 4, 9216, tie_word_embeddings=True),
    "qwen3.5-9b": _qwen3_5(4096, 32, 16, 4, 12_288),
    "qwen3.5-27b": _qwen3_5(5120, 64, 24, 4, 17_408, linear_num_value_heads=48),
    # Jiang et al. 2023, arXiv:2310.06825, table 1.
    "mistral-7b": _read(
        mistral.FAMILY,
        *_8B,
        vocab_size=32_000,
        max_position_embeddings=32_768,
        rms_norm_eps=1e-5,
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
        *(4608, 46, 32, 16, 36_864), head_dim=128, query_pre_attn_scalar=144
    ),
    # Gemma team 2025, arXiv:2503.19786, tables 1 and 2.
    "gemma-3-1b": _gemma_3(
        *(1152, 26, 4, 1, 6912),
        vocab_size=262_144,
        max_position_embeddings=32_768,
        sliding_window=512,
        rope_scaling=None,
    ),
    "gemma-3-4b": _gemma_3(2560, 34, 8, 4, 10_240),
    "gemma-3-12b": _gemma_3(3840, 48, 16, 8, 15_360),
    "gemma-3-27b": _gemma_3(
        *(5376, 62, 32, 16, 21_504), head_dim=128, query_pre_attn_scalar=168
    ),
    "gemma-4-e2b": _gemma_4(
        *(1536, 35, 8, 1, 6144),
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 7,
        num_kv_shared_layers=20,
        use_double_wide_mlp=True,
    ),
    "gemma-4-e4b": _gemma_4(2560, 42, 8, 2, 10_240, num_kv_shared_layers=18),
    "gemma-4-31b": _gemma_4(
        *(5376, 60, 32, 16, 21_504),
        max_position_embeddings=262_144,
        sliding_window=1024,
        attention_k_eq_v=True,
        num_global_key_value_heads=4,
        hidden_size_per_layer_input=0,
    ),
    "gemma-4-26b-a4b": _gemma_4(
        *(2816, 30, 16, 8, 2112),
        max_position_embeddings=262_144,
        sliding_window=1024,
        attention_k_eq_v=True,
        num_global_key_value_heads=2,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=128,
        top_k_experts=8,
        moe_intermediate_size=704,
    ),
    # Abdin et al. 2024, arXiv:2404.14219, section 2.
    "phi-3-mini-4k": _read(
        phi3.FAMILY,
        *(3072, 32, 32, 32, 8192),
        vocab_size=32_064,
        max_position_embeddings=4096,
        sliding_window=2047,
    ),
    # Walsh et al. 2025, arXiv:2501.00656, table 2.
    "olmo-2-1b": _olmo_2(2048, 16, 16, 16, 8192),
    "olmo-2-7b": _olmo_2(4096, 32, 32, 32, 11_008),
    "olmo-2-13b": _olmo_2(5120, 40, 40, 40, 13_824),
    "olmo-2-32b": _olmo_2(5120, 64, 40, 8, 27_648),
    # Olmo team 2025, arXiv:2512.13961.
    "olmo-3-7b": _olmo_3(4096, 32, 32, 32, 11_008),
    "olmo-3-32b": _olmo_3(5120, 64, 40, 8, 27_648),
    "smollm3-3b": _read(
        smollm3.FAMILY,
        *(2048, 36, 16, 4, 11_008),
        vocab_size=128_256,
        max_position_embeddings=65_536,
        rope_theta=5e6,
    ),
    "granite-3.3-2b": _granite(
        granite.FAMILY,
        *(2048, 40, 32, 8, 8192),
        vocab_size=49_159,
        logits_scaling=8.0,
    ),
    "granite-3.3-8b": _granite(
        granite.FAMILY,
        *(4096, 40, 32, 8, 12_800),
        vocab_size=49_159,
        logits_scaling=16.0,
    ),
    "granite-4.0-350m": _granite_4(
        *(1024, 28, 16, 4, 2048), residual_multiplier=0.263, logits_scaling=4.0
    ),
    "granite-4.0-1b": _granite_4(2048, 40, 16, 4, 4096, logits_scaling=8.0),
    "granite-4.0-micro": _granite_4(2560, 40, 40, 8, 8192, logits_scaling=10.0),
    # Qwen team 2025, arXiv:2505.09388, table 2.
    "qwen3-30b-a3b": _read(
        qwen3_moe.FAMILY,
        *(2048, 48, 32, 4),
        head_dim=128,
        vocab_size=151_936,
        max_position_embeddings=40_960,
        rope_theta=1e6,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    ),
    # Jiang et al. 2024, arXiv:2401.04088, table 1.
    "mixtral-8x7b": _read(
        mixtral.FAMILY, *_8B, vocab_size=32_000, max_position_embeddings=32_768
    ),
    # OpenAI 2025, arXiv:2508.10925, table 1.
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
