"""A small checkpoint is written and read back, to the bit."""

import json

import jax
import my_family
import numpy as np
import pytest

from rlhf_jax import decoder, hf

OPTIONS = {
    "vocab_size": 128,
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}


def test_a_checkpoint_is_read_as_it_was_written(tmp_path):
    model = my_family.config_from_hf(OPTIONS)
    init = jax.jit(decoder.init, static_argnames="model")
    params = init(jax.random.key(0), model=model)
    hf.save(tmp_path, model, params)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "my_family"
    assert config["architectures"] == ["MyFamilyForCausalLM"]
    assert config.items() >= OPTIONS.items()
    read_model, read_params = hf.load(tmp_path)
    assert read_model == model
    jax.tree.map(np.testing.assert_array_equal, read_params, params)


def test_an_option_that_is_not_implemented_is_refused():
    with pytest.raises(ValueError, match="sliding_window"):
        my_family.config_from_hf(OPTIONS | {"sliding_window": 8})
