"""How a family of Hugging Face checkpoints maps onto the decoder.

A `Family` translates a config both ways and has a `Table`: a line for each tensor,
naming it there and here. Reading, writing and checking all follow from that one table:

    Key("layers.{layer}.up_proj.weight", ("layers/mlp/up/kernel",), "transposed")

says that our leaf [L, D, F] is stacked from L tensors [F, D]. With {layer} and {expert}
it is [L, E, D, F], of L·E tensors. `leaves` below is the parameter tree flattened to
{"layers/mlp/up/kernel": leaf}.
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
    """A Hugging Face tensor and the leaf, or leaves, of ours that it holds.

    Layouts, theirs -> ours:
      same        [in, out] -> [in, out]   (biases, norms, the Conv1D of GPT-2)
      transposed  [out, in] -> [in, out]   (Linear)
      vocabulary  [V, D] -> [V', D]        (rows padded with zeros)
      row         [1, D] -> [D]            (the head of a scalar model)
      taps        [C, 1, W] -> [W, C]      (the convolution of each channel)
    """

    # With {layer} where there is one tensor a layer, and {expert} where there is one
    # for each of its experts.
    name: str
    paths: tuple[str, ...]  # several are fused in that tensor, along their last axis
    layout: Layout = "same"
    head_dim: int | None = None  # fused by turns of so many columns; None leaf by leaf
    layers: tuple[int, ...] | None = None  # that have the tensor; None is all

    @property
    def stacked(self) -> int:
        """Dimensions of our leaf that count tensors of theirs: layers, and experts."""
        return ("{layer}" in self.name) + ("{expert}" in self.name)

    def names(self, model: ModelConfig) -> list[str]:
        """The names of their tensors: one, one per layer, or one per expert of it."""
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
        """The shape of their tensor, of one layer, from the shapes of our leaves."""
        first, *_ = shapes = [leaves[path].shape[self.stacked :] for path in self.paths]
        fused = (*first[:-1], sum(shape[-1] for shape in shapes))
        match self.layout:
            case "transposed":
                return fused[::-1]
            case "vocabulary":
                return (vocab_size, *fused[1:])
            case "row":
                return (1, *fused)
            case "taps":
                return (fused[1], 1, fused[0])
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
            case "taps":
                return (ours[1], slice(0, 1), ours[0])
            case _:
                return tuple(ours)

    def from_hf(self, part: np.ndarray) -> np.ndarray:
        """Theirs -> ours."""
        match self.layout:
            case "transposed":
                return part.T
            case "row":
                return part[0]
            case "taps":
                return part[:, 0].T
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
            case "taps":
                tensor = tensor.T[:, None]
        return np.ascontiguousarray(tensor)


@dataclasses.dataclass(frozen=True)
class Table:
    """Every tensor of a model, in the order in which it is written."""

    prefix: str  # of the trunk; a checkpoint of the trunk alone leaves it out
    keys: tuple[Key, ...]
    ignored: tuple[str, ...] = ()  # tensors of theirs that hold nothing of the model
    tied: str | None = None  # name of the head that is the embedding; None: untied

    @property
    def embedding(self) -> Key:
        """The token embedding."""
        (key,) = (key for key in self.keys if key.paths[0].endswith("embed/tokens"))
        return key

    def as_stored(self, names: Collection[str]) -> Table:
        """The table by the names that a checkpoint has chosen.

        They may lack the prefix. One tensor is embedding and head of a tied model; its
        name is that of the embedding, or, where only this is there, of the head.
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
        score = Key(SCORE, ("score/kernel",), "row")
        ignored = (*self.ignored, *(head.name for head in heads), SCORE_BIAS)
        return dataclasses.replace(self, keys=(*trunk, score), ignored=ignored)


@dataclasses.dataclass(frozen=True)
class Family:
    """What reading and writing a checkpoint needs to know of a family."""

    name: str  # `model_type` in config.json
    stem: str  # of its architectures, as in LlamaForCausalLM
    # InputError names an option that the decoder does not implement.
    config_from_hf: Callable[[Mapping[str, Any]], ModelConfig]
    config_to_hf: Callable[[ModelConfig], dict[str, Any]]  # that it reads back
    key_table: Callable[[ModelConfig], Table]
    # Options that other families refuse (`UNSUPPORTED` of checkpoints/hf), such as
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
    """The keys, of tensors that these layers alone have."""
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
