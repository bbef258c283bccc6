"""A run as far as its shapes go: its options, its model and its algorithm."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import jax
import optax

from rlhf_jax.algorithms.grpo import GRPO
from rlhf_jax.algorithms.ppo.recipe import PPO
from rlhf_jax.checkpoints import hf
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import config, engine_choice
from rlhf_jax.models.config import Attention, Cache, ModelConfig, Remat
from rlhf_jax.models.families import registry
from rlhf_jax.models.lora import LoRA
from rlhf_jax.planning import gpu_targets
from rlhf_jax.planning.model_flops import Texts
from rlhf_jax.roles.reference import frozen, storage
from rlhf_jax.roles.reference.frozen import Frozen

Way = Literal["copy", "bf16", "fp16", "int8", "int8-bf16", "host", "host-int8"]
WAYS: dict[str, dict[str, Any]] = {
    "copy": {},
    "bf16": {"dtype": "bfloat16"},
    "fp16": {"dtype": "float16"},
    "int8": {"dtype": "int8"},
    "int8-bf16": {"dtype": "int8", "embeddings": "bfloat16"},
    "host": {"memory": "pinned_host"},
    # Not tables in int8: the TPU compiler of jax 0.10 cannot fetch those from the host.
    "host-int8": {"dtype": "int8", "embeddings": "bfloat16", "memory": "pinned_host"},
}
"""Storages by the name a command line has for them, as options of `frozen.freeze`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A run, as far as its shapes go."""

    model: str | None = None
    """A known name (gpt2, llama-2-7b, ...), a checkpoint folder or a hub id, of which
    only config.json is read; None is a GPT-2 of the shape below."""
    vocab_size: int = 50257
    """Of that GPT-2."""
    hidden_size: int = 768
    """Of that GPT-2."""
    num_layers: int = 12
    """Of that GPT-2."""
    num_heads: int = 12
    """Of that GPT-2."""
    max_positions: int = 1024
    """Of that GPT-2, tokens."""
    policy: Literal["full", "lora"] = "full"
    """Whether what is trained is every parameter, or adapters over one base."""
    lora_rank: int = 16
    """Of the adapters."""
    base: Way = "copy"
    """How the base of the adapters is stored."""
    reference: Way | Literal["base", "none"] = "copy"
    """How the reference is stored; base is that of the adapters."""
    reward: Way | Literal["base", "none"] | None = None
    """How the reward model is stored; base is adapters over it, none a function, and
    None a copy for PPO and a function for GRPO."""
    sampler: Literal["copy", "bf16", "int8", "int8-bf16"] = "copy"
    """How the policy is stored while responses are sampled; copy is as it is."""
    cache: Cache = "same"
    """How the KV cache is stored: in --dtype, or in int8."""
    continuous_batching: int | None = None
    """Responses sampled at a time by continuous batching; None samples all at once."""
    cache_pages: int | None = None
    """With --continuous-batching: pages of the KV cache that rows share, on a mesh with
    data=N an Nth of them each share of the rows; None gives every row columns for the
    longest response."""
    page_size: int = config.PAGE_SIZE
    """With --cache-pages: columns of a page, tokens."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and of the KV cache; what is trained is float32."""
    remat: Remat = "none"
    """What of a layer the backward pass rematerialises: none, dots or full."""
    batch_size: int = 64
    """Responses of a step; of sft texts, of reward-model and dpo pairs of them."""
    prompt_length: int = 64
    """Columns of prompts, tokens."""
    max_new_tokens: int = 64
    """Columns of responses, tokens."""
    num_minibatches: int = 1
    """Updates of an epoch."""
    micro_batch_size: int | None = None
    """Responses held at once while learning; None is all of a minibatch."""
    attention: Attention | None = None
    """What computes the attention of whole sequences; None is auto for the topology."""
    topology: str | None = None
    """What to compile for, as v5e:2x2, or h100:8x8 for nodes x GPUs; None is this
    machine's device."""

    def __post_init__(self) -> None:
        checks.positive(
            lora_rank=self.lora_rank,
            batch_size=self.batch_size,
            prompt_length=self.prompt_length,
            max_new_tokens=self.max_new_tokens,
            num_minibatches=self.num_minibatches,
        )
        if self.continuous_batching is not None:
            checks.positive(continuous_batching=self.continuous_batching)
        for name, needed, given in (
            (
                "cache-pages",
                "continuous-batching",
                self.cache_pages is not None and self.continuous_batching is None,
            ),
            (
                "page-size",
                "cache-pages",
                self.page_size != config.PAGE_SIZE and self.cache_pages is None,
            ),
        ):
            if given:
                raise InputError(
                    f"--{name}: expected --{needed} with it, got "
                    f"{getattr(self, name.replace('-', '_'))} without; give both, or "
                    f"leave it out"
                )
        if self.policy == "full" and "base" in (self.reference, self.reward):
            raise InputError(
                "expected --policy lora with a reference or reward that is its base, "
                "got --policy full, which has no base; store a copy, or train adapters"
            )
        if self.policy == "lora" and self.sampler != "copy":
            raise InputError(
                f"--sampler: expected none with --policy lora, whose base is sampled "
                f"with as --base has it, got {self.sampler}; leave it out"
            )
        if self.policy == "full" and self.base != "copy":
            raise InputError(
                f"--base: expected none with --policy full, which has no base, got "
                f"{self.base}; leave it out, or train adapters"
            )

    @property
    def slice(self) -> str | None:
        """The topology with its chip, as h100:8x8."""
        return self.topology

    @property
    def sampled_rows(self) -> int:
        """Responses that are sampled at a time."""
        if self.continuous_batching is None:
            return self.batch_size
        return min(self.batch_size, self.continuous_batching)

    @property
    def reward_model(self) -> Way | Literal["base", "none"]:
        """How the reward model is stored."""
        return "copy" if self.reward is None else self.reward

    @property
    def context_devices(self) -> int:
        """Devices that share the columns of a row."""
        return 1

    @property
    def columns(self) -> int:
        """Of prompts and responses together, tokens."""
        return self.prompt_length + self.max_new_tokens

    @property
    def texts(self) -> Texts:
        """A batch whose responses fill their columns."""
        return Texts(self.prompt_length, (self.max_new_tokens,) * self.batch_size)


