"""How a family of Hugging Face checkpoints maps onto the decoder.

A `Family` translates a config both ways and has a `Table`, with one `Key` per kind of
tensor that gives its name there and the path of its leaf here. Reading, writing and
checking all use this table:

    Key("layers.{layer}.up_proj.weight", ("layers/mlp/up/kernel",), "transposed")

says that our leaf [L, D, F] is stacked from L tensors [F, D]. With {layer} and {expert}
a leaf [L, E, D, F] is stacked from L·E tensors. `leaves` below is the parameter tree
flattened to {"layers/mlp/up/kernel": leaf}. "Theirs" is the checkpoint's tensor, and
"ours" is the leaf.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import numpy as np

from rlhf_jax.models.config import ModelConfig

Layout = Literal["same", "transposed", "vocabulary", "row", "taps"]


SCORE = "score.weight"  # [1, D]
SCORE_BIAS = "score.bias"  # [1]


@dataclasses.dataclass(frozen=True)
class Key:
    """A Hugging Face tensor and the leaf or leaves that it holds.

    Layouts, theirs -> ours:
      same        [in, out] -> [in, out]   (biases, norms, the Conv1D of GPT-2)
      transposed  [..., out, in] -> [..., in, out]   (Linear, or one per expert)
      vocabulary  [V, D] -> [V', D]        (rows padded with zeros)
      row         [1, D] -> [D]            (the head of a scalar model)
      taps        [C, 1, W] -> [W, C]      (the convolution of each channel)
    """

    # With {layer} if there is one tensor per layer, and {expert} if there is one per
    # expert of a layer.
    name: str
    paths: tuple[str, ...]  # several leaves are fused along their last axis
    layout: Layout = "same"
    head_dim: int | None = None  # leaves alternate every head_dim columns; None: whole
    layers: tuple[int, ...] | None = None  # layers that have the tensor; None is all

    @property
    def stacked(self) -> int:
        """Leading dimensions of our leaf that count tensors: layers, then experts."""
        return ("{layer}" in self.name) + ("{expert}" in self.name)

    def names(self, model: ModelConfig) -> list[str]:
        """Names of the tensors: one, one per layer, or one per layer and expert."""
        layers = range(model.num_layers) if self.layers is None else self.layers
        experts = range(0 if model.experts is None else model.experts.count)
        match self.stacked:
            case 0:
                return [self.name]
            case 1:
                return [self.name.format(layer=layer) for layer in layers]
        every = itertools.product(layers, experts)
        return [self.name.format(layer=layer, expert=expert) for layer, expert in every]

    def shape(self, leaves: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
        """The shape of one of their tensors, from the shapes of our leaves."""
        first, *_ = shapes = [leaves[path].shape[self.stacked :] for path in self.paths]
        fused = (*first[:-1], sum(shape[-1] for shape in shapes))
        match self.layout:
            case "transposed":
                return (*fused[:-2], fused[-1], fused[-2])
            case "vocabulary":
                return (vocab_size, *fused[1:])
            case "row":
                return (1, *fused)
            case "taps":
                return (fused[1], 1, fused[0])
            case _:
                return fused

    def columns(self, width: int) -> np.ndarray:
        """i64[width]: where each column of our leaves is in their tensor.

        Two leaves a and b of two heads, a0 a1 b0 b1, alternate as a0 b0 a1 b1.

        Args:
          width: columns of all leaves together; with `head_dim` they are equally wide.
        """
        columns = np.arange(width)
        if self.head_dim is None:
            return columns
        turns = columns.reshape(-1, len(self.paths), self.head_dim)
        return turns.swapaxes(0, 1).reshape(-1)

    def window(self, ours: list[slice], vocab_size: int) -> tuple[slice, ...]:
        """Where their tensor has a part of ours; the last slice is of their columns."""
        match self.layout:
            case "transposed":
                return (*ours[:-2], ours[-1], ours[-2])
            case "vocabulary":
                rows = ours[0]
                rows = slice(min(rows.start, vocab_size), min(rows.stop, vocab_size))
                return (rows, *ours[1:])
            case "row":
                return (slice(0, 1), *ours)
            case "taps":
                return (ours[1], slice(0, 1), ours[0])
            case _:
                return tuple(ours)

    def from_hf(self, part: np.ndarray) -> np.ndarray:
        """Converts one tensor, or a part of it, from their layout to ours."""
        match self.layout:
            case "transposed":
                return part.swapaxes(-2, -1)
            case "row":
                return part[0]
            case "taps":
                return part[:, 0].T
            case _:
                return part

    def to_hf(self, parts: list[np.ndarray], vocab_size: int) -> np.ndarray:
        """Fuses leaves into one tensor of their layout."""
        tensor = np.concatenate(parts, axis=-1)
        if self.head_dim is not None:
            tensor = tensor[..., np.argsort(self.columns(tensor.shape[-1]))]
        match self.layout:
            case "transposed":
                tensor = tensor.swapaxes(-2, -1)
            case "vocabulary":
                tensor = tensor[:vocab_size]
            case "row":
                tensor = tensor[None]
            case "taps":
                tensor = tensor.T[:, None]
        return np.ascontiguousarray(tensor)


@dataclasses.dataclass(frozen=True)
class Table:
    """Every tensor of a model, in the order in which they are written."""

    prefix: str  # of trunk tensors; checkpoints of only a trunk leave it out
    keys: tuple[Key, ...]
    ignored: tuple[str, ...] = ()  # tensors that hold no parameters
    tied: str | None = None  # name of the head that equals the embedding; None: untied

    @property
    def embedding(self) -> Key:
        """Key of the token embedding."""
        (key,) = (key for key in self.keys if key.paths[0].endswith("embed/tokens"))
        return key

    def as_stored(self, names: Collection[str]) -> Table:
        """The table with the names that a checkpoint uses.

        They may lack the prefix. The one tensor of a tied model is named after the
        embedding, or after the head if the checkpoint has only that name.
        """
        prefixed = any(name.startswith(self.prefix) for name in names)
        table = self if prefixed else self.bare()
        embedding = table.embedding
        if table.tied is None or table.tied not in names or embedding.name in names:
            return table
        named = dataclasses.replace(embedding, name=table.tied)
        keys = (named if key is embedding else key for key in table.keys)
        return dataclasses.replace(table, keys=tuple(keys))

    def bare(self) -> Table:
        """The table without the prefix in its names."""
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

        A remaining head is ignored. So is a bias of the score, which few checkpoints
        have; the reader looks for it separately.
        """
        heads = [key for key in self.keys if key.paths[0].startswith("head/")]
        trunk = [
            dataclasses.replace(key, paths=tuple(f"trunk/{path}" for path in key.paths))
            for key in self.keys
            if key not in heads
        ]
        score = Key(SCORE, ("score/kernel",), "row")
        ignored = (*self.ignored, *(head.name for head in heads), SCORE_BIAS)
        return dataclasses.replace(self, keys=(*trunk, score), ignored=ignored)


@dataclasses.dataclass(frozen=True)
class Family:
    """How checkpoints of a family are read and written."""

    name: str  # `model_type` in config.json
    stem: str  # of its architectures, such as Llama in LlamaForCausalLM
    # Raises an InputError that names an option the decoder does not implement.
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]  # inverse of config_from_hf
    key_table: Callable[[ModelConfig], Table]
    # Options that other families reject (`UNSUPPORTED` of checkpoints/hf), such as
    # num_experts.
    reads: tuple[str, ...] = ()
    causal_suffix: str = "ForCausalLM"
    classifier_suffix: str = "ForSequenceClassification"

    @property
    def causal(self) -> str:
        """The architecture with a language-model head."""
        return self.stem + self.causal_suffix

    @property
    def classifier(self) -> str:
        """The architecture with a score."""
        return self.stem + self.classifier_suffix


def in_layers(layers: tuple[int, ...], *of_all: Key) -> tuple[Key, ...]:
    """The keys, for tensors that only these layers have."""
    return tuple(dataclasses.replace(key, layers=layers) for key in of_all)


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
