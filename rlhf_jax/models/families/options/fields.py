"""Options of a `config.json`: types, bounds, defaults, and what is not implemented.

A file that was edited by hand or cut off may have strings instead of numbers, or sizes
that no checkpoint has. One table has the valid values of each option, for all families,
and `check` applies it before a family reads the options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError

MAX_LAYERS = 10_000  # ten times the deepest decoder ever trained
MAX_SIZE = 2**31 - 1  # largest axis that int32 can index
Activation = Literal["gelu_tanh", "gelu", "silu"]
ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
}
ACTIVATIONS_TO_HF = {"gelu_tanh": "gelu_new", "gelu": "gelu", "silu": "silu"}


def _whole(least: int, most: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and least <= value <= most


def _number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) <= checks.LARGEST_FLOAT


def _positive(value: Any) -> bool:
    return _number(value) and value > 0


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _bits(value: Any) -> bool:
    return isinstance(value, list) and all(bit in (0, 1) for bit in value)


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


_KINDS: dict[str, tuple[Callable[[Any], bool], tuple[str, ...]]] = {
    f"a whole number from 1 to {MAX_LAYERS}": (
        _whole(1, MAX_LAYERS),
        ("n_layer", "num_hidden_layers"),
    ),
    f"a whole number from 1 to {MAX_SIZE}": (
        _whole(1, MAX_SIZE),
        (
            *("vocab_size", "n_embd", "n_head", "n_inner", "n_positions"),
            *("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
            *("intermediate_size", "max_position_embeddings"),
            *("sliding_window_pattern", "original_max_position_embeddings"),
            *("no_rope_layer_interval", "shared_intermediate_size"),
            *("linear_num_key_heads", "linear_num_value_heads"),
            *("linear_key_head_dim", "linear_value_head_dim"),
            *("linear_conv_kernel_dim", "full_attention_interval"),
            *("moe_intermediate_size", "global_head_dim"),
            *("num_global_key_value_heads", "vocab_size_per_layer_input"),
        ),
    ),
    f"a whole number from 0 to {MAX_SIZE}": (
        _whole(0, MAX_SIZE),
        (
            *("sliding_window", "max_window_layers"),
            *("num_local_experts", "num_experts", "decoder_sparse_step"),
            *("num_experts_per_tok", "experts_per_token", "top_k_experts"),
            *("hidden_size_per_layer_input", "num_kv_shared_layers"),
        ),
    ),
    "a finite number above 0": (
        _positive,
        (
            *("rope_theta", "rotary_emb_base", "rope_local_base_freq"),
            *("query_pre_attn_scalar", "attn_logit_softcapping"),
            *("final_logit_softcapping", "layer_norm_epsilon", "layer_norm_eps"),
            *("rms_norm_eps", "factor", "low_freq_factor", "high_freq_factor"),
            *("beta_fast", "beta_slow", "attention_factor"),
            *("embedding_multiplier", "residual_multiplier"),
            *("attention_multiplier", "logits_scaling"),
            *("swiglu_limit", "swiglu_alpha"),
        ),
    ),
    "a finite number": (
        _number,
        (
            *("rotary_pct", "partial_rotary_factor", "mscale", "mscale_all_dim"),
            *("score_bias",),
        ),
    ),
    "true or false": (
        _is(bool),
        (
            *("tie_word_embeddings", "attention_bias", "mlp_bias", "truncate"),
            *("use_parallel_residual", "use_sliding_window", "attn_output_gate"),
            *("norm_topk_prob", "attention_k_eq_v", "use_double_wide_mlp"),
            "enable_moe_block",
        ),
    ),
    "a text": (
        _is(str),
        (
            *("model_type", "activation_function", "hidden_act", "hidden_activation"),
            *("rope_type", "type", "position_embedding_type"),
        ),
    ),
    "a list of 0 and 1": (_bits, ("no_rope_layers",)),
    "a list of texts": (_texts, ("architectures", "layer_types")),
    "an object": (
        _is(dict),
        (
            *("rope_scaling", "rope_parameters", "id2label", "per_layer_config"),
            *("full_attention", "sliding_attention", "quantization_config"),
        ),
    ),
}
_EXPECTED = {
    option: (expected, fits)
    for expected, (fits, options) in _KINDS.items()
    for option in options
}
_GROUPS = ("rope_scaling", "rope_parameters", "full_attention", "sliding_attention")


def check(config: Mapping[str, Any], *, inside: str = "") -> None:
    """Raises InputError for an option of a wrong type, or out of bounds.

    A null option counts as absent: `required` and the defaults decide about it.

    Args:
      config: the options of a config.json, or of a group in it.
      inside: prefix of the group in messages, such as "rope_scaling.".
    """
    for option, value in config.items():
        if value is None or option not in _EXPECTED:
            continue
        expected, fits = _EXPECTED[option]
        if not fits(value):
            raise InputError(
                f"config.json: expected {inside}{option} to be {expected}, got "
                f"{shown(value)}; correct it, or fetch the file again"
            )
        if option in _GROUPS:
            check(value, inside=f"{inside}{option}.")


def token_ids(value: Any, *, option: str) -> tuple[int, ...]:
    """Reads one token id or a list of them as a tuple; null is ().

    Some checkpoints name ids beyond their vocabulary, or -1, which never occur.

    Raises:
      InputError: an id is not a whole number from -1.
    """
    ids = [] if value is None else value if isinstance(value, list) else [value]
    for one in ids:
        if not _whole(-1, MAX_SIZE)(one):
            raise InputError(
                f"expected {option} to be a token id, or a list of them, got "
                f"{shown(value)}; correct it in generation_config.json, or in "
                f"config.json where that has none"
            )
    return tuple(ids)


def shown(value: Any) -> str:
    """A value on one short line, for error messages."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if type(value) is int and abs(value) >= 10**30:
        return "an integer of more than 30 digits"
    return f"{value!r:.40}"


def required(config: Mapping[str, Any], option: str) -> Any:
    """`config[option]`; raises an InputError if it is absent or null."""
    if config.get(option) is None:
        raise InputError(
            f"config.json: expected a value for {option!r}, got none; "
            f"there is no model without it"
        )
    return config[option]


def option(config: Mapping[str, Any], option: str, default: Any) -> Any:
    """`config[option]`, or the default if it is absent or null."""
    value = config.get(option)
    return default if value is None else value


def filled(config: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options, with defaults for those that are absent or null."""
    own = {name: value for name, value in config.items() if value is not None}
    return {**config, **defaults, **own}


def only(config: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raises InputError for an option that has another value than the supported one.

    A null option counts as absent.
    """
    for option, value in supported.items():
        if config.get(option) not in (None, value):
            raise InputError(
                f"config.json: expected {option} = {value!r}, got {config[option]!r}; "
                f"the decoder implements nothing else, use another checkpoint"
            )


def activation(config: Mapping[str, Any], option: str, default: str) -> Activation:
    """The decoder's name of the activation in a config."""
    name = default if config.get(option) is None else config[option]
    if name not in ACTIVATIONS:
        raise InputError(
            f"config.json: expected {option} to be one of {', '.join(ACTIVATIONS)}; "
            f"got {name!r}; use another checkpoint"
        )
    return ACTIVATIONS[name]