def model_of(options: Options) -> ModelConfig:
    """The shape of the model; no parameter is read.

    Raises:
      InputError: there is no such checkpoint.
    """
    own: dict[str, Any] = {
        "dtype": options.dtype,
        "remat": options.remat,
        "cache": options.cache,
        "cache_pages": options.cache_pages,
        "page_size": options.page_size,
    }
    if options.model is None:
        model = config.gpt2(
            vocab_size=options.vocab_size,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            max_positions=options.max_positions,
        )
    else:
        model = registry.KNOWN.get(options.model) or hf.model_config(options.model)
    own["attention"] = options.attention or "auto"
    model = dataclasses.replace(model, **own)
    backend = None  # of this machine
    if options.slice is not None:
        backend = "gpu" if gpu_targets.is_gpu(options.slice) else "tpu"
    if options.context_devices > 1:
        engine_choice.refuse_context(model.attention)
    choice = engine_choice.choose(
        model,
        columns=options.columns,
        backend=backend,
        context=options.context_devices,
    )
    return dataclasses.replace(model, attention=choice.engine)


def ppo(options: Options, *, num_epochs: int = 4) -> PPO:
    """PPO with AdamW for both roles."""
    model = model_of(options)
    return PPO(
        model=model,
        critic_model=model,
        policy_optimizer=optax.adamw(1e-5),
        critic_optimizer=optax.adamw(1e-5),
        max_new_tokens=options.max_new_tokens,
        stop_ids=(),
        num_epochs=num_epochs,
        num_minibatches=options.num_minibatches,
        micro_batch_size=options.micro_batch_size,
        continuous_batching=options.continuous_batching,
        lora=lora(options),
    )


def grpo(options: Options, *, num_epochs: int, group_size: int) -> GRPO:
    """GRPO with AdamW."""
    return GRPO(
        model=model_of(options),
        policy_optimizer=optax.adamw(1e-5),
        max_new_tokens=options.max_new_tokens,
        stop_ids=(),
        num_epochs=num_epochs,
        num_minibatches=options.num_minibatches,
        micro_batch_size=options.micro_batch_size,
        continuous_batching=options.continuous_batching,
        group_size=group_size,
        lora=lora(options),
    )


def lora(options: Options) -> LoRA | None:
    """The adapters that are trained; None trains every parameter."""
    return LoRA(rank=options.lora_rank) if options.policy == "lora" else None


def adapter_count(options: Options, trained: Any) -> int | None:
    """Parameters that are trained where they are adapters, else None."""
    if options.policy == "full":
        return None
    return sum(leaf.size for leaf in jax.tree.leaves(trained))


def sampled_with(policy: Any, way: str) -> Any:
    """Shapes of the policy as it is stored while responses are sampled."""
    if way == "copy":
        return policy
    cast = functools.partial(storage.store, **WAYS[way], vectors="float32")
    return jax.eval_shape(cast, policy)


def freeze(params: Any, way: str) -> Frozen | None:
    """A frozen model that is stored in one of `WAYS`; None is "none"."""
    return None if way == "none" else frozen.freeze(params, **WAYS[way])
