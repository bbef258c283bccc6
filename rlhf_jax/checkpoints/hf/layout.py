"""The family, architecture and parameter shapes of a checkpoint."""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from flax import traverse_util

from rlhf_jax.extensions import entry_points
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys
from rlhf_jax.models.families.options import fields

Params = Any  # nested dict of arrays
Leaves = dict[str, Any]  # Params flattened to {"layers/mlp/up/kernel": leaf}
PathLike = str | os.PathLike[str]
_MODULES = {
    **{name: name for name in ("gpt2", "gpt_neox", "llama", "mistral", "phi3")},
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
    "gemma4_text": "hybrids.gemma4",
    **{name: name for name in ("olmo2", "olmo3", "smollm3", "granite")},
    "granitemoehybrid": "granite4",
    "qwen3_5_text": "hybrids.qwen3_5",
    **{name: f"mixtures.{name}" for name in ("qwen3_moe", "mixtral", "gpt_oss")},
}


class _Families(Mapping[str, keys.Family]):
    """{model_type: family}; a family is imported when it is first used.

    Families of other packages are entry points of `rlhf_jax.families`.
    """

    def __getitem__(self, name: str) -> keys.Family:
        if name in _MODULES:
            module = f"rlhf_jax.models.families.{_MODULES[name]}"
            return importlib.import_module(module).FAMILY
        return entry_points.load(name, group="families", kind=keys.Family)

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*_MODULES, *entry_points.names("families"))))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, name: object) -> bool:
        return name in _MODULES or name in entry_points.names("families")


FAMILIES = _Families()
# Options of config.json, with the feature, that are refused unless a family `reads`
# them.
UNSUPPORTED = {
    "quantization_config": "quantised weights",
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
}
CONFIG = "config.json"


def family_of(config: Mapping[str, Any]) -> keys.Family:
    """Returns the family of a checkpoint.

    Code that comes with a checkpoint (`auto_map`) is never run.

    Raises:
      InputError: no family has this `model_type`, or an option of `UNSUPPORTED` is set.
    """
    fields.check(config)
    name = config.get("model_type")
    family = FAMILIES[name] if name is not None and name in FAMILIES else None
    read = () if family is None else family.reads
    for option, feature in UNSUPPORTED.items():
        if config.get(option) and option not in read:
            raise InputError(
                f"{CONFIG}: expected a dense language model in floating point, got a "
                f"{name} with {feature} ({option}), which is not supported; use a "
                f"checkpoint without, of {', '.join(FAMILIES)}{_nearest(name)}"
            )
    if family is None:
        code = "; its own code (auto_map) is never run" if "auto_map" in config else ""
        got = f"{name!r} ({config.get('architectures')}), which is not supported"
        if name is None:
            got = "none; give the folder of a checkpoint, which is RUN/model for a run"
        raise InputError(
            f"{CONFIG}: expected model_type to be one of {', '.join(FAMILIES)}; got "
            f"{got}{_nearest(name)}{code}"
        )
    return family


def _nearest(name: str | None) -> str:
    """Suggests the family with the most similar name, for a message; "" if none."""
    # For gemma3, which has a vision tower, this is gemma3_text.
    texts = [family for family in FAMILIES if family == f"{name}_text"]
    close = texts or difflib.get_close_matches(name or "", FAMILIES, n=1)
    return f" (the nearest is {close[0]})" if close else ""


def shapes_of(model: ModelConfig) -> Leaves:
    """Returns the shape and dtype of every leaf of a decoder, by path."""
    return flatten(decoder.shapes(model))


def scalar_shapes_of(model: ModelConfig) -> Leaves:
    """Returns the shape and dtype of every leaf of a reward model, by path."""
    trunk = {key: leaf for key, leaf in decoder.shapes(model).items() if key != "head"}
    score = jax.eval_shape(lambda: decoder.zero_score(model=model))
    return flatten({"trunk": trunk, "score": score})


def flatten(tree: Params) -> Leaves:
    """Flattens nested dicts to {"layers/mlp/up/kernel": leaf}."""
    leaves: Any = traverse_util.flatten_dict(tree, sep="/")
    return leaves
