"""Writes models and reward models as checkpoints that `transformers` loads."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_jax.checkpoints import mapping, shards
from rlhf_jax.checkpoints.hf import casting, layout, tokenizer_files
from rlhf_jax.checkpoints.hf.casting import SaveDtype
from rlhf_jax.checkpoints.hf.layout import Leaves, Params, PathLike
from rlhf_jax.devices import processes
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys
from rlhf_jax.models.leaves import misfits

if TYPE_CHECKING:  # importing it prints a warning that torch is missing
    from transformers import PreTrainedTokenizerBase

MAX_SHARD_BYTES = 5_000_000_000


def save(
    path: PathLike,
    model: ModelConfig,
    params: Params,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_ids: Sequence[int] | None = None,
    pad_id: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: SaveDtype | None = None,
) -> None:
    """Writes a checkpoint that `transformers` loads, all or nothing.

    Args:
      path: a folder that does not exist yet, or is empty.
      tokenizer: written beside the weights.
      stop_ids, pad_id: `eos_token_id` and `pad_token_id` of config.json; None takes the
        tokenizer's.
      max_shard_bytes: the size of a file after which a new one is begun.
      dtype: of the checkpoint; weights are rounded to nearest even. None is the dtype
        of the parameters.

    Raises:
      InputError: the folder is in use, the parameters are not the model's, dtype cannot
        hold one of them, or the family's config.json cannot express the model.
    """
    family = layout.FAMILIES[model.family]
    leaves = _leaves_of(params, shapes=layout.shapes_of(model))
    casting.check(leaves, dtype=dtype)
    _write(
        path,
        leaves,
        model=model,
        table=family.key_table(model),
        architecture=family.causal,
        ids=_special_ids(tokenizer, stop_ids=stop_ids, pad_id=pad_id),
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
    )


def save_reward(
    path: PathLike,
    model: ModelConfig,
    params: Params,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    stop_ids: Sequence[int] | None = None,
    pad_id: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    dtype: SaveDtype | None = None,
) -> None:
    """Writes a reward model as sequence classification with one label.

    The architecture of `transformers` has no bias. Our bias is written as `score_bias`
    in config.json, and the scores of `transformers` are lower by that constant.

    The score is not rounded to `dtype`: it is a single row that was fitted to the
    scores' mean and spread. Readers that load all weights in one dtype round it.

    `transformers` scores the last token that is not padding. A stop token as padding
    would move the score to the token before it, so another special token pads; without
    one config.json has no padding, and `transformers` scores texts one by one.

    Args:
      params: {"trunk": ..., "score": ...}.
      dtype: of the trunk; None is the dtype of the parameters.
      path, tokenizer, stop_ids, pad_id, max_shard_bytes: as `save`; `transformers`
        needs `pad_id` to score a batch.

    Raises:
      InputError: as `save`.
    """
    family = layout.FAMILIES[model.family]
    leaves = _leaves_of(params, shapes=layout.scalar_shapes_of(model))
    trunk = {path: x for path, x in leaves.items() if path.startswith("trunk/")}
    casting.check(trunk, dtype=dtype)
    bias = float(leaves["score/bias"])
    ids = _special_ids(tokenizer, stop_ids=stop_ids, pad_id=pad_id)
    if ids["pad_token_id"] in _listed(ids["eos_token_id"]):
        tokenizer, ids["pad_token_id"] = _padded_apart(tokenizer, ids=ids)
    _write(
        path,
        leaves,
        model=model,
        table=family.key_table(model).scalar(),
        architecture=family.classifier,
        labels={
            "id2label": {"0": "LABEL_0"},
            "label2id": {"LABEL_0": 0},
            **({"score_bias": bias} if bias != 0.0 else {}),
        },
        ids=ids,
        tokenizer=tokenizer,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
    )


def _leaves_of(params: Params, *, shapes: Leaves) -> Leaves:
    """Flattens parameters; InputError unless their shapes are the model's."""
    leaves = layout.flatten(params)
    expected = {path: leaf.shape for path, leaf in shapes.items()}
    if problems := misfits(leaves, shapes=expected):
        raise InputError(
            "expected the parameters of the model that is to be saved, got others:\n  "
            + "\n  ".join(problems)
        )
    return leaves


def _config_to_hf(family: keys.Family, model: ModelConfig) -> dict[str, Any]:
    config = family.config_to_hf(model)
    # Reading the config back must give this model, except for fields of a run.
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
    """Returns all three ids: `transformers` replaces an absent one by a default."""
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


def _padded_apart(
    tokenizer: PreTrainedTokenizerBase | None, *, ids: dict[str, Any]
) -> tuple[PreTrainedTokenizerBase | None, int | None]:
    """Returns a tokenizer that pads with no stop token, and the id of its padding."""
    apart, pad_id, instead = tokenizer, None, "none, so texts are scored one by one"
    if tokenizer is not None:
        taken = {ids["bos_token_id"], *_listed(ids["eos_token_id"])}
        added = tokenizer.added_tokens_decoder
        free = [i for i in sorted(added) if added[i].special and i not in taken]
        if free:
            apart, pad_id = copy.deepcopy(tokenizer), free[0]
            apart.pad_token = instead = added[pad_id].content
    if processes.is_first():
        print(
            f"note: the padding of the saved reward model is {instead}: its tokenizer "
            f"pads with a stop token, which transformers would not score",
            file=sys.stderr,
        )
    return apart, pad_id


def _listed(ids: int | list[int] | None) -> list[int]:
    return ids if isinstance(ids, list) else [] if ids is None else [ids]


def _write(
    path: PathLike,
    leaves: Leaves,
    *,
    model: ModelConfig,
    table: keys.Table,
    architecture: str,
    ids: dict[str, Any],
    labels: dict[str, Any] | None = None,
    tokenizer: PreTrainedTokenizerBase | None,
    max_shard_bytes: int,
    dtype: SaveDtype | None,
) -> None:
    """Writes config.json (with `ids` and `labels`), the weights and the tokenizer."""
    embedding = leaves[table.embedding.paths[0]]
    stored = embedding.dtype.name if dtype is None else dtype
    config = {
        "architectures": [architecture],
        **_config_to_hf(layout.FAMILIES[model.family], model),
        **ids,
        # The name in transformers, and that of versions before 4.56 and of servers.
        "dtype": stored,
        "torch_dtype": stored,
        **(labels or {}),
    }
    tensors = mapping.write(table, model=model, leaves=leaves, fetch=processes.whole)
    tensors = casting.cast_all(tensors, dtype=dtype, but={keys.SCORE})
    if not processes.is_first():
        for _ in tensors:  # every process takes part in gathering the tensors
            pass
        return
    with shards.new_folder(Path(path)) as folder:
        shards.write_json(folder / layout.CONFIG, config)
        shards.write(folder, tensors, max_shard_bytes=max_shard_bytes)
        if tokenizer is not None:
            tokenizer_files.write(tokenizer, folder, max_positions=model.max_positions)
