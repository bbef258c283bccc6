"""FLOPs that a model needs, not counting padding and remat.

    MFU = model FLOPs / (seconds · chips · peak FLOPs per second of a chip)

A forward pass of a text of n tokens through L layers with H heads of d dimensions:

    2·n·Σ kernels  +  4·H·d·Σ_l pairs_l(n)  +  2·D·V per predicted token
                   +  6·n·H·k·v per DeltaNet of H heads with memories [k, v]

pairs_l(n) is the number of (query, key) pairs of layer l, n(n + 1)/2 without a window.
A memory is read, written and read once more per token. A gradient costs two further
forward passes, or, if only adapters are trained, one further pass and the adapters' own
products. Norms, softmax, optimizers and rematerialised layers are not counted.

Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B, here with causal pairs.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax

from rlhf_jax.models import decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.runs.profile.profiler import Text


def forward(
    model: ModelConfig, texts: Sequence[Text], *, head: bool, group_size: int = 1
) -> float:
    """FLOPs of one forward pass over all texts.

    Args:
      texts: their lengths without padding; observed tokens are not predicted.
      head: whether the tokens of responses are predicted.
      group_size: texts that share a prompt, which is run once for all of them.
    """
    prompts, wholes = Counter(text.prompt for text in texts), Counter(map(sum, texts))

    def total_of(count: Callable[[int], int]) -> float:
        """The sum over all texts, less prompts that are not run."""
        total = sum(times * count(length) for length, times in wholes.items())
        again = 1 - 1 / group_size
        return total - sum(n * again * count(length) for length, n in prompts.items())

    tokens = total_of(lambda length: length)
    total = 2.0 * tokens * _kernel_numbers(model)
    if (shape := model.delta_net) is not None:
        memory = shape.num_value_heads * shape.value_dim * shape.key_dim
        total += tokens * len(model.layers_of("delta_net")) * 6.0 * memory
    windows = Counter(
        (
            model.sliding_window if model.is_local(layer) else None,
            model.num_heads * model.at(layer).head_dim,
        )
        for layer in model.attention_layers
    )
    for (window, width), layers in windows.items():
        pairs = total_of(functools.partial(_pairs, window=window))
        total += 4.0 * width * layers * pairs
    if head:
        predicted = sum(text.response for text in texts)
        total += 2.0 * predicted * model.hidden_size * model.vocab_size
    return total


def training(
    model: ModelConfig, texts: Sequence[Text], *, head: bool, adapters: int | None
) -> float:
    """FLOPs of a forward pass over all texts and of its gradient.

    `adapters` is the number of their parameters if only adapters are trained.
    """
    passes = 3 if adapters is None else 2
    own = 0.0 if adapters is None else 3 * 2.0 * sum(map(sum, texts)) * adapters
    return passes * forward(model, texts, head=head) + own


def _kernel_numbers(model: ModelConfig) -> int:
    """Numbers of the matrices that a token meets in all layers."""
    params = decoder.shapes(model)
    layers = dict(params["layers"])
    total = _kernels(params["embed"].get("per_layer_mix", {}))
    if model.experts is not None:  # some of them, and the router
        experts = dict(layers.pop("experts"))
        total += experts.pop("router")["weight"].size
        total += _kernels(experts) * model.experts.per_token // model.experts.count
    return total + _kernels(layers)


def _kernels(tree: Any) -> int:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return sum(leaf.size for path, leaf in leaves if path[-1].key == "kernel")


def _pairs(length: int, *, window: int | None) -> int:
    """Σ min(t, window) over t = 1 to length."""
    near = length if window is None else min(length, window)
    return near * (near + 1) // 2 + (length - near) * near
