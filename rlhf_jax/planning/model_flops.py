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

from collections import Counter
from typing import NamedTuple

from rlhf_jax.models.config import ModelConfig


class Texts(NamedTuple):
    """The lengths of a batch's texts, without padding."""

    prompt: int  # tokens of every prompt
    responses: tuple[int, ...]  # tokens of each response
    # Tokens that each text observes between and after its turns; they are not predicted
    # and not shared with other texts. () is none.
    observed: tuple[int, ...] = ()

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each text after its prompt."""
        observed = self.observed or (0,) * len(self.responses)
        return tuple(map(sum, zip(self.responses, observed, strict=True)))

    @property
    def tokens(self) -> int:
        """All tokens of prompts, responses and observations."""
        return len(self.responses) * self.prompt + sum(self.lengths)


def forward(
    model: ModelConfig, texts: Texts, *, head: bool, group_size: int = 1
) -> float:
    """FLOPs of one forward pass over all texts.

    Args:
      head: whether the tokens of responses are predicted.
      group_size: texts that share a prompt, which is run once for all of them.
    """
    size, attention = model.hidden_size, model.attention_layers
    projections = sum(_projections(model, layer) for layer in attention)
    mlp = sum(_mlp(model.at(layer)) for layer in range(model.num_layers))
    shared = len(texts.responses) * (1 - 1 / group_size)  # prompts that are not run
    tokens = texts.tokens - shared * texts.prompt
    total = 2.0 * tokens * (projections + mlp)
    total += tokens * _of_delta_nets(model)
    windows = Counter(
        (
            model.sliding_window if model.is_local(layer) else None,
            model.num_heads * model.at(layer).head_dim,
        )
        for layer in attention
    )
    for (window, width), layers in windows.items():
        pairs = sum(
            times * _pairs(texts.prompt + length, window=window)
            for length, times in Counter(texts.lengths).items()
        )
        pairs -= shared * _pairs(texts.prompt, window=window)
        total += 4.0 * width * layers * pairs
    if head:
        total += 2.0 * sum(texts.responses) * size * model.vocab_size
    return total


def training(
    model: ModelConfig, texts: Texts, *, head: bool, adapters: int | None
) -> float:
    """FLOPs of a forward pass over all texts and of its gradient.

    `adapters` is the number of their parameters if only adapters are trained.
    """
    passes = 3 if adapters is None else 2
    own = 0.0 if adapters is None else 3 * 2.0 * texts.tokens * adapters
    return passes * forward(model, texts, head=head) + own


def _projections(model: ModelConfig, layer: int) -> int:
    """Numbers of the matrices around the attention of a layer."""
    own = model.at(layer)
    size, width = model.hidden_size, model.num_heads * own.head_dim
    matrices = 0 if model.source(layer) is not None else 1 if own.keys_as_values else 2
    numbers = 2 * size * width + matrices * size * own.num_kv_heads * own.head_dim
    return numbers + (size * width if model.output_gate else 0)


def _mlp(own: ModelConfig) -> int:
    """Numbers of the matrices that a token meets in a layer beside its attention."""
    size = own.hidden_size
    matrices = (3 if own.gated_mlp else 2) * size
    mlp, experts = matrices * own.intermediate_size, own.experts
    if experts is not None:  # some of them, and the router
        beside = 0 if experts.beside_width is None else mlp
        mlp = experts.per_token * matrices * own.expert_width + size * experts.count
        mlp += beside
    return mlp + 3 * size * (own.per_layer_width or 0)


def _of_delta_nets(model: ModelConfig) -> float:
    """FLOPs of a token in all DeltaNet layers."""
    shape = model.delta_net
    if shape is None:
        return 0.0
    values = shape.num_value_heads * shape.value_dim
    keys = shape.num_key_heads * shape.key_dim
    numbers = 2 * keys + 3 * values + 2 * shape.num_value_heads
    memory = values * shape.key_dim
    layers = len(model.layers_of("delta_net"))
    return layers * (2.0 * model.hidden_size * numbers + 6.0 * memory)


def _pairs(length: int, *, window: int | None) -> int:
    """Σ min(t, window) over t = 1 to length."""
    near = length if window is None else min(length, window)
    return near * (near + 1) // 2 + (length - near) * near
