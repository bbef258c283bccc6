"""Reads checkpoints of `transformers` into models, with parameters on the devices."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import SingleDeviceSharding
from jax.typing import DTypeLike

from rlhf_jax.checkpoints import mapping, shards
from rlhf_jax.checkpoints.hf import casting, layout, multimodal, mxfp4
from rlhf_jax.checkpoints.hf.casting import SaveDtype
from rlhf_jax.checkpoints.hf.layout import Leaves, Params, PathLike
from rlhf_jax.data import hub, tokenization
from rlhf_jax.devices import processes
from rlhf_jax.functional.errors import InputError, located
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys
from rlhf_jax.models.families.options import fields
from rlhf_jax.runs.proof import exported

_GENERATION = "generation_config.json"
_DOWNLOADED = (
    *(mapping.ADAPTER, _GENERATION, "model*.safetensors", shards.INDEX),
    *tokenization.FILES,  # config.json too
)
_SHAPE = [layout.CONFIG, mapping.ADAPTER]


def load(
    path_or_repo_id: PathLike, *, dtype: DTypeLike | None = None, sharding: Any = None
) -> tuple[ModelConfig, Params]:
    """Reads a causal language model from a folder or the Hugging Face hub.

    Every tensor is checked against the family's key table before any is read. Then the
    leaves are placed on the devices one by one. Only the slice that a device needs is
    read and cast, so host memory holds one such slice at a time. NaN and infinite
    weights are refused by the process that reads them.

    Args:
      path_or_repo_id: a folder with config.json and safetensors, or "owner/name".
      dtype: of the parameters ("float32" to train them); None keeps the checkpoint's.
        The compute dtype, `model.dtype`, is float32 in either case.
      sharding: one `jax.sharding.Sharding` for every leaf, a tree of them that is a
        prefix of the parameters' tree, or a function from the parameters' shapes to
        such a tree (`sharding.shardings`). None is the default device.

    Returns:
      The model and its parameters, nested dicts of arrays.

    Raises:
      InputError: the checkpoint is missing, damaged or differs from its manifest, the
        decoder does not implement its model, or weights are not finite. The message
        names the file, the option or the tensors.
      TypeError: dtype is not a float.
    """
    with _reading(path_or_repo_id) as folder:
        config, family = _expected(folder, scores=False)
        tensors = _tensors(folder, of=path_or_repo_id)
        tied = family.config_from_hf(config)
        model = _tied_as_stored(tied, family=family, tensors=tensors)
        if model != tied:
            head = family.key_table(tied).tied
            named = config.get("tie_word_embeddings")
            why = "" if named else " (by its family's default)"
            _note(
                f"checkpoint {path_or_repo_id}: {layout.CONFIG} says "
                f"tie_word_embeddings{why}, but {head} is there and "
                f"differs from the embedding; it is used as a head of its own, as "
                f"transformers 5 does, and saved with tie_word_embeddings = false"
            )
        shapes, table = layout.shapes_of(model), family.key_table(model)
        leaves = _read(tensors, table, model=model, shapes=shapes, dtype=dtype)
        params = _place(leaves, shapes=shapes, sharding=sharding)
        tensors.check_finite()
        return model, params


def load_reward(
    path_or_repo_id: PathLike, *, dtype: DTypeLike | None = None, sharding: Any = None
) -> tuple[ModelConfig, Params]:
    """Reads a reward model (sequence classification with one label), as `load` does.

    Returns:
      The model and {"trunk": ..., "score": {"kernel": [D], "bias": f32[]}}. The bias is
      the tensor `score.bias`, else `score_bias` of config.json (which `save_reward`
      writes), else 0.

    Raises:
      InputError: there is no such checkpoint, it is damaged or has more than one label,
        the decoder does not implement its model, or weights are not finite.
      TypeError: dtype is not a float.
    """
    with _reading(path_or_repo_id) as folder:
        config, family = _expected(folder, scores=True)
        labels = config.get("num_labels", len(config.get("id2label", "ab")))
        if labels != 1:
            raise InputError(
                f"{layout.CONFIG}: expected num_labels = 1 of a reward model, got "
                f"{labels}; use a checkpoint that was trained to give one score"
            )
        model = family.config_from_hf(config)
        shapes = layout.scalar_shapes_of(model)
        table = family.key_table(model).scalar()
        tensors = _tensors(folder, of=path_or_repo_id)
        leaves = itertools.chain(
            _read(tensors, table, model=model, shapes=shapes, dtype=dtype),
            [("score/bias", _score_bias(tensors, config))],
        )
        params = _place(leaves, shapes=shapes, sharding=sharding)
        tensors.check_finite()
        return model, params


def model_config(path_or_repo_id: PathLike) -> ModelConfig:
    """Reads the shape of a language model or reward model from config.json.

    If the weights are on this machine and config.json says that the head is tied, the
    head is compared with the embedding, as in `load`.

    Raises:
      InputError: there is no such checkpoint, or the decoder does not implement it.
    """
    with _reading(path_or_repo_id, patterns=_SHAPE) as folder:
        config = _config(folder)
        family = layout.family_of(config)
        model = family.config_from_hf(config)
        scores = family.classifier in (config.get("architectures") or ())
        if scores or not model.tied_head:
            return model
        try:
            tensors = shards.Tensors(folder, named=multimodal.Names())
        except InputError:  # missing or damaged, which `load` will report
            return model
        return _tied_as_stored(model, family=family, tensors=tensors)


def stored_dtype(path_or_repo_id: PathLike) -> SaveDtype:
    """Returns the dtype of most weights of a checkpoint.

    Some have a few tensors in float32 besides bfloat16, such as norms or the score of a
    reward model. Entries are counted, not tensors; ties go to float32, then bfloat16.
    Without weights it is the dtype in config.json, or else float32.

    Raises:
      InputError: there is no such checkpoint, or a file is unreadable.
    """
    with _reading(path_or_repo_id) as folder:
        if not any(folder.glob("model*.safetensors")):
            config = _config(folder)
            named = config.get("dtype", config.get("torch_dtype"))
            return casting.of_most({str(named): 1})
        sizes: dict[str, int] = {}
        tensors = shards.Tensors(folder, named=multimodal.Names())
        for header in tensors.headers.values():
            if header.dtype in mapping.FLOATS:
                name = mapping.FLOATS[header.dtype].name
                sizes[name] = sizes.get(name, 0) + math.prod(header.shape)
        return casting.of_most(sizes)


def stop_ids(path_or_repo_id: PathLike) -> tuple[int, ...]:
    """Returns `eos_token_id` of generation_config.json, or else of config.json.

    Raises:
      InputError: there is no such checkpoint, or a file is unreadable.
    """
    with _reading(path_or_repo_id) as folder:
        config = _config(folder)
        if (folder / _GENERATION).exists():
            config |= shards.read_json(folder / _GENERATION)
        return fields.token_ids(config.get("eos_token_id"), option="eos_token_id")


@contextlib.contextmanager
def _reading(
    path_or_repo_id: PathLike, *, patterns: Sequence[str] = _DOWNLOADED
) -> Iterator[Path]:
    """Yields a checkpoint's folder; every InputError inside begins with its name."""
    folder = hub.folder(path_or_repo_id, patterns=patterns)
    with located(f"checkpoint {path_or_repo_id}"):
        if not (folder / layout.CONFIG).exists():
            mapping.refuse_adapter(folder)
        yield folder


