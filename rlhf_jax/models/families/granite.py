"""Granite 3: Llama with the multipliers of maximal updates (arXiv:2203.03466).

Numbers in config.json multiply embeddings, the outputs of attention and MLP, and
attention logits, and divide the logits over the vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import fields

MULTIPLIERS = {
    "embedding_multiplier": "embed_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "query_scale",
    "logits_scaling": "logit_divisor",
}


def config_from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """The decoder of a Granite `config.json`."""
    return decoder_from_hf(config, family="granite")


def decoder_from_hf(config: Mapping[str, Any], *, family: str) -> ModelConfig:
    """The decoder of the options that Granite 3 and 4 name alike.

    Raises:
      InputError: an option that the decoder does not implement, by name.
    """
    scales = {
        ours: float(fields.option(config, theirs, 1.0))
        for theirs, ours in MULTIPLIERS.items()
    }
    model = llama.decoder_from_hf(config, family=family)
    return dataclasses.replace(model, **scales)


def config_to_hf(model: ModelConfig) -> dict[str, Any]:
    """The `config.json` that `config_from_hf` reads back."""
    scales = dataclasses.asdict(model)
    return llama.config_to_hf(model) | {
        theirs: scales[ours] for theirs, ours in MULTIPLIERS.items()
    }


FAMILY = keys.Family(
    "granite", "Granite", config_from_hf, config_to_hf, llama.key_table
)
