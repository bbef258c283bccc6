"""Models and batches that compile quickly."""

import dataclasses
import functools

import jax
import numpy as np

from rlhf_jax import config, decoder

VOCAB = 13
GPT2 = config.gpt2(
    vocab_size=VOCAB, hidden_size=16, num_layers=2, num_heads=4, max_positions=24
)
# Grouped queries; of the rotary wavelengths one is kept, one is blended and two are
# divided.
LLAMA = config.llama(
    vocab_size=VOCAB,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=24,
    max_positions=24,
    rope_theta=500.0,
    rope_scaling=config.RopeScaling("llama3", 4.0, 0.2, 1.2, 8),
)
BOTH = [GPT2, LLAMA]
NAMES = ["gpt2", "llama"]
# Features of other families together; every second layer attends to four tokens.
MIXED = dataclasses.replace(
    LLAMA,
    num_layers=3,
    num_kv_heads=1,
    head_dim=12,
    rotary_dim=8,
    rope_scaling=config.RopeScaling(
        "yarn", 4.0, original_max_positions=8, beta_fast=2.0, attention_factor=1.1
    ),
    rope_local_theta=50.0,
    norm_from_one=True,
    query_key_norm=True,
    post_norms=True,
    sliding_window=4,
    local_layers=(True, False, True),
    query_scale=0.4,
    attention_softcap=1.5,
    logit_softcap=2.0,
    embed_scale=3.0,
    activation="gelu_tanh",
    tied_head=True,
)
# All layers local, with attention and MLP in parallel.
PARALLEL = dataclasses.replace(
    GPT2,
    positions="rope",
    rotary_dim=2,
    parallel_residual=True,
    tied_head=False,
    sliding_window=4,
    local_layers=(True, True),
)


# Norms after attention and MLP, a norm over all heads, local and global layers without
# positions, and multipliers.
LATE = dataclasses.replace(
    LLAMA,
    num_layers=3,
    query_key_norm=True,
    joint_head_norm=True,
    pre_norms=False,
    post_norms=True,
    sliding_window=4,
    local_layers=(True, True, False),
    unrotated_layers=(False, True, True),
    residual_scale=0.6,
    logit_divisor=0.7,
)

# DeltaNets in two of three layers, and gated attention with partial rotation.
HYBRID = dataclasses.replace(
    LLAMA,
    num_layers=6,
    rope_scaling=None,
    rotary_dim=4,
    norm_from_one=True,
    query_key_norm=True,
    output_gate=True,
    delta_net=config.DeltaNet(2, 4, key_dim=6, value_dim=4, conv_width=3),
    recurrent_layers=(True, True, False) * 2,
)


def bfloat16(model: config.ModelConfig) -> config.ModelConfig:
    return dataclasses.replace(model, dtype="bfloat16")


@functools.cache
def shapes(model: config.ModelConfig):
    """The shapes alone, since running `decoder.init` would compile a program."""
    return jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=model))


@functools.cache
def params(model: config.ModelConfig, seed: int = 0):
    """Large random numbers on every leaf, so that a lost leaf is detected."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        centre = 1.0 if path[-1].key == "scale" else 0.0
        drawn = centre + 0.2 * rng.normal(size=leaf.shape)
        # `jnp.asarray` would compile a program for every shape.
        return jax.device_put(drawn.astype(np.float32))

    return jax.tree.map_with_path(draw, shapes(model))


def with_rows_of_padding(params, model: config.ModelConfig, value: float):
    """Sets every row of the vocabulary's padding to `value`."""

    def fill(rows):
        filled = np.array(rows)
        filled[model.vocab_size :] = value
        return jax.device_put(filled)

    embed = {**params["embed"], "tokens": fill(params["embed"]["tokens"])}
    filled = {**params, "embed": embed}
    if not model.tied_head:
        filled["head"] = {"kernel": fill(params["head"]["kernel"])}
    return filled


def batch(lengths, size: int, *, side: str, seed: int = 0, padding: int = 0):
    """Random texts, which do not depend on size, side and padding id."""
    rng = np.random.default_rng(seed)
    tokens = np.full((len(lengths), size), padding, np.int32)
    mask = np.zeros((len(lengths), size), bool)
    for row, length in enumerate(lengths):
        columns = slice(size - length, size) if side == "left" else slice(length)
        tokens[row, columns] = rng.integers(0, VOCAB, length)
        mask[row, columns] = True
    return tokens, mask