def _config(folder: Path) -> dict[str, Any]:
    return multimodal.text_of(shards.read_json(folder / layout.CONFIG))


def _expected(folder: Path, *, scores: bool) -> tuple[dict[str, Any], keys.Family]:
    """Returns the config and family of a reward model (`scores`) or language model."""
    exported.require(folder)
    config = _config(folder)
    family = layout.family_of(config)
    expected = family.classifier if scores else family.causal
    elsewhere = {
        family.causal: "train one with `rlhf-jax reward-model`, or read it with "
        "hf.load",
        family.classifier: "a reward model is for --reward-model, or read it with "
        "hf.load_reward",
    }
    got = next(iter(config.get("architectures") or [expected]))
    if got != expected:
        raise InputError(
            f"{layout.CONFIG}: expected the architecture {expected}, got {got}; "
            f"{elsewhere.get(got, 'it is not supported')}"
        )
    return config, family


def _tensors(folder: Path, *, of: PathLike) -> shards.Tensors:
    """Opens the tensors; prints a note about files and tensors that are not read."""
    names = multimodal.Names()
    tensors = mxfp4.Tensors(folder, named=names)
    if names.left_out:
        _note(
            f"checkpoint {of}: only its language model is read; tensors left out: "
            f"{names.left_out}"
        )
    whole = (folder / shards.WEIGHTS).exists()
    if whole and (folder / shards.INDEX).exists():
        _note(
            f"checkpoint {of}: {shards.WEIGHTS} is read, as transformers does, and "
            f"{shards.INDEX} beside it is not; delete the one that is out of date"
        )
    if (folder / mapping.ADAPTER).exists():
        _note(
            f"checkpoint {of}: its whole model is read, without the adapter beside it "
            f"({mapping.ADAPTER}); merge the adapter where it is meant"
        )
    return tensors


