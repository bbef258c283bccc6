"""Converts adapters of fused layers: PEFT has one adapter where we have several."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from rlhf_jax.checkpoints import hf
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import lora
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.families import keys
from rlhf_jax.models.lora import LoRA

PREFIX = "base_model.model."


@dataclasses.dataclass(frozen=True)
class Linear:
    """A linear layer of a checkpoint, and the layers of ours that it fuses."""

    name: str  # "transformer.h.{layer}.attn.c_attn"; may contain {expert}
    paths: tuple[str, ...]  # "attention/query", ...
    key: keys.Key  # of its kernel

    @property
    def pattern(self) -> str:
        """The name in `target_modules`: "attn.c_attn", or "w1" for experts."""
        return self.name.split("{layer}.")[1].split("{expert}.")[-1]

    def tensors(self, model: ModelConfig) -> list[tuple[str, str]]:
        """Returns the names of A and B for every layer and expert."""
        return [
            (f"{PREFIX}{at}.lora_A.weight", f"{PREFIX}{at}.lora_B.weight")
            for at in dataclasses.replace(self.key, name=self.name).names(model)
        ]


def linears(model: ModelConfig) -> list[Linear]:
    """Lists the linear layers of a checkpoint of the model's family.

    A tensor of all experts is not listed: PEFT has no name for its adapters.
    """
    prefix, suffix = "layers/", "/kernel"
    return [
        Linear(
            name=key.name.removesuffix(".weight"),
            paths=tuple(p.removeprefix(prefix).removesuffix(suffix) for p in key.paths),
            key=key,
        )
        for key in hf.FAMILIES[model.family].key_table(model).keys
        if key.paths[0].startswith(prefix)
        and key.paths[0].endswith(suffix)
        and key.name.endswith(".weight")
    ]


def layer_sizes(model: ModelConfig) -> dict[str, tuple[int, int]]:
    """Returns {"attention/query": (in, out)} for every linear layer of ours."""
    every = lora.targets(model=model, lora=LoRA(rank=1))  # a rank that fits all layers
    return {path: (shape[-2], shape[-1]) for path, shape in every.items()}


def to_theirs(
    linear: Linear, adapters: Mapping[str, Any], *, model: ModelConfig, rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """Fuses adapters into lora_A f32[L, k, in] and lora_B f32[L, out, k].

    Args:
      adapters: ours by path, {"attention/query/lora_a": f32[L, in, r], ...}; for
        experts L·E comes first.
      rank: r. k is r if all n layers share one A, else n·r.
    """
    sizes = layer_sizes(model)
    downs, ups = [], []
    for path in linear.paths:
        size_in, size_out = sizes[path]
        if f"{path}/lora_a" in adapters:
            for parts, leaf in ((downs, "lora_a"), (ups, "lora_b")):
                array = np.asarray(adapters[f"{path}/{leaf}"])
                parts.append(array.reshape(-1, *array.shape[-2:]))
        else:
            count = len(linear.tensors(model))
            downs.append(np.zeros((count, size_in, rank), np.float32))
            ups.append(np.zeros((count, rank, size_out), np.float32))
    if all(np.array_equal(down, downs[0]) for down in downs):
        down, up = downs[0], np.concatenate(ups, axis=-1)
    else:
        down = np.concatenate(downs, axis=-1)
        up = np.zeros((*down.shape[::2], sum(u.shape[-1] for u in ups)), np.float32)
        column = 0
        for i, block in enumerate(ups):
            rows = slice(i * rank, (i + 1) * rank)
            up[:, rows, column : column + block.shape[-1]] = block
            column += block.shape[-1]
    up = up[..., np.argsort(linear.key.columns(up.shape[-1]))]
    return down.swapaxes(1, 2), up.swapaxes(1, 2)


def to_ours(
    down: np.ndarray, up: np.ndarray, *, widths: list[int], rank: int
) -> Iterator[tuple[np.ndarray, np.ndarray] | None]:
    """Yields A [L, in, r] and B [L, r, out] of each fused layer, None if it is zero.

    Args:
      down, up: [L, in, k] and [L, k, out], where k is r, or n·r in blocks.

    Raises:
      InputError: B is not zero outside its blocks.
    """
    parts = np.split(up, np.cumsum(widths)[:-1], axis=-1)
    if down.shape[-1] == rank:
        yield from ((down, part) for part in parts)
        return
    for i, part in enumerate(parts):
        rows = slice(i * rank, (i + 1) * rank)
        block = part[:, rows]
        if np.count_nonzero(part) != np.count_nonzero(block):
            raise InputError(
                f"expected lora_B of {len(widths)} blocks of rank {rank}, one for each "
                f"layer that is fused there, got numbers outside of them; train an "
                f"adapter of the rank that r says"
            )
        a = down[..., rows]
        yield (a, block) if a.any() or block.any() else None
