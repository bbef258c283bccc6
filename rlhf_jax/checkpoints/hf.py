"""Hugging Face checkpoints in and out: config.json and safetensors, without torch.

    model, params = hf.load("gpt2", dtype="float32")
    hf.save("out", model, params, tokenizer=tokenizer)

A causal language model is (model, params). A reward model is a sequence-classification
checkpoint with one label, (model, {"trunk": params without a head, "score": ...}).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from rlhf_jax.checkpoints import shards
from rlhf_jax.data import hub
from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import decoder, heads
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import (
    gemma2,
    gemma3,
    gpt2,
    gpt_neox,
    keys,
    llama,
    mistral,
    option_types,
    phi3,
    qwen2,
    qwen3,
)

if TYPE_CHECKING:  # its import announces on the terminal that torch is not there
    from transformers import PreTrainedTokenizerBase

Params = Any  # nested dict of arrays
Leaves = dict[str, Any]  # Params flattened to {"layers/mlp/up/kernel": leaf}
PathLike = str | os.PathLike[str]

_MODULES = (gpt2, gpt_neox, llama, mistral, phi3, qwen2, qwen3, gemma2, gemma3)
FAMILIES = {module.FAMILY.name: module.FAMILY for module in _MODULES}
MAX_SHARD_BYTES = 5_000_000_000

# What a config.json says of a model that no family here is, by option.
UNSUPPORTED = {
    "quantization_config": "quantised weights",
    "vision_config": "a vision tower",
    "audio_config": "an audio tower",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "n_routed_experts": "a mixture of experts",
}

_CONFIG = "config.json"
_GENERATION = "generation_config.json"
_DOWNLOADED = [
    *(_CONFIG, _GENERATION, "model*.safetensors", shards.INDEX),
    *("tokenizer*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.*", "merges.txt", "chat_template*"),
]


def load(
    path_or_repo_id: PathLike, *, dtype: DTypeLike | None = None, sharding: Any = None
) -> tuple[ModelConfig, Params]:
    """Reads a causal language model from a folder or the Hugging Face hub.

    Every tensor is checked against the family's key table before any is read. Then one
    leaf at a time is placed on the devices: of each tensor the slice that a device is
    to hold is read, and cast, so that host memory holds no more than such a part. A
    weight that is NaN or infinite is refused, by the process that reads it.

    Args:
      path_or_repo_id: a folder with config.json and safetensors, or "owner/name".
      dtype: of the parameters ("float32" to train them); None keeps the checkpoint's.
        The compute dtype is `model.dtype`, float32, whatever this is.
      sharding: one `jax.sharding.Sharding` for every leaf, or a tree of them that is a
        prefix of the parameters', or what makes one of the parameters' shapes, as
        `sharding.shardings` does; None is the default device.

    Raises:
      InputError: there is no such checkpoint, it is damaged, the decoder does not
        implement its model, or weights are not finite; names the file, the option or
        the tensors.
      TypeError: dtype is not a float.
    """
    with _reading(path_or_repo_id) as folder:
        config = shards.read_json(folder / _CONFIG)
        family = _family(config)
        _expect(
            config,
            architecture=family.causal,
            elsewhere={family.classifier: "read it with hf.load_reward"},
        )
        model = family.config_from_hf(config)
        shapes = _shapes(model)
        table = family.key_table(model)
        tensors = shards.Tensors(folder)
        leaves = _read(tensors, table, model=model, shapes=shapes, dtype=dtype)
        params = _place(leaves, shapes=shapes, sharding=sharding)
        tensors.check_finite()
        return model, params


def load_reward(
    path_or_repo_id: PathLike, *, dtype: DTypeLike | None = None, sharding: Any = None
) -> tuple[ModelConfig, Params]:
    """Reads a reward model: sequence classification with one label.

    Args and errors as for `load`.

    Returns:
      The model and {"trunk": ..., "score": {"kernel": [D], "bias": f32[]}}. The bias is
      the tensor `score.bias` if there is one, or config.json's `score_bias`, which
      `save_reward` writes, or 0.
    """
    with _reading(path_or_repo_id) as folder:
        config = shards.read_json(folder / _CONFIG)
        family = _family(config)
        _expect(
            config,
            architecture=family.classifier,
            elsewhere={family.causal: "read it with hf.load"},
        )
        labels = config.get("num_labels", len(config.get("id2label", "ab")))
        if labels != 1:
            raise InputError(
                f"{_CONFIG}: expected num_labels = 1 of a reward model, got {labels}; "
                f"use a checkpoint that was trained to give one score"
            )
        model = family.config_from_hf(config)
        shapes = _scalar_shapes(model)
        table = family.key_table(model).scalar()
        tensors = shards.Tensors(folder)
        leaves = itertools.chain(
            _read(tensors, table, model=model, shapes=shapes, dtype=dtype),
            [("score/bias", _score_bias(tensors, config))],
        )
        params = _place(leaves, shapes=shapes, sharding=sharding)
        tensors.check_finite()
        return model, params


def model_config(path_or_repo_id: PathLike) -> ModelConfig:
    """The shape of a causal language model or reward model, from config.json alone.

    Raises:
      InputError: there is no such checkpoint, or the decoder does not implement it.
    """
    with _reading(path_or_repo_id, patterns=[_CONFIG]) as folder:
        config = shards.read_json(folder / _CONFIG)
        return _family(config).config_from_hf(config)


def stop_ids(path_or_repo_id: PathLike) -> tuple[int, ...]:
    """Ids that end a text: `eos_token_id` of generation_config.json, or config.json.

    Raises:
      InputError: there is no such checkpoint, or a file is unreadable.
    """
    with _reading(path_or_repo_id) as folder:
        config = shards.read_json(folder / _CONFIG)
        if (folder / _GENERATION).exists():
            config |= shards.read_json(folder / _GENERATION)
        return option_types.token_ids(config.get("eos_token_id"), option="eos_token_id")


def save(
    path: PathLike,
    model: ModelConfig,
    params: Params,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_ids: Sequence[int] | None = None,
    pad_id: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a checkpoint that `transformers` loads: all of it, or nothing.

    Args:
      path: a folder that does not exist yet, or is empty.
      params: in the dtype that the checkpoint is to have.
      tokenizer: written beside the weights.
      stop_ids, pad_id: `eos_token_id` and `pad_token_id` of config.json; None takes the
        tokenizer's.
      max_shard_bytes: tensors beyond this many bytes go into a next file.

    Raises:
      InputError: the folder is in use, the parameters are not the model's, or the
        family's config.json cannot express the model.
    """
    family = FAMILIES[model.family]
    leaves = _leaves_of(params, shapes=_shapes(model))
    config = {
        "architectures": [family.causal],
        **_config_to_hf(family, model),
        **_special_ids(tokenizer, stop_ids=stop_ids, pad_id=pad_id),
        "dtype": leaves["embed/tokens"].dtype.name,
    }
    table = family.key_table(model)
    tensors = keys.write(table, model=model, leaves=leaves, fetch=processes.whole)
    _write(path, config, tensors, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes)