def _tied_as_stored(
    model: ModelConfig, *, family: keys.Family, tensors: shards.Tensors
) -> ModelConfig:
    """Unties the model if the checkpoint's head differs from its embedding."""
    table = family.key_table(model).as_stored(tensors.headers)
    head, embedding = table.tied, table.embedding.name
    if head is None or head == embedding or head not in tensors.headers:
        return model
    if tensors.equal(head, embedding):
        return model
    return dataclasses.replace(model, tied_head=False)


def _note(text: str) -> None:
    if processes.is_first():
        print(f"note: {text}", file=sys.stderr)


def _read(
    tensors: shards.Tensors,
    table: keys.Table,
    *,
    model: ModelConfig,
    shapes: Leaves,
    dtype: DTypeLike | None,
) -> Iterator[tuple[str, mapping.Unread]]:
    target = None if dtype is None else jnp.dtype(dtype)
    if target is not None and not jnp.issubdtype(target, jnp.floating):
        raise TypeError(f"expected a float dtype for parameters, got {target}")
    headers = tensors.headers
    table = table.as_stored(headers)
    mapping.check(table, model=model, leaves=shapes, headers=headers)
    read = tensors.read
    return mapping.read(
        table, model=model, leaves=shapes, headers=headers, read=read, dtype=target
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
    bias = tensors.read(keys.SCORE_BIAS, slice(None))
    return np.asarray(bias, np.float32).reshape(())


def _place(
    leaves: Iterable[tuple[str, mapping.Unread | np.ndarray]],
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
    sharding_of = layout.flatten(shardings)
    placed = {}
    # The largest first, so that later reads beside the placed leaves are small.
    for path, leaf in sorted(leaves, key=lambda item: -math.prod(item[1].shape)):
        if sharding_of[path] is None:
            placed[path] = jnp.array(leaf[(slice(None),) * len(leaf.shape)])
        else:
            # Each process reads the slices of its own devices, one after the other.
            slices = sharding_of[path].addressable_devices_indices_map(leaf.shape)
            kind, parts = sharding_of[path].memory_kind, []
            alike = sorted(slices.items(), key=lambda item: str(item[1]))
            for _, copies in itertools.groupby(alike, key=lambda item: str(item[1])):
                copies = list(copies)
                part = leaf[copies[0][1]]
                for device, _ in copies:
                    place = SingleDeviceSharding(device, memory_kind=kind)
                    parts.append(jax.device_put(part, place))
                del part
            placed[path] = jax.make_array_from_single_device_arrays(
                leaf.shape, sharding_of[path], parts, dtype=leaf.dtype
            )
    return traverse_util.unflatten_dict(placed, sep="/")
