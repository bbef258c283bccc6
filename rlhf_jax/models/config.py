"""The shape of a decoder: a hashable value, static under `jax.jit`.

A family (GPT-2, Llama, Gemma 2, ...) is a mapping from its Hugging Face config to a
`ModelConfig`, and a table of tensor names. The decoder reads only the fields below.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, Literal, get_args

from rlhf_jax.functional import checks, unused_ids
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import refuse
from rlhf_jax.functional.unused_ids import Ranges

Remat = Literal["none", "dots", "full"]
"""Which activations of a layer a gradient recomputes instead of keeping them.

`none` keeps every activation. `dots` keeps the outputs of the projections (query, key,
value, output and the MLP's) and recomputes norms, attention and activation functions.
`full` keeps only the layer's input and repeats the forward pass. For layers stored in
int8 or on the host, `none` means `full`.
"""

# No float8 (e4m3): it takes a byte too, but its root mean square error on a vector of
# 128 normal numbers is 2.6%, against 0.65% of int8, with or without a scale per vector.
Cache = Literal["same", "int8"]
"""How decoding keeps keys and values: in the compute dtype, or in int8 with a scale for
each vector of a head (`caches.py`)."""

# Modules of a block that not every layer has.
ATTENTIONS = ("attention", "global_attention")
ATTENTIONS += tuple(f"shared_{name}" for name in ATTENTIONS)
MIXERS, MLPS = (*ATTENTIONS, "delta_net"), ("mlp", "shared_mlp")

PAGE_SIZE = 64  # default columns of a page of keys and values
Attention = Literal["auto", "xla", "blockwise", "splash", "cudnn", "ring"]
"""The engine that computes attention over whole sequences (decoding always uses XLA).

Only `xla` materialises the logits, [B, H, S, S]. `blockwise` is plain JAX and runs
everywhere; `splash` needs a TPU; `cudnn` needs an NVIDIA GPU and activations in
bfloat16. `ring` needs a mesh with a `context` axis, whose devices pass keys round
instead of gathering them. `auto` chooses by backend, length and model (`layout.py`).
"""


ScalingKind = Literal["linear", "llama3", "yarn", "proportional"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the length of pre-training.

    `linear` divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595).
    `llama3` divides only wavelengths above `original_max_positions / low_freq_factor`
    and blends up to `original_max_positions / high_freq_factor` (Llama 3.1). `yarn`
    divides frequencies that turn less than `beta_slow` times in the original context,
    keeps those that turn more than `beta_fast` times, blends in between, and multiplies
    queries and keys by `attention_factor` (Peng et al. 2023, arXiv:2309.00071).
    `proportional` divides as `linear` does, and sets all frequencies beyond the first
    `share` of them to 0 (Gemma 4).
    """

    kind: ScalingKind
    factor: float  # dimensionless
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192  # tokens
    beta_fast: float = 32.0  # turns
    beta_slow: float = 1.0  # turns
    truncate: bool = True  # yarn's blend begins and ends at whole dimensions
    attention_factor: float = 1.0  # yarn only, dimensionless
    share: float = 1.0  # proportional only: share of the dimensions that rotate

    def __post_init__(self) -> None:
        checks.one_of(kind=self.kind, among=get_args(ScalingKind))
        checks.positive(factor=self.factor)
        checks.within(
            above=0, most=1, advice="choose 1 to rotate all", share=self.share
        )


@dataclasses.dataclass(frozen=True)
class DeltaNet:
    """The shape of gated DeltaNet layers (`delta_net.py`)."""

    num_key_heads: int  # K, heads of query and key; divides num_value_heads
    num_value_heads: int  # H, heads of values, each with its own memory
    key_dim: int  # width of a query or key head
    value_dim: int  # width of a value head
    conv_width: int = 4  # tokens that the convolution reads, the current one included

    def __post_init__(self) -> None:
        checks.positive(**dataclasses.asdict(self))
        checks.within(
            least=2,
            advice="a convolution of the current token alone keeps no state",
            conv_width=self.conv_width,
        )
        if self.num_value_heads % self.num_key_heads:
            raise InputError(
                f"expected num_key_heads to divide num_value_heads, got "
                f"{self.num_key_heads} and {self.num_value_heads}; change either"
            )


@dataclasses.dataclass(frozen=True)
class GlobalHeads:
    """The heads of layers without a window, where local layers have others."""

    head_dim: int
    num_kv_heads: int
    keys_as_values: bool = False  # values are the projected keys, before their norm


@dataclasses.dataclass(frozen=True)
class Experts:
    """A mixture of experts in every layer, in place of its MLP or beside it."""

    count: int  # E, experts of a layer
    per_token: int  # k, experts that a token is routed to
    normalised: bool = True  # the weights of a token's k experts sum to 1
    router_bias: bool = False
    # c: (clip(up, -c, c) + 1) · g · sigmoid(s g), g = min(gate, c), in place of
    # act(gate) · up (gpt-oss); None keeps act(gate) · up.
    gate_limit: float | None = None
    gate_scale: float = 1.702  # s, dimensionless
    # F of one expert beside an MLP; both outputs are added. The router then multiplies
    # its normed input by a learned scale / sqrt(D), and a learned scale of each expert
    # its weight (Gemma 4). None: experts in place of the MLP, of intermediate_size.
    beside_width: int | None = None

    def __post_init__(self) -> None:
        checks.positive(
            count=self.count,
            per_token=self.per_token,
            gate_limit=self.gate_limit,
            gate_scale=self.gate_scale,
            beside_width=self.beside_width,
        )
        if self.per_token > self.count:
            raise InputError(
                f"expected at most as many experts per token as there are, "
                f"{self.count}, got {self.per_token}; lower per_token"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A causal decoder. The fields from `rope_theta` on are those of some families."""

    family: str  # selects the table of tensor names; only checkpoints/hf reads it
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
    rotary_dim: int | None = None  # leading dimensions of a head that rotate; None: all
    norm_from_one: bool = False  # norms multiply by 1 + scale (Gemma)
    query_key_norm: bool = False  # norms on every head's query and key (Qwen 3)
    joint_head_norm: bool = False  # query_key_norm spans all heads together (OLMo 2)
    pre_norms: bool = True  # norms on the inputs of attention and MLP
    post_norms: bool = False  # norms on the outputs of attention and MLP
    parallel_residual: bool = False  # x + attention(norm x) + mlp(norm' x) (GPT-NeoX)
    sliding_window: int | None = None  # tokens a local layer sees, its own included
    local_layers: tuple[bool, ...] = ()  # [L], True: has sliding_window; () is none
    rope_local_theta: float | None = None  # local layers' θ, unscaled; None: as global
    unrotated_layers: tuple[bool, ...] = ()  # [L], True: without positions; () is none
    output_gate: bool = False  # attention(x) · sigmoid(gate x) (Qwen 3.5)
    global_heads: GlobalHeads | None = None  # None: the same heads in all layers
    keys_as_values: bool = False  # values are the keys: there is no value projection
    value_norm: bool = False  # values are divided by their RMS, without a scale
    layer_scale: bool = False  # a scalar without gradient multiplies a layer's output
    # Number of last layers without keys and values of their own. Each reads those of
    # the last layer before them of its kind, local or global.
    shared_layers: int = 0
    wide_shared_mlp: bool = False  # the MLP of shared layers is 2 F wide
    # P, the width of the token embedding that every layer has (Gemma 3n); None: none.
    per_layer_width: int | None = None
    delta_net: DeltaNet | None = None  # the shape of the recurrent layers
    recurrent_layers: tuple[bool, ...] = ()  # [L], True: no attention; () is none
    query_scale: float | None = None  # multiplies q·k; None is 1 / sqrt(head_dim)
    attention_softcap: float | None = None  # c: attention logits are c tanh(x / c)
    logit_softcap: float | None = None  # c: vocabulary logits are c tanh(x / c)
    logit_divisor: float = 1.0  # divides the vocabulary logits (Granite)
    residual_scale: float = 1.0  # multiplies what attention and MLP add (Granite)
    embed_scale: float = 1.0  # multiplies token embeddings (Gemma)
    experts: Experts | None = None  # None is dense
    sinks: bool = False  # a learned logit per head in attention's softmax, no value
    vocab_multiple: int = 128  # embedding rows are padded to a multiple of this
    # Ids below vocab_size without a token in the tokenizer, as (start, stop) ranges. No
    # role predicts them. Set by a run: no checkpoint says them.
    unused_ids: Ranges = ()
    dtype: str = "float32"  # of activations; parameters keep their own
    remat: Remat = "none"  # what a gradient recomputes
    unroll: bool = False  # one operation per layer instead of a loop over layers
    attention: Attention = "xla"  # engine for whole sequences
    cache: Cache = "same"  # how decoding keeps keys and values: in dtype, or in int8
    # Continuous batching: pages of keys and values that all rows share; None gives
    # every row its own columns.
    cache_pages: int | None = None
    page_size: int = PAGE_SIZE  # columns of a page
    prefill_chunk: int | None = None  # columns of prompts at a time; None is all
    # Most tokens at a time that are decoded by `layout.transposed_product`.
    transposed_rows: int = 0

    def __post_init__(self) -> None:
        checks.positive(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate_size,
            max_positions=self.max_positions,
            norm_eps=self.norm_eps,
            rope_theta=self.rope_theta,
            embed_scale=self.embed_scale,
            vocab_multiple=self.vocab_multiple,
            logit_divisor=self.logit_divisor,
            residual_scale=self.residual_scale,
            sliding_window=self.sliding_window,
            rope_local_theta=self.rope_local_theta,
            query_scale=self.query_scale,
            attention_softcap=self.attention_softcap,
            logit_softcap=self.logit_softcap,
            per_layer_width=self.per_layer_width,
            prefill_chunk=self.prefill_chunk,
            cache_pages=self.cache_pages,
            page_size=self.page_size,
        )
        checks.non_negative(
            shared_layers=self.shared_layers, transposed_rows=self.transposed_rows
        )
        unused_ids.check(self.unused_ids, vocab_size=self.vocab_size)
        # A name that is not known would compute as another one, without a word.
        checks.one_of(norm=self.norm, among=("layernorm", "rmsnorm"))
        checks.one_of(positions=self.positions, among=("learned", "rope"))
        checks.one_of(activation=self.activation, among=("gelu_tanh", "gelu", "silu"))
        checks.one_of(attention=self.attention, among=get_args(Attention))
        checks.one_of(remat=self.remat, among=get_args(Remat))
        checks.one_of(cache=self.cache, among=get_args(Cache))
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
        heads = self.global_heads
        if heads is not None and (
            min(dataclasses.astuple(heads)[:2]) < 1
            or self.num_heads % heads.num_kv_heads
            or heads.head_dim % 2
        ):
            yield (
                f"expected global_heads of an even head_dim and num_kv_heads that "
                f"divide num_heads = {self.num_heads}, got {heads}; change either"
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
                "expected experts or recurrent_layers, as routing is not recorded "
                "beside recurrent layers, got both; leave either out"
            )
        if self.experts is not None and self.shared_layers:
            yield (
                "expected experts or shared_layers, as routing is recorded in one "
                "part of the layers, got both; leave either out"
            )
        first = self.num_layers - self.shared_layers
        local = self.local_layers or (False,) * self.num_layers
        own = set(local[: max(first, 0)])
        if self.shared_layers and (own != set(local) or self.recurrent_layers):
            yield (
                f"expected before {self.shared_layers} shared_layers a layer with "
                f"attention of every kind that they are of, local or global, got none "
                f"of one in {max(first, 0)} layers; lower shared_layers"
            )
        if self.joint_head_norm and not self.query_key_norm:
            yield (
                "expected query_key_norm with joint_head_norm, which makes it span all "
                "heads; set query_key_norm, or leave joint_head_norm out"
            )
        for name, layers in {
            "local_layers": self.local_layers,
            "unrotated_layers": self.unrotated_layers,
            "recurrent_layers": self.recurrent_layers,
        }.items():
            if len(layers) not in (0, self.num_layers):
                yield (
                    f"expected one entry of {name} for each of {self.num_layers} "
                    f"layers, got {len(layers)} entries; correct either"
                )
        if self.unrotated_layers and self.positions != "rope":
            yield (
                f"expected positions 'rope' with unrotated_layers, got "
                f"{self.positions!r}; change either"
            )
        if any(self.recurrent_layers) != (self.delta_net is not None):
            yield (
                f"expected a delta_net if, and only if, some layer is recurrent, got "
                f"{self.delta_net} with {sum(self.recurrent_layers)} recurrent layers"
            )
        if any(self.local_layers) != (self.sliding_window is not None):
            yield (
                f"expected a sliding_window if, and only if, some layer is local, got "
                f"{self.sliding_window} with {sum(self.local_layers)} local layers"
            )

    def run_as(self, other: ModelConfig) -> ModelConfig:
        """This model with the fields of a run taken from another config.

        They say how it computes (dtype, attention, cache, remat, layout), and which ids
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
        """Whether a layer, from 0, sees only the sliding window."""
        return bool(self.local_layers) and self.local_layers[layer]

    def is_unrotated(self, layer: int) -> bool:
        """Whether a layer, from 0, has no positions."""
        return bool(self.unrotated_layers) and self.unrotated_layers[layer]

    def is_recurrent(self, layer: int) -> bool:
        """Whether a layer, from 0, has a DeltaNet in place of attention."""
        return bool(self.recurrent_layers) and self.recurrent_layers[layer]

    def source(self, layer: int) -> int | None:
        """The layer whose keys and values this one reads; None: it has its own."""
        first = self.num_layers - self.shared_layers
        if layer < first:
            return None
        local = self.is_local(layer)
        return next(n for n in reversed(range(first)) if self.is_local(n) == local)

    def mixer(self, layer: int) -> str:
        """The name of a layer's attention or recurrence."""
        if self.is_recurrent(layer):
            return "delta_net"
        own = self.global_heads is None or self.is_local(layer)
        name = "attention" if own else "global_attention"
        return name if self.source(layer) is None else f"shared_{name}"

    def mlp(self, layer: int) -> str:
        """The name of a layer's MLP."""
        return "mlp" if self.source(layer) is None else "shared_mlp"

    def at(self, layer: int) -> ModelConfig:
        """The model with the heads and the MLP of one layer."""
        changed: dict[str, Any] = {}
        if self.global_heads is not None:
            of_all = {} if self.is_local(layer) else vars(self.global_heads)
            changed = {**of_all, "global_heads": None}
        if self.wide_shared_mlp and self.source(layer) is not None:
            changed["intermediate_size"] = 2 * self.intermediate_size
        return dataclasses.replace(self, **changed) if changed else self

    def kind(self, layer: int) -> tuple[str, bool, bool]:
        """What distinguishes a layer, from 0: (mixer, local, unrotated)."""
        return self.mixer(layer), self.is_local(layer), self.is_unrotated(layer)

    @property
    def by_kind(self) -> bool:
        """Whether layers differ in their modules, which are then stacked by name."""
        other = self.global_heads is not None or self.shared_layers > 0
        return other or bool(self.recurrent_layers)

    def layers_of(self, module: str) -> tuple[int, ...]:
        """The layers, from 0, that have a module of a block, and so its parameters."""
        layers = range(self.num_layers)
        if module not in (*MIXERS, *MLPS):
            return tuple(layers)
        return tuple(n for n in layers if module in (self.mixer(n), self.mlp(n)))

    @property
    def expert_width(self) -> int:
        """F of one expert of a mixture."""
        beside = None if self.experts is None else self.experts.beside_width
        return self.intermediate_size if beside is None else beside

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The dimensions of a head, of every kind of layer."""
        heads = self.global_heads
        return (self.head_dim,) if heads is None else (self.head_dim, heads.head_dim)

    @property
    def common_kv_heads(self) -> int:
        """The largest number that divides the key and value heads of every layer."""
        heads = self.global_heads
        own = self.num_kv_heads
        return own if heads is None else math.gcd(own, heads.num_kv_heads)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """The layers, from 0, with attention of any kind."""
        return tuple(n for n in range(self.num_layers) if not self.is_recurrent(n))

    @property
    def parts(self) -> tuple[tuple[int, int, int], ...]:
        """(first, count, period) of the layers with own keys, then of shared layers.

        The period is the smallest divisor of the count after which the kinds repeat; 1
        where all layers have the same modules.
        """
        if not self.by_kind:
            return ((0, self.num_layers, 1),)

        def period(layers: range) -> int:
            kinds = [*map(self.kind, layers)]
            sizes = range(1, len(layers) + 1)
            return next(n for n in sizes if kinds == kinds[:n] * (len(layers) // n))

        first = self.num_layers - self.shared_layers
        parts = [range(first), range(first, self.num_layers)]
        return tuple((p.start, len(p), period(p)) for p in parts if p)

    @property
    def num_tokens(self) -> int:
        """Number of ids that may be predicted: the vocabulary without `unused_ids`."""
        return self.vocab_size - sum(stop - start for start, stop in self.unused_ids)

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
