"""How a family of Hugging Face checkpoints maps onto the decoder.

A `Family` translates a config both ways and has a `Table`: a line for each tensor,
naming it there and here. Reading, writing and checking all follow from that one table:

    Key("layers.{layer}.up_proj.weight", ("layers/mlp/up/kernel",), "transposed")

says that our leaf [L, D, F] is stacked from L tensors [F, D]. `leaves` below is the
parameter tree flattened to {"layers/mlp/up/kernel": leaf}.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig

FLOATS = {  # dtypes of safetensors that we read
    "F32": jnp.dtype("float32"),
    "F16": jnp.dtype("float16"),
    "BF16": jnp.dtype("bfloat16"),
}

Activation = Literal["gelu_tanh", "gelu", "silu"]
Layout = Literal["same", "transposed", "vocabulary", "row"]

ACTIVATIONS: dict[str, Activation] = {
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
    "swish": "silu",
}
ACTIVATIONS_TO_HF = {"gelu_tanh": "gelu_new", "gelu": "gelu", "silu": "silu"}
SCORE_BIAS = "score.bias"  # [1]


@dataclasses.dataclass(frozen=True)
class Header:
    """What a safetensors file says of a tensor."""

    shape: tuple[int, ...]
    dtype: str  # "F32", "BF16", ...


@dataclasses.dataclass(frozen=True)
class Key:
    """A Hugging Face tensor and the leaf, or leaves, of ours that it holds.

    Layouts, theirs -> ours:
      same        [in, out] -> [in, out]   (biases, norms, the Conv1D of GPT-2)
      transposed  [out, in] -> [in, out]   (Linear)
      vocabulary  [V, D] -> [V', D]        (rows padded with zeros)
      row         [1, D] -> [D]            (the head of a scalar model)
    """

    name: str  # with {layer} where there is one tensor a layer
    paths: tuple[str, ...]  # several are fused in that tensor, along their last axis
    layout: Layout = "same"
    head_dim: int | None = None  # fused by turns of so many columns; None leaf by leaf

    @property
    def stacked(self) -> bool:
        """Whether our leaf is stacked from one tensor of theirs per layer."""
        return "{layer}" in self.name

    def names(self, num_layers: int) -> list[str]:
        """The names of their tensors: one, or one per layer."""
        if not self.stacked:
            return [self.name]
        return [self.name.format(layer=layer) for layer in range(num_layers)]

    def shape(self, leaves: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
        """The shape of their tensor, of one layer, from the shapes of our leaves."""
        first, *_ = shapes = [
            leaves[path].shape[1 if self.stacked else 0 :] for path in self.paths
        ]
        fused = (*first[:-1], sum(shape[-1] for shape in shapes))
        match self.layout:
            case "transposed":
                return fused[::-1]
            case "vocabulary":
                return (vocab_size, *fused[1:])
            case "row":
                return (1, *fused)
            case _:
                return fused

    def columns(self, width: int) -> np.ndarray:
        """i64[width]: where each column of our leaves stands in their tensor.

        Two leaves a and b of two heads, a0 a1 b0 b1, are a0 b0 a1 b1 by turns.

        Args:
          width: of all leaves together, which then are of one width.
        """
        columns = np.arange(width)
        if self.head_dim is None:
            return columns
        turns = columns.reshape(-1, len(self.paths), self.head_dim)
        return turns.swapaxes(0, 1).reshape(-1)

    def window(self, ours: list[slice], vocab_size: int) -> tuple[slice, ...]:
        """Where their tensor has a part of ours, whose last slice is theirs already."""
        match self.layout:
            case "transposed":
                return tuple(reversed(ours))
            case "vocabulary":
                rows = ours[0]
                rows = slice(min(rows.start, vocab_size), min(rows.stop, vocab_size))
                return (rows, *ours[1:])
            case "row":
                return (slice(0, 1), *ours)
            case _:
                return tuple(ours)

    def from_hf(self, part: np.ndarray) -> np.ndarray:
        """Theirs -> ours."""
        match self.layout:
            case "transposed":
                return part.T
            case "row":
                return part[0]
            case _:
                return part

    def to_hf(self, parts: list[np.ndarray], vocab_size: int) -> np.ndarray:
        """Ours -> theirs."""
        tensor = np.concatenate(parts, axis=-1)
        if self.head_dim is not None:
            tensor = tensor[..., np.argsort(self.columns(tensor.shape[-1]))]
        match self.layout:
            case "transposed":
                tensor = tensor.T
            case "vocabulary":
                tensor = tensor[:vocab_size]
            case "row":
                tensor = tensor[None]
        return np.ascontiguousarray(tensor)


@dataclasses.dataclass(frozen=True)
class Table:
    """Every tensor of a model, in the order in which it is written."""

    prefix: str  # of the trunk; a checkpoint of the trunk alone leaves it out
    keys: tuple[Key, ...]
    ignored: tuple[str, ...] = ()  # tensors of theirs that hold nothing of the model

    def bare(self) -> Table:
        """The same table as a checkpoint without the prefix names it."""
        return dataclasses.replace(
            self,
            keys=tuple(
                dataclasses.replace(key, name=key.name.removeprefix(self.prefix))
                for key in self.keys
            ),
            ignored=tuple(name.removeprefix(self.prefix) for name in self.ignored),
        )

    def scalar(self) -> Table:
        """The table of {"trunk", "score"}: the trunk, and a score instead of a head.

        A head that was left in is ignored, and so is a bias of the score, which few
        checkpoints have: who reads it looks for it.
        """
        heads = [key for key in self.keys if key.paths[0].startswith("head/")]
        trunk = [
            dataclasses.replace(key, paths=tuple(f"trunk/{path}" for path in key.paths))
            for key in self.keys
            if key not in heads
        ]
        score = Key("score.weight", ("score/kernel",), "row")
        ignored = (*self.ignored, *(head.name for head in heads), SCORE_BIAS)
        return dataclasses.replace(self, keys=(*trunk, score), ignored=ignored)


@dataclasses.dataclass(frozen=True)
class Family:
    """What reading and writing a checkpoint needs to know of a family."""

    name: str  # `model_type` in config.json
    causal: str  # architecture with a language-model head
    classifier: str  # architecture with a score
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]
    key_table: Callable[[ModelConfig], Table]


def linear(
    name: str,
    *paths: str,
    bias: bool,
    layout: Layout = "transposed",
    head_dim: int | None = None,
) -> tuple[Key, ...]:
    """The kernel of a linear layer, and its bias if it has one."""
    kernels = tuple(f"{path}/kernel" for path in paths)
    biases = tuple(f"{path}/bias" for path in paths)
    kernel = Key(f"{name}.weight", kernels, layout, head_dim)
    if not bias:
        return (kernel,)
    return kernel, Key(f"{name}.bias", biases, "same", head_dim)


def norm(name: str, path: str, *, bias: bool) -> tuple[Key, ...]:
    """The scale of a normalisation, and its bias if it has one."""
    scale = Key(f"{name}.weight", (f"{path}/scale",))
    return (scale, Key(f"{name}.bias", (f"{path}/bias",))) if bias else (scale,)


def required(config: Mapping[str, Any], option: str) -> Any:
    """`config[option]`, or an InputError that names it."""
    if config.get(option) is None:
        raise InputError(
            f"config.json: expected a value for {option!r}, got none; "
            f"there is no model without it"
        )
    return config[option]


def option(config: Mapping[str, Any], option: str, default: Any) -> Any:
    """`config[option]`, or the default where it is absent or null."""
    value = config.get(option)
    return default if value is None else value


def only(config: Mapping[str, Any], supported: Mapping[str, Any]) -> None:
    """Raises InputError for an option that is set to anything but what we implement.

    None is not set.
    """
    for option, value in supported.items():
        if config.get(option) not in (None, value):
            raise InputError(
                f"config.json: expected {option} = {value!r}, got {config[option]!r}; "
                f"the decoder implements nothing else, use another checkpoint"
            )


def activation(config: Mapping[str, Any], option: str, default: str) -> Activation:
    """Our name of an activation."""
    name = config.get(option, default)
    if name not in ACTIVATIONS:
        raise InputError(
            f"config.json: expected {option} to be one of {', '.join(ACTIVATIONS)}; "
            f"got {name!r}; use another checkpoint"
        )
    return ACTIVATIONS[name]


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
      headers: what the checkpoint holds.
    """
    if model.num_layers > len(headers):  # before a name is made for each of them
        raise InputError(
            f"config.json: expected a number of layers that the checkpoint can hold, "
            f"which has {len(headers)} tensors, got {model.num_layers}; do config.json "
            f"and the weights belong together?"
        )
    expected = {
        name: (key.shape(leaves, model.vocab_size), key)
        for key in table.keys
        for name in key.names(model.num_layers)
    }
    ignored = {
        name.format(layer=layer)
        for name in table.ignored
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
    """A leaf of ours in a checkpoint: `unread[index]` reads that part of it alone."""

    shape: tuple[int, ...]
    dtype: np.dtype
    key: Key
    names: list[str]  # of their tensors, one a layer where the leaf is stacked
    columns: np.ndarray  # i64, where each column of the leaf stands in their tensor
    vocab_size: int
    tensor: Callable[[str], Any]  # theirs by name, to be sliced

    def __getitem__(self, index: tuple[slice, ...]) -> np.ndarray:
        """The part, in our layout and dtype; of their tensors no more is read."""
        ranges = [
            slice(*part.indices(size)[:2])
            for part, size in zip(index, self.shape, strict=True)
        ]
        # Zeros: rows of the vocabulary's padding stay so.
        filled = np.zeros([part.stop - part.start for part in ranges], self.dtype)
        if not self.key.stacked:
            self._fill(filled, self.names[0], ranges)
            return filled
        for out, name in zip(filled, self.names[ranges[0]], strict=True):
            self._fill(out, name, ranges[1:])
        return filled

    def _fill(self, out: np.ndarray, name: str, ranges: list[slice]) -> None:
        *others, last = ranges
        columns, tensor = self.columns[last], self.tensor(name)
        # Neighbours here that are neighbours there are read together.
        ends = np.flatnonzero(np.diff(columns, append=-1) != 1) + 1
        for start, end in itertools.pairwise([0, *ends.tolist()]):
            run = slice(int(columns[start]), int(columns[end - 1]) + 1)
            window = self.key.window([*others, run], self.vocab_size)
            if all(part.start < part.stop for part in window):
                part = self.key.from_hf(np.asarray(tensor[window]))
                out[..., start:end][: len(part)] = part


def read(
    table: Table,
    *,
    model: ModelConfig,
    leaves: Mapping[str, Any],
    headers: Mapping[str, Header],
    tensor: Callable[[str], Any],
    dtype: np.dtype | None,
) -> Iterator[tuple[str, Unread]]:
    """Yields our leaves, to be read a part at a time.

    Args:
      leaves, headers: as for `check`, which has passed.
      tensor: a tensor of theirs by name, of which slices are read.
      dtype: of the leaves; None keeps the checkpoint's.
    """
    for key in table.keys:
        names = key.names(model.num_layers)
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
                    tensor=tensor,
                ),
            )


def write(
    table: Table,
    *,
    model: ModelConfig,
    leaves: Mapping[str, jax.Array],
    fetch: Callable[[jax.Array], np.ndarray] = np.asarray,
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields their tensors, contiguous, in the dtype of our leaves.

    `fetch` brings one of them to the host.
    """
    for key in table.keys:
        parts = [fetch(leaves[path]) for path in key.paths]
        for layer, name in enumerate(key.names(model.num_layers)):
            of_layer = [part[layer] for part in parts] if key.stacked else parts
            yield name, key.to_hf(of_layer, model.vocab_size)
