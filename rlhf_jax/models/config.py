"""The shape of a decoder: a hashable value, static under `jax.jit`.

A family (GPT-2, Llama, Gemma 2, ...) is nothing but a mapping from its Hugging Face
config to one of these and a table of tensor names; the decoder reads only the fields
below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Literal, get_args

from rlhf_jax.functional import checks, unused_ids
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import refuse
from rlhf_jax.functional.unused_ids import Ranges

Remat = Literal["none", "dots", "full"]
"""What of a layer a gradient does not keep and computes again, from little to all.

`none` keeps every activation. `dots` keeps what the projections return (query, key,
value, output and the MLP's) and computes norms, attention and activation functions
again. `full` keeps the layer's input alone, for a second forward pass; over layers that
are stored in int8 or on the host `none` is `full`.
"""

# No float8 (e4m3): a byte too, but its root mean square error is 2.6% and int8's 0.65%,
# in a vector of 128 normal numbers, with a scale for each vector or without.
Cache = Literal["same", "int8"]
"""How decoding keeps keys and values: in the compute dtype, or in int8 with a scale for
each vector of a head (`caches.py`)."""

PAGE_SIZE = 64  # columns of a page of keys and values, unless another is chosen
Attention = Literal["auto", "xla", "blockwise", "splash", "cudnn", "ring"]
"""What computes the attention of whole sequences (decoding always takes XLA).

`xla` holds the logits, [B, H, S, S]; the others do not. `blockwise` is plain JAX and
runs everywhere; `splash` needs a TPU; `cudnn` needs an NVIDIA GPU and activations in
bfloat16. `ring` needs a mesh with a `context` axis, whose devices pass keys round in
place of gathering them. `auto` chooses by backend, length and model (`layout.py`).
"""


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length of pre-training.

    `linear` divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595).
    `llama3` divides only wavelengths above `original_max_positions / low_freq_factor`
    and blends up to `original_max_positions / high_freq_factor` (Llama 3.1). `yarn`
    divides frequencies that turn less than `beta_slow` times in the original context,
    keeps those that turn more than `beta_fast` times, blends in between, and multiplies
    queries and keys by `attention_factor` (Peng et al. 2023, arXiv:2309.00071).
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float  # dimensionless, >= 1
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192  # tokens
    beta_fast: float = 32.0  # turns
    beta_slow: float = 1.0  # turns
    truncate: bool = True  # the blend of yarn begins and ends at whole dimensions
    attention_factor: float = 1.0  # of yarn, dimensionless


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """The shape of gated DeltaNet layers (`delta_net.py`)."""

    num_key_heads: int  # K, of query and key; divides the value heads
    num_value_heads: int  # H, each with a memory of its own
    key_dim: int  # of a head of query and key
    value_dim: int  # of a head of values
    conv_width: int = 4  # tokens that the convolution sees, its own included

    def __post_init__(self) -> None:
        checks.positive(**dataclasses.asdict(self))
        if self.num_value_heads % self.num_key_heads:
            raise InputError(
                f"expected num_key_heads to divide num_value_heads, got "
                f"{self.num_key_heads} and {self.num_value_heads}; change either"
            )


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in place of every layer's MLP (`experts/`)."""

    count: int  # E
    per_token: int  # k
    normalised: bool = True  # the weights of a token's k experts sum to 1
    router_bias: bool = False
    # c: (clip(up, -c, c) + 1) · g · sigmoid(s g), g = min(gate, c), in place of
    # act(gate) · up (gpt-oss); None is without.
    gate_limit: float | None = None
    gate_scale: float = 1.702  # s, dimensionless

    def __post_init__(self) -> None:
        checks.positive(count=self.count, per_token=self.per_token)
        if self.per_token > self.count:
            raise InputError(
                f"expected at most as many experts per token as there are, "
                f"{self.count}, got {self.per_token}; lower per_token"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A causal decoder; from `rope_theta` on what not every family has."""

    family: str  # which key table names its tensors; read by checkpoints/hf alone
    vocab_size: int  # the true vocabulary
    hidden_size: int  # D
    num_layers: int  # L
    num_heads: int  # H, query heads
    num_kv_heads: int  # K, key and value heads; divides H
    head_dim: int
    intermediate_size: int  # F, width of the MLP, or of one expert
    max_positions: int  # longest sequence, in tokens
    norm: Literal["layernorm", "rmsnorm"]
    norm_eps: float
    positions: Literal["learned", "rope"]
    activation: Literal["gelu_tanh", "gelu", "silu"]
    gated_mlp: bool  # down(act(gate x) * up x) instead of down(act(up x))
    attention_bias: bool  # on query, key and value
    attention_output_bias: bool
    mlp_bias: bool
    tied_head: bool  # the output head is the token embedding
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rotary_dim: int | None = (
        None  # dimensions of a head that rotate, the first; None all
    )
    norm_from_one: bool = False  # norms multiply by 1 + scale (Gemma)
    query_key_norm: bool = False  # a norm of every head's query and key (Qwen 3)
    joint_head_norm: bool = False  # that norm is one over all heads (OLMo 2)
    pre_norms: bool = True  # norms of what attention and MLP read
    post_norms: bool = False  # norms of what attention and MLP return, before the sum
    parallel_residual: bool = False  # x + attention(norm x) + mlp(norm' x) (GPT-NeoX)
    sliding_window: int | None = None  # tokens a local layer sees, its own included
    local_layers: tuple[bool, ...] = ()  # [L], which have that window; () is none
    rope_local_theta: float | None = None  # theirs, never scaled; None is as elsewhere
    unrotated_layers: tuple[bool, ...] = ()  # [L], without positions; () is none
    output_gate: bool = False  # attention(x) · sigmoid(gate x) (Qwen 3.5)
    delta_net: DeltaNet | None = None  # of the layers below
    recurrent_layers: tuple[bool, ...] = ()  # [L], without attention; () is none
    query_scale: float | None = None  # of q·k; None is 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # c: logits of attention are c tanh(x / c)
    logit_softcap: float | None = None  # the same of the logits over the vocabulary
    logit_divisor: float = 1.0  # of the logits over the vocabulary (Granite)
    residual_scale: float = 1.0  # of what attention and MLP add (Granite)
    embed_scale: float = 1.0  # of token embeddings as they are read (Gemma)
    experts: Experts | None = None  # each of width intermediate_size; None is dense
    sinks: bool = False  # a learned logit per head that takes attention and gives none
    vocab_multiple: int = 128  # embedding rows are padded to a multiple of this
    # Ids below vocab_size that the tokenizer has no token for, as (start, stop): never
    # predicted, in any role. Of a run, as dtype is: no checkpoint has them.
    unused_ids: Ranges = ()
    dtype: str = "float32"  # of activations; parameters keep their own
    remat: Remat = "none"  # what of a layer a gradient computes again
    unroll: bool = False  # layers one by one in the program, not as a loop over them
    attention: Attention = "xla"  # what computes that of whole sequences
    cache: Cache = "same"  # of decoding, keys and values: in dtype, or in int8
    # Of continuous batching: pages that all rows share for keys and values; None gives
    # every row its own columns.
    cache_pages: int | None = None
    page_size: int = PAGE_SIZE  # columns of such a page
    prefill_chunk: int | None = None  # columns of prompts at a time; None is all
    transposed_rows: int = (
        0  # most tokens at a time decoded by `layout.transposed_product`
    )

    def __post_init__(self) -> None:
        checks.positive(
            logit_divisor=self.logit_divisor,
            residual_scale=self.residual_scale,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            max_positions=self.max_positions,
        )
        unused_ids.check(self.unused_ids, vocab_size=self.vocab_size)
        optional = {
            "sliding_window": self.sliding_window,
            "rope_local_theta": self.rope_local_theta,
            "query_scale": self.query_scale,
            "attention_softcap": self.attention_softcap,
            "logit_softcap": self.logit_softcap,
            "prefill_chunk": self.prefill_chunk,
            "cache_pages": self.cache_pages,
            "page_size": self.page_size,
        }
        checks.positive(**{k: v for k, v in optional.items() if v is not None})
        checks.one_of(attention=self.attention, among=get_args(Attention))
        checks.one_of(remat=self.remat, among=get_args(Remat))
        refuse((*self._faults(), *self._faults_of_layers()))

    def _faults(self) -> Iterator[str]:
        if self.dtype not in ("float32", "bfloat16"):
            yield (
                f"expected dtype float32 or bfloat16, got {self.dtype!r}; float16 is "
                f"for stored parameters, its range being too small for activations"
            )
        if self.attention == "cudnn" and (
            self.dtype != "bfloat16" or self.attention_softcap is not None
        ):
            yield (
                f"expected dtype bfloat16 with attention cudnn, and no "
                f"attention_softcap, got {self.dtype!r} and {self.attention_softcap}; "
                f"change them, or choose attention auto"
            )

        if self.attention == "cudnn" and self.sinks:
            yield (
                "expected a model without attention sinks with attention cudnn, which "
                "has none; choose attention auto"
            )
        if self.num_heads % self.num_kv_heads:
            yield (
                f"expected num_kv_heads to divide num_heads, got "
                f"{self.num_kv_heads} and {self.num_heads}; change either"
            )
        rotated = self.head_dim if self.rotary_dim is None else self.rotary_dim
        if (self.positions == "rope" or self.rotary_dim is not None) and (
            rotated % 2 or not 0 < rotated <= self.head_dim
        ):
            name = "head_dim" if self.rotary_dim is None else "rotary_dim"
            yield (
                f"rotary positions rotate pairs: expected an even {name} from 2 to "
                f"head_dim = {self.head_dim}, got {rotated}"
            )

    def _faults_of_layers(self) -> Iterator[str]:
        if self.experts is not None and self.recurrent_layers:
            yield (
                "expected experts or recurrent_layers, whose routing nobody records, "
                "got both; leave either out"
            )
        if self.joint_head_norm and not self.query_key_norm:
            yield (
                "expected query_key_norm with joint_head_norm, which says over what it "
                "is; set query_key_norm, or leave joint_head_norm out"
            )
        if self.unrotated_layers and (
            len(self.unrotated_layers) != self.num_layers or self.positions != "rope"
        ):
            yield (
                f"expected unrotated_layers to say for each of {self.num_layers} "
                f"layers with rotary positions whether it is without, got "
                f"{len(self.unrotated_layers)} entries of positions {self.positions!r}"
            )
        if self.local_layers and len(self.local_layers) != self.num_layers:
            yield (
                f"expected local_layers to say for each of {self.num_layers} layers "
                f"whether it is local, got {len(self.local_layers)} entries"
            )
        if any(self.recurrent_layers) != (self.delta_net is not None) or (
            self.recurrent_layers and len(self.recurrent_layers) != self.num_layers
        ):
            yield (
                f"expected a delta_net and recurrent_layers that say for each of "
                f"{self.num_layers} layers whether it is one, or neither, got "
                f"{self.delta_net} and {len(self.recurrent_layers)} entries"
            )
        if any(self.local_layers) != (self.sliding_window is not None):
            yield (
                f"expected a sliding_window if, and only if, some layer is local, got "
                f"{self.sliding_window} with {sum(self.local_layers)} local layers"
            )

    def run_as(self, other: ModelConfig) -> ModelConfig:
        """This model with what no checkpoint says, as the other has it.

        That is how it computes (dtype, attention, cache, remat, layout), and which ids
        have no token.
        """
        return dataclasses.replace(
            self,
            unused_ids=other.unused_ids,
            dtype=other.dtype,
            remat=other.remat,
            unroll=other.unroll,
            attention=other.attention,
            cache=other.cache,
            cache_pages=other.cache_pages,
            page_size=other.page_size,
            prefill_chunk=other.prefill_chunk,
            transposed_rows=other.transposed_rows,
        )

    def is_local(self, layer: int) -> bool:
        """Whether a layer, from 0, sees the sliding window alone."""
        return bool(self.local_layers) and self.local_layers[layer]

    def is_unrotated(self, layer: int) -> bool:
        """Whether a layer, from 0, has no positions."""
        return bool(self.unrotated_layers) and self.unrotated_layers[layer]

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer, from 0, has a DeltaNet in place of attention."""
        return bool(self.recurrent_layers) and self.recurrent_layers[layer]

    def kind(self, layer: int) -> tuple[bool, bool, bool]:
        """What tells a layer, from 0, from others: recurrent, local, unrotated."""
        return self.is_recurrent(layer), self.is_local(layer), self.is_unrotated(layer)

    def layers_of(self, module: str) -> tuple[int, ...]:
        """The layers, from 0, that have a module of a block, in which it is stacked."""
        has = {
            "attention": lambda layer: not self.is_recurrent(layer),
            "delta_net": self.is_recurrent,
        }.get(module, lambda layer: True)
        return tuple(filter(has, range(self.num_layers)))

    @property
    def period(self) -> int:
        """After how many layers, a divisor of L, their kinds begin again."""
        kinds = [self.kind(layer) for layer in range(self.num_layers)]
        sizes = range(1, self.num_layers + 1)
        return next(n for n in sizes if kinds == kinds[:n] * (self.num_layers // n))

    @property
    def num_tokens(self) -> int:
        """Ids that may be predicted: all of the vocabulary but the unused ones."""
        return self.vocab_size - unused_ids.count(self.unused_ids)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the embedding; those from `vocab_size` on are never predicted."""
        return -(-self.vocab_size // self.vocab_multiple) * self.vocab_multiple


def gpt2(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    max_positions: int,
    intermediate_size: int | None = None,
    dtype: str = "float32",
    remat: Remat = "none",
) -> ModelConfig:
    """A GPT-2 of any size (Radford et al. 2019)."""
    return ModelConfig(
        family="gpt2",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim_of(hidden_size, num_heads),
        intermediate_size=(
            4 * hidden_size if intermediate_size is None else intermediate_size
        ),
        max_positions=max_positions,
        norm="layernorm",
        norm_eps=1e-5,
        positions="learned",
        activation="gelu_tanh",
        gated_mlp=False,
        attention_bias=True,
        attention_output_bias=True,
        mlp_bias=True,
        tied_head=True,
        dtype=dtype,
        remat=remat,
    )


def llama(
    *,
    vocab_size: int,
    hidden_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    intermediate_size: int,
    max_positions: int,
    head_dim: int | None = None,
    tied_head: bool = False,
    rope_theta: float = 10_000.0,
    rope_scaling: RopeScaling | None = None,
    dtype: str = "float32",
    remat: Remat = "none",
) -> ModelConfig:
    """A Llama of any size (Touvron et al. 2023, arXiv:2302.13971)."""
    return ModelConfig(
        family="llama",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim_of(hidden_size, num_heads) if head_dim is None else head_dim,
        intermediate_size=intermediate_size,
        max_positions=max_positions,
        norm="rmsnorm",
        norm_eps=1e-6,
        positions="rope",
        activation="silu",
        gated_mlp=True,
        attention_bias=False,
        attention_output_bias=False,
        mlp_bias=False,
        tied_head=tied_head,
        rope_theta=rope_theta,
        rope_scaling=rope_scaling,
        dtype=dtype,
        remat=remat,
    )


def head_dim_of(hidden_size: int, num_heads: int) -> int:
    """The width of heads that share the hidden size, or an InputError."""
    checks.positive(num_heads=num_heads)
    if hidden_size % num_heads:
        raise InputError(
            f"expected num_heads to divide hidden_size, got {num_heads} and "
            f"{hidden_size}; change either, or give a head_dim where the family has one"
        )
    return hidden_size // num_heads
