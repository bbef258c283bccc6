"""Checks, reads and writes the tensors of a checkpoint by the key table of a family.

It also refuses folders of adapters, and weights that are not finite.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families.keys import Key, Table
from rlhf_jax.runs import parsing

FLOATS = {  # dtypes of safetensors that we read
    "F32": jnp.dtype("float32"),
    "F16": jnp.dtype("float16"),
    "BF16": jnp.dtype("bfloat16"),
}


@dataclasses.dataclass(frozen=True)
class Header:
    """The shape and dtype of a tensor in a safetensors file."""

    shape: tuple[int, ...]
    dtype: str  # "F32", "BF16", ...


def check(
    table: Table,
    *,
    model: ModelConfig,
    leaves: Mapping[str, Any],
    headers: Mapping[str, Header],
) -> None:
    """Raises InputError with every tensor that is missing, unknown or misshapen.

    Args:
      leaves: anything with a shape, one for each path of the table.
      headers: of the checkpoint's tensors.
    """
    least, what = model.num_layers, "layers"
    if model.experts is not None and any(key.stacked == 2 for key in table.keys):
        least, what = least * model.experts.count, "experts in all layers"
    if least > len(headers):  # before making a name for each layer of a wrong count
        raise InputError(
            f"config.json: expected a number of {what} that the checkpoint can hold, "
            f"which has {len(headers)} tensors, got {least}; do config.json "
            f"and the weights belong together?"
        )
    expected = {
        name: (key.shape(leaves, model.vocab_size), key)
        for key in table.keys
        for name in key.names(model)
    }
    ignored = {
        name.format(layer=layer)
        for name in (*table.ignored, *([table.tied] if table.tied else []))
        for layer in range(model.num_layers)
    }
    problems = [f"missing: {name}" for name in expected if name not in headers]
    for name, header in headers.items():
        if name not in expected:
            if name not in ignored:
                problems.append(f"unknown: {name} {list(header.shape)}")
            continue
        shape, key = expected[name]
        if header.shape != shape:
            hint = (
                " (rows are the vocabulary: config.json's vocab_size disagrees)"
                if key.layout == "vocabulary" and header.shape[1:] == shape[1:]
                else ""
            )
            problems.append(
                f"misshapen: {name}, expected {list(shape)}, got "
                f"{list(header.shape)}{hint}"
            )
        elif header.dtype not in FLOATS:
            problems.append(
                f"misshapen: {name}, expected {', '.join(FLOATS)}, got {header.dtype}"
            )
    if problems:
        raise InputError(
            f"expected the {len(expected)} tensors of a {model.family} with "
            f"{model.num_layers} layers, got {len(headers)} tensors with "
            f"{len(problems)} problems; do config.json and the weights belong "
            "together?\n  " + "\n  ".join(problems)
        )


@dataclasses.dataclass(frozen=True)
class Unread:
    """A leaf of ours that is still in a checkpoint; `unread[index]` reads a slice."""

    shape: tuple[int, ...]
    dtype: np.dtype
    key: Key
    names: list[str]  # of the checkpoint's tensors; one per layer if it is stacked
    columns: np.ndarray  # i64, the column in the checkpoint's tensor of each of ours
    vocab_size: int
    read: Callable[[str, Any], np.ndarray]  # a slice of a checkpoint's tensor

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """Reads a slice, in our layout and dtype, and nothing else."""
        ranges = [
            slice(*part.indices(size)[:2])
            for part, size in zip(index, self.shape, strict=True)
        ]
        # Zeros, which rows of the vocabulary's padding keep.
        filled = np.zeros([part.stop - part.start for part in ranges], self.dtype)
        count = self.key.stacked
        names = np.reshape(self.names, self.shape[:count])[(*ranges[:count], ...)]
        for place in np.ndindex(names.shape):
            self._fill(filled[place], str(names[place]), ranges[count:])
        return filled

    def _fill(self, out: np.ndarray, name: str, ranges: list[slice]) -> None:
        *others, last = ranges
        columns = self.columns[last]
        if self.key.head_dim == 1 and columns.size:
            # Interleaved columns: read the whole range, then select ours.
            first = int(columns[0])
            run = slice(first, int(columns[-1]) + 1)
            window = self.key.window([*others, run], self.vocab_size)
            part = self.key.from_hf(self.read(name, window))
            out[...] = part[..., columns - first]
            return
        # Columns that are contiguous in both layouts are read together.
        ends = np.flatnonzero(np.diff(columns, append=-1) != 1) + 1
        for start, end in itertools.pairwise([0, *ends.tolist()]):
            run = slice(int(columns[start]), int(columns[end - 1]) + 1)
            window = self.key.window([*others, run], self.vocab_size)
            if all(part.start < part.stop for part in window):
                part = self.key.from_hf(self.read(name, window))
                out[..., start:end][: len(part)] = part


def read(
    table: Table,
    *,
    model: ModelConfig,
    leaves: Mapping[str, Any],
    headers: Mapping[str, Header],
    read: Callable[[str, Any], np.ndarray],
    dtype: np.dtype | None,
) -> Iterator[tuple[str, Unread]]:
    """Yields our leaves as (path, `Unread`).

    Args:
      leaves, headers: as for `check`, which has passed.
      read: (name, slices) -> that part of a checkpoint's tensor.
      dtype: of the leaves; None keeps the checkpoint's.
    """
    for key in table.keys:
        names = key.names(model)
        stored = jnp.result_type(*(FLOATS[headers[name].dtype] for name in names))
        columns = key.columns(sum(leaves[path].shape[-1] for path in key.paths))
        for path in key.paths:
            shape = leaves[path].shape
            own, columns = columns[: shape[-1]], columns[shape[-1] :]
            yield (
                path,
                Unread(
                    shape=shape,
                    dtype=stored if dtype is None else dtype,
                    key=key,
                    names=names,
                    columns=own,
                    vocab_size=model.vocab_size,
                    read=read,
                ),
            )


def write(
    table: Table,
    *,
    model: ModelConfig,
    leaves: Mapping[str, jax.Array],
    fetch: Callable[[jax.Array], np.ndarray] = np.asarray,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields the checkpoint's tensors, contiguous, in the dtype of our leaves.

    Args:
      fetch: brings a leaf to the host.
    """
    for key in table.keys:
        parts = [fetch(leaves[path]) for path in key.paths]
        places = np.ndindex(parts[0].shape[: key.stacked])
        for place, name in zip(places, key.names(model), strict=True):
            yield name, key.to_hf([part[place] for part in parts], model.vocab_size)