def save_reward(
    path: PathLike,
    model: ModelConfig,
    params: Params,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_ids: Sequence[int] | None = None,
    pad_id: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a reward model as sequence classification with one label.

    Args and errors as for `save`. `transformers` needs `pad_id` to score a batch. Its
    architecture has no bias: ours becomes `score_bias` in config.json, so that its
    scores are ours less that constant.
    """
    family = FAMILIES[model.family]
    leaves = _leaves_of(params, shapes=_scalar_shapes(model))
    bias = float(leaves["score/bias"])
    config = {
        "architectures": [family.classifier],
        **_config_to_hf(family, model),
        **_special_ids(tokenizer, stop_ids=stop_ids, pad_id=pad_id),
        "dtype": leaves["trunk/embed/tokens"].dtype.name,
        "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0},
        **({"score_bias": bias} if bias != 0.0 else {}),
    }
    table = family.key_table(model).scalar()
    tensors = keys.write(table, model=model, leaves=leaves, fetch=processes.whole)
    _write(path, config, tensors, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes)


@contextlib.contextmanager
def _reading(
    path_or_repo_id: PathLike, *, patterns: Sequence[str] = _DOWNLOADED
) -> Iterator[Path]:
    """The folder of a checkpoint; every InputError inside begins with its name."""
    folder = hub.folder(path_or_repo_id, patterns=patterns)
    try:
        yield folder
    except InputError as error:
        raise InputError(f"checkpoint {path_or_repo_id}: {error}") from error.__cause__


def _family(config: Mapping[str, Any]) -> keys.Family:
    """The family of a checkpoint. Code that comes with one (`auto_map`) is never run.

    Raises:
      InputError: it is of none, or has what none has.
    """
    option_types.check(config)
    name = config.get("model_type")
    for option, feature in UNSUPPORTED.items():
        if config.get(option):
            raise InputError(
                f"{_CONFIG}: expected a dense language model in floating point, got a "
                f"{name} with {feature} ({option}), which is not supported; use a "
                f"checkpoint without, of {', '.join(FAMILIES)}"
            )
    if name not in FAMILIES:
        code = "; its own code (auto_map) is never run" if "auto_map" in config else ""
        raise InputError(
            f"{_CONFIG}: expected model_type to be one of {', '.join(FAMILIES)}; got "
            f"{name!r} ({config.get('architectures')}), which is not supported{code}"
        )
    return FAMILIES[name]


def _expect(
    config: Mapping[str, Any], *, architecture: str, elsewhere: dict[str, str]
) -> None:
    got = next(iter(config.get("architectures") or [architecture]))
    if got != architecture:
        remedy = elsewhere.get(got, "it is not supported")
        raise InputError(
            f"{_CONFIG}: expected the architecture {architecture}, got {got}; {remedy}"
        )


def _shapes(model: ModelConfig) -> Leaves:
    return _eval_shapes(lambda key: decoder.init(key, model=model))


def _scalar_shapes(model: ModelConfig) -> Leaves:
    def init(key: jax.Array) -> Params:
        trunk = decoder.init(key, model=model)
        trunk.pop("head", None)
        return {"trunk": trunk, "score": heads.zero_score(model=model)}

    return _eval_shapes(init)


def _eval_shapes(init: Callable[[jax.Array], Params]) -> Leaves:
    return _flatten(jax.eval_shape(init, jax.random.key(0)))


def _flatten(tree: Params) -> Leaves:
    leaves: Any = traverse_util.flatten_dict(tree, sep="/")
    return leaves


def _read(
    tensors: shards.Tensors,
    table: keys.Table,
    *,
    model: ModelConfig,
    shapes: Leaves,
    dtype: DTypeLike | None,
) -> Iterator[tuple[str, keys.Unread]]:
    target = None if dtype is None else jnp.dtype(dtype)
    if target is not None and not jnp.issubdtype(target, jnp.floating):
        raise TypeError(f"expected a float dtype for parameters, got {target}")
    headers = tensors.headers
    if not any(name.startswith(table.prefix) for name in headers):
        table = table.bare()
    keys.check(table, model=model, leaves=shapes, headers=headers)
    return keys.read(
        table, model=model, leaves=shapes, headers=headers, tensor=tensors, dtype=target
    )


def _score_bias(tensors: shards.Tensors, config: Mapping[str, Any]) -> np.ndarray:
    if keys.SCORE_BIAS not in tensors.headers:
        return np.array(config.get("score_bias", 0.0), np.float32)
    shape = tensors.headers[keys.SCORE_BIAS].shape
    if shape != (1,):
        raise InputError(
            f"expected {keys.SCORE_BIAS} [1], got {list(shape)}; use a checkpoint that "
            f"was trained to give one score"
        )
    return np.asarray(tensors(keys.SCORE_BIAS)[:], np.float32).reshape(())


def _place(
    leaves: Iterable[tuple[str, keys.Unread | np.ndarray]],
    *,
    shapes: Leaves,
    sharding: Any,
) -> Params:
    tree = traverse_util.unflatten_dict(shapes, sep="/")
    shardings = jax.tree.broadcast(
        sharding(tree) if callable(sharding) else sharding,
        tree,
        is_leaf=lambda node: node is None,
    )
    sharding_of = _flatten(shardings)
    placed = {}
    # The largest first: what is read beside what is placed already is then small.
    for path, leaf in sorted(leaves, key=lambda item: -math.prod(item[1].shape)):
        if sharding_of[path] is None:
            placed[path] = jnp.array(leaf[(slice(None),) * len(leaf.shape)])
        else:
            # Each process reads what its devices hold, a device after the other.
            held = sharding_of[path].addressable_devices_indices_map(leaf.shape)
            kind, parts = sharding_of[path].memory_kind, []
            alike = sorted(held.items(), key=lambda item: str(item[1]))
            for _, copies in itertools.groupby(alike, key=lambda item: str(item[1])):
                copies = list(copies)
                part = leaf[copies[0][1]]
                for device, _ in copies:
                    there = SingleDeviceSharding(device, memory_kind=kind)
                    parts.append(jax.device_put(part, there))
                del part
            placed[path] = jax.make_array_from_single_device_arrays(
                leaf.shape, sharding_of[path], parts
            )
    return traverse_util.unflatten_dict(placed, sep="/")


def _leaves_of(params: Params, *, shapes: Leaves) -> Leaves:
    """The leaves of params, which must be those of the model."""
    leaves = _flatten(params)
    problems = [f"missing: {path}" for path in shapes if path not in leaves]
    for path, leaf in leaves.items():
        if path not in shapes:
            problems.append(f"unknown: {path} {list(leaf.shape)}")
        elif leaf.shape != shapes[path].shape:
            problems.append(
                f"misshapen: {path}, expected {list(shapes[path].shape)}, got "
                f"{list(leaf.shape)}"
            )
    if problems:
        raise InputError(
            "expected the parameters of the model that is to be saved, got others:\n  "
            + "\n  ".join(problems)
        )
    return leaves


def _config_to_hf(family: keys.Family, model: ModelConfig) -> dict[str, Any]:
    config = family.config_to_hf(model)
    # What is read back must be this model, but for what is not of a checkpoint.
    read_back = dataclasses.replace(
        family.config_from_hf(config).run_as(model),
        vocab_multiple=model.vocab_multiple,
    )
    before, after = dataclasses.asdict(model), dataclasses.asdict(read_back)
    lost = [
        f"{name} = {before[name]!r}" for name in before if before[name] != after[name]
    ]
    if lost:
        raise InputError(
            f"expected a model that the config.json of {family.name} can express, got "
            f"{', '.join(lost)}; change these fields"
        )
    return {"model_type": family.name, **config}


def _special_ids(
    tokenizer: PreTrainedTokenizerBase | None,
    *,
    stop_ids: Sequence[int] | None,
    pad_id: int | None,
) -> dict[str, Any]:
    """All three, always: transformers fills in the family's own for an absent one."""
    bos: Any = None
    eos: Any = None
    pad: Any = None
    if tokenizer is not None:
        bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
        pad = tokenizer.pad_token_id
    if stop_ids is not None:
        eos = stop_ids[0] if len(stop_ids) == 1 else list(stop_ids) or None
    return {
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad if pad_id is None else pad_id,
    }


def _write(
    path: PathLike,
    config: dict[str, Any],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    tokenizer: PreTrainedTokenizerBase | None,
    max_shard_bytes: int,
) -> None:
    if not processes.is_first():
        for _ in tensors:  # it takes part in bringing them to the first
            pass
        return
    with shards.new_folder(Path(path)) as folder:
        shards.write_json(folder / _CONFIG, config)
        shards.write(folder, tensors, max_shard_bytes=max_shard_bytes)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
