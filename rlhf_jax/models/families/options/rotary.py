"""Rotary positions in a Hugging Face config: base, scaling and rotated share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig, RopeScaling
from rlhf_jax.models.families.options import fields


def parameters(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_scaling`, or `rope_parameters` (transformers 5), with the base as well."""
    return config.get("rope_scaling") or config.get("rope_parameters") or {}


def by_kind_of_layer(
    config: Mapping[str, Any],
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """`rope_parameters` of local and of global layers; only global ones may be scaled.

    Raises:
      InputError: local layers are scaled.
    """
    nested = config.get("rope_parameters") or {}
    near = nested.get("sliding_attention") or {}
    fields.only(near, {"rope_type": "default"})
    far = dict(nested.get("full_attention") or {}) | (config.get("rope_scaling") or {})
    return near, far


def from_hf(
    config: Mapping[str, Any], *, theta: str = "rope_theta"
) -> tuple[float, RopeScaling | None]:
    """Base and scaling of rotary positions.

    Args:
      config: with `rope_scaling`, or `rope_parameters` that hold the base as well.
      theta: the option of the base if `rope_parameters` has none; default 10,000.

    Raises:
      InputError: the decoder does not implement the kind of scaling.
    """
    scaling = parameters(config)
    bases = (scaling.get("rope_theta"), config.get(theta), 10_000.0)
    base = float(next(base for base in bases if base is not None))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    _refuse_two_bases(config, base=base)
    match kind:
        case "default":
            return base, None
        case "linear":
            return base, RopeScaling(
                "linear", float(fields.required(scaling, "factor"))
            )
        case "llama3":
            return base, RopeScaling(
                "llama3",
                float(fields.required(scaling, "factor")),
                float(fields.required(scaling, "low_freq_factor")),
                float(fields.required(scaling, "high_freq_factor")),
                _original_max_positions(config, scaling),
            )
        case "yarn":
            return base, _yarn(config, scaling)
    remedy = "use another checkpoint"
    if kind == "dynamic":  # unscaled up to that length
        remedy += ", or remove the scaling to read max_position_embeddings tokens"
    raise InputError(
        f"config.json: expected a rope_type of default, linear, llama3 or yarn, got "
        f"{kind!r}; {remedy}"
    )


def max_positions(config: Mapping[str, Any], scaling: RopeScaling | None) -> int:
    """The context in tokens: `max_position_embeddings`, which only yarn may lengthen.

        rope_type     context                          same as
        default       max_position_embeddings          transformers, vLLM
        yarn          factor × the original length,    vLLM; Qwen's recipe adds only
                      if that is more                  the scaling
        linear        max_position_embeddings          transformers; vLLM multiplies,
                                                       but some files (DeepSeek Coder)
                                                       state the long context already
        llama3        max_position_embeddings          transformers, vLLM: it is the
                                                       long context already
        dynamic, longrope                              rejected

    A saved config states this context, and so reads back as the same.

    Args:
      scaling: from `from_hf`.

    Raises:
      InputError: `max_position_embeddings` is missing, or the context is too long.
    """
    stated = fields.required(config, "max_position_embeddings")
    if scaling is None or scaling.kind != "yarn":
        return stated
    context = max(stated, int(scaling.factor * scaling.original_max_positions))
    if context > fields.MAX_SIZE:
        raise InputError(
            f"config.json: expected factor × original_max_position_embeddings of yarn "
            f"to be at most {fields.MAX_SIZE}, got {scaling.factor:g} × "
            f"{scaling.original_max_positions}; correct them"
        )
    return context


def to_hf(model: ModelConfig, *, theta: str = "rope_theta") -> dict[str, Any]:
    """The base and `rope_scaling`, which transformers 4 and 5 both read."""
    scaling = model.rope_scaling
    if scaling is None:
        return {theta: model.rope_theta, "rope_scaling": None}
    written: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
    if scaling.kind == "llama3":
        written |= {
            "low_freq_factor": scaling.low_freq_factor,
            "high_freq_factor": scaling.high_freq_factor,
        }
    if scaling.kind == "yarn":
        written |= {
            "beta_fast": scaling.beta_fast,
            "beta_slow": scaling.beta_slow,
            "truncate": scaling.truncate,
            "attention_factor": scaling.attention_factor,
        }
    if scaling.kind != "linear":
        written["original_max_position_embeddings"] = scaling.original_max_positions
    return {theta: model.rope_theta, "rope_scaling": written}


def rotary_dim(
    config: Mapping[str, Any],
    *,
    head_dim: int,
    share: str = "partial_rotary_factor",
    default: float = 1.0,
) -> int | None:
    """Dimensions of a head that rotate; None is all of them.

    Args:
      share: the option of the rotated share of a head, if `rope_parameters` lacks it.
      default: the share if both are missing.
    """
    inner = parameters(config).get("partial_rotary_factor")
    values = (inner, config.get(share), default)
    rotated = int(head_dim * next(part for part in values if part is not None))
    return None if rotated == head_dim else rotated


def share(model: ModelConfig) -> float:
    """The share of a head that `rotary_dim` reads back as the model's rotary_dim."""
    if model.rotary_dim is None:
        return 1.0
    share = model.rotary_dim / model.head_dim
    if int(model.head_dim * share) < model.rotary_dim:  # transformers truncates
        return math.nextafter(share, 1.0)
    return share


def _yarn(config: Mapping[str, Any], scaling: Mapping[str, Any]) -> RopeScaling:
    """As transformers' `_compute_yarn_parameters` (arXiv:2309.00071, section 3.4)."""
    original = _original_max_positions(config, scaling)
    factor = scaling.get("factor")
    if factor is None:
        factor = fields.required(config, "max_position_embeddings") / original

    def temperature(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = temperature(1.0)
        # DeepSeek's weights; if either is absent or 0, neither is used.
        above, below = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if above and below:
            attention_factor = temperature(above) / temperature(below)
    beta_fast, beta_slow = scaling.get("beta_fast"), scaling.get("beta_slow")
    return RopeScaling(
        "yarn",
        float(factor),
        original_max_positions=original,
        beta_fast=32.0 if beta_fast is None else float(beta_fast),
        beta_slow=1.0 if beta_slow is None else float(beta_slow),
        truncate=scaling.get("truncate") is not False,
        attention_factor=float(attention_factor),
    )


def _original_max_positions(
    config: Mapping[str, Any], scaling: Mapping[str, Any]
) -> int:
    name = "original_max_position_embeddings"
    # Outside of the scaling it takes precedence, as in transformers.
    originals = (config.get(name), scaling.get(name))
    original = next((original for original in originals if original is not None), None)
    if original is None:
        return fields.required(config, "max_position_embeddings")
    return original


def _refuse_two_bases(config: Mapping[str, Any], *, base: float) -> None:
    """Raises InputError if `rope_scaling` would hide another base in `rope_parameters`.

    transformers then computes with a base of 10,000.
    """
    other = (config.get("rope_parameters") or {}).get("rope_theta")
    if other is not None and float(other) != base:
        raise InputError(
            f"config.json: expected one base of the rotary positions, got rope_theta = "
            f"{other:g} in rope_parameters and {base:g} by rope_scaling, which goes "
            f"first; put the options of rope_scaling into rope_parameters"
        )