ADAPTER = "adapter_config.json"  # PEFT's name of the config
CHUNK = 1 << 16  # entries checked at a time, so that they stay in the cache


def refuse_adapter(folder: Path) -> None:
    """Raises InputError if a folder without a whole model holds an adapter.

    No option takes an adapter in place of a model: the run would have to find the base
    by a name that may mean another folder here.
    """
    if not (folder / ADAPTER).exists():
        return
    try:
        options = parsing.read_object(
            folder / ADAPTER, expected="the config of an adapter", advice=""
        )
        base, task = options.get("base_model_name_or_path"), options.get("task_type")
    except InputError:
        base, task = None, None
    kind = "SequenceClassification" if task == "SEQ_CLS" else "CausalLM"
    merged = folder.absolute().parent / "model"  # where a run of ours writes it
    elsewhere = f", or give {merged}" if (merged / "config.json").exists() else ""
    raise InputError(
        f"expected a whole model, got an adapter ({ADAPTER}) of the base "
        f"{base!r:.200}; no option takes an adapter in place of a model: merge it into "
        f"its base with PEFT, "
        f"`AutoPeftModelFor{kind}.from_pretrained(ADAPTER).merge_and_unload()"
        f".save_pretrained(MERGED)`, and give MERGED{elsewhere}"
    )


class NotFinite(NamedTuple):
    """Counts of the entries of an array that are not finite."""

    nan: int = 0
    infinite: int = 0

    @classmethod
    def of(cls, array: np.ndarray) -> NotFinite:
        """Counts the entries of an array."""
        if not jnp.issubdtype(array.dtype, jnp.floating) or _all_finite(array):
            return cls()
        return cls(int(np.isnan(array).sum()), int(np.isinf(array).sum()))


def _all_finite(array: np.ndarray) -> bool:
    """`np.isfinite(array).all()` by exponents, as NumPy is slow for 16-bit floats."""
    bits = np.ascontiguousarray(array).reshape(-1).view(f"u{array.itemsize}")
    exponent = np.array(np.inf, array.dtype).view(bits.dtype)
    chunks = (bits[at : at + CHUNK] for at in range(0, bits.size, CHUNK))
    return all(((chunk & exponent) != exponent).all() for chunk in chunks)


def refuse_not_finite(counts: Mapping[str, tuple[NotFinite, int]]) -> None:
    """Raises InputError if there is an entry that is NaN or infinite.

    Args:
      counts: {name of a tensor: (its entries that are not finite, its size)}.
    """
    problems = [
        f"{name}: {which.nan} NaN and {which.infinite} infinite of {size} entries"
        for name, (which, size) in sorted(counts.items())
        if any(which)
    ]
    if problems:
        raise InputError(
            f"expected finite weights, got {len(problems)} tensors with NaN or "
            f"infinite entries:\n{checks.listed(problems)}\n"
            f"fetch the checkpoint again, or take one of before the run that wrote it "
            f"diverged"
        )
