"""Shapes of well-known mixtures; `registry.py` has those of dense checkpoints."""

from __future__ import annotations

import dataclasses

from rlhf_jax.models import config
from rlhf_jax.models.config import Experts, ModelConfig, RopeScaling


def _qwen3(
    hidden_size: int, num_layers: int, num_heads: int, width: int
) -> ModelConfig:
    plain = config.llama(
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=4,
        head_dim=128,
        intermediate_size=width,
        vocab_size=151_936,
        max_positions=40_960,
        rope_theta=1e6,
    )
    experts = Experts(count=128, per_token=8)
    return dataclasses.replace(
        plain, family="qwen3_moe", query_key_norm=True, experts=experts
    )


def _gpt_oss(num_layers: int, count: int) -> ModelConfig:
    yarn = RopeScaling(
        "yarn",
        32.0,
        original_max_positions=4096,
        truncate=False,
        attention_factor=1.3465735902799727,  # 0.1 ln 32 + 1
    )
    plain = config.llama(
        hidden_size=2880,
        num_layers=num_layers,
        num_heads=64,
        num_kv_heads=8,
        head_dim=64,
        intermediate_size=2880,
        vocab_size=201_088,
        max_positions=131_072,
        rope_theta=150_000.0,
        rope_scaling=yarn,
    )
    return dataclasses.replace(
        plain,
        family="gpt_oss",
        norm_eps=1e-5,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        sinks=True,
        sliding_window=128,
        local_layers=tuple(layer % 2 == 0 for layer in range(num_layers)),
        experts=Experts(count=count, per_token=4, router_bias=True, gate_limit=7.0),
    )


KNOWN: dict[str, ModelConfig] = {
    # Qwen team 2025, arXiv:2505.09388, table 2.
    "qwen3-30b-a3b": _qwen3(2048, 48, 32, 768),
    # Jiang et al. 2024, arXiv:2401.04088, table 1.
    "mixtral-8x7b": dataclasses.replace(
        config.llama(
            hidden_size=4096,
            num_layers=32,
            num_heads=32,
            num_kv_heads=8,
            intermediate_size=14_336,
            vocab_size=32_000,
            max_positions=32_768,
            rope_theta=1e6,
        ),
        family="mixtral",
        norm_eps=1e-5,
        experts=Experts(count=8, per_token=2),
    ),
    # OpenAI 2025, arXiv:2508.10925, table 1.
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
