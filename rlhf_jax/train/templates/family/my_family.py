"""Checkpoints whose `model_type` is "my_family": Llama with norms of query and key.

`config.json` is converted to a `ModelConfig` and back, and a table names every tensor.
`fields.only` refuses options that the decoder does not implement.
"""

import dataclasses

from rlhf_jax.models.families import keys, llama
from rlhf_jax.models.families.options import fields

NAME = "my_family"


def config_from_hf(config):
    """Converts a `config.json` to a `ModelConfig`."""
    fields.only(config, {"sliding_window": None})
    model = llama.decoder_from_hf(config, family=NAME)
    return dataclasses.replace(model, query_key_norm=True)


def config_to_hf(model):
    """Converts a `ModelConfig` to a `config.json`."""
    return llama.config_to_hf(model)


# Its architectures are MyFamilyForCausalLM and MyFamilyForSequenceClassification.
FAMILY = keys.Family(NAME, "MyFamily", config_from_hf, config_to_hf, llama.key_table)
