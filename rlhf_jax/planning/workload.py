"""A PPO run as shapes: what it holds, and the programs that it runs one after another.

    sampling ─> the reward model ─> the reference ─> scoring and learning
    policy      reward model        reference        policy, critic and both optimizers

`memory` asks the compiler about them on one device, `plan` on a slice of many. Nothing
is allocated: everything here comes from `jax.eval_shape`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.algorithms import ppo as ppo_
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.ppo.recipe import PPO
from rlhf_jax.algorithms.state import TrainState, ppo_state
from rlhf_jax.checkpoints import hf
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import control
from rlhf_jax.models import caches, config, decoder
from rlhf_jax.models.config import ModelConfig, Remat
from rlhf_jax.models.families import registry
from rlhf_jax.models.lora import LoRA, init
from rlhf_jax.roles import rewards
from rlhf_jax.roles.critic import from_base, from_policy
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen

PyTree = Any
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
    """A PPO run, as far as its shapes go."""

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
    """Whether policy and critic train every parameter, or adapters over one base."""
    lora_rank: int = 16
    """Of the adapters."""
    base: Way = "copy"
    """How the base of the adapters is stored."""
    reference: Way | Literal["base", "none"] = "copy"
    """How the reference is stored; base is that of the adapters."""
    reward: Way | Literal["base", "none"] = "copy"
    """How the reward model is stored; base is adapters over it, none a function."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and of the KV cache; what is trained is float32."""
    remat: Remat = "none"
    """What of a layer a gradient computes again: none, dots or full."""
    batch_size: int = 64
    """Responses of a step."""
    prompt_length: int = 64
    """Columns of prompts, tokens."""
    max_new_tokens: int = 64
    """Columns of responses, tokens."""
    num_minibatches: int = 1
    """Updates of an epoch."""
    micro_batch_size: int | None = None
    """Responses held at once while learning; None is all of a minibatch."""
    topology: str | None = None
    """A TPU to compile for, as v5e:2x2; None compiles for this machine's device."""

    def __post_init__(self) -> None:
        checks.positive(
            lora_rank=self.lora_rank,
            batch_size=self.batch_size,
            prompt_length=self.prompt_length,
            max_new_tokens=self.max_new_tokens,
            num_minibatches=self.num_minibatches,
        )
        if self.policy == "full" and "base" in (self.reference, self.reward):
            raise InputError(
                "expected --policy lora with a reference or reward that is its base, "
                "got --policy full, which has no base; store a copy, or train adapters"
            )
        if self.policy == "full" and self.base != "copy":
            raise InputError(
                f"--base: expected none with --policy full, which has no base, got "
                f"{self.base}; leave it out, or train adapters"
            )


class Held(NamedTuple):
    """Shapes of all that a run holds, None for what it does not."""

    state: TrainState
    base: Frozen | None
    reference: Frozen | None  # None too where it is the base
    reward: Frozen | None


class Program(NamedTuple):
    """One of the programs of a step."""

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]  # shapes
    reads: tuple[str, ...]  # those of `parts` among them
    batch: tuple[int, ...]  # which of the arguments have rows
    donate: tuple[int, ...] = ()
    trips: int = 1  # of a loop that ends when every row has stopped, at the most


def model_of(options: Options) -> ModelConfig:
    """The shape of the model; no parameter is read.

    Raises:
      InputError: there is no such checkpoint.
    """
    own = {"dtype": options.dtype, "remat": options.remat}
    if options.model is None:
        return config.gpt2(
            vocab_size=options.vocab_size,
            hidden_size=options.hidden_size,
            num_layers=options.num_layers,
            num_heads=options.num_heads,
            max_positions=options.max_positions,
            dtype=options.dtype,
            remat=options.remat,
        )
    shape = registry.KNOWN.get(options.model)
    return dataclasses.replace(shape or hf.model_config(options.model), **own)


def algorithm(options: Options, *, num_epochs: int = 4) -> PPO:
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
        lora=LoRA(rank=options.lora_rank) if options.policy == "lora" else None,
    )


def held(options: Options, *, recipe: PPO) -> Held:
    """Shapes of what a run holds.

    Raises:
      InputError: as `frozen.freeze`.
    """
    made = functools.partial(_made, options=options, recipe=recipe)
    return jax.eval_shape(made, jax.eval_shape(jax.random.key, 0))


def parts(held: Held) -> dict[str, PyTree]:
    """What is held by name, without what there is none of."""
    named = {
        "base of the adapters": held.base,
        "policy": held.state.policy,
        "policy's optimizer": held.state.policy_opt,
        "critic": held.state.critic,
        "critic's optimizer": held.state.critic_opt,
        "reference": held.reference,
        "reward model": held.reward,
    }
    return {name: tree for name, tree in named.items() if tree is not None}


def programs(options: Options, held: Held, *, recipe: PPO) -> list[Program]:
    """The programs of a step in their order, as `ppo_from_checkpoint.py` has them.

    Raises:
      InputError: sizes that do not fit.
    """
    rows = options.batch_size
    prompts = _shapes_of_prompts(options)
    key = jax.eval_shape(jax.random.key, 0)
    base = ("base of the adapters",) if held.base is not None else ()

    def sample(policy: PyTree, base: Any, prompts: Prompts, key: Any) -> Any:
        return ppo_.sample(policy, prompts=prompts, key=key, recipe=recipe, base=base)

    def scored(reward: Frozen, base: Any, rollout: Any) -> Any:
        lora = None if base is None else recipe.lora
        return rewards.from_model(reward, model=recipe.model, base=base, lora=lora)(
            rollout
        )

    def priced(reference: Frozen, rollout: Any) -> Any:
        return score.reference_logprobs(
            reference,
            rollout=rollout,
            model=recipe.model,
            max_new_tokens=recipe.max_new_tokens,
            temperature=recipe.temperature,
        )

    def learn(
        state: TrainState, base: Any, rollout: Any, scores: Any, ref: Any, key: Any
    ) -> Any:
        return ppo_.learn(
            state,
            rollout=rollout,
            scores=scores,
            reference=None,
            ref_logprobs=ref,
            key=key,
            recipe=recipe,
            base=base,
        )

    drawn = (held.state.policy, held.base, prompts, key)
    rollout = jax.eval_shape(sample, *drawn)
    # The first token comes from the prompts' own pass.
    turns = max(options.max_new_tokens - 1, 1)
    found = [Program("sampling", sample, drawn, ("policy", *base), (2,), trips=turns)]
    if held.reward is not None:
        over = held.base if options.reward == "base" else None
        reads = ("reward model", *(base if options.reward == "base" else ()))
        args = (held.reward, over, rollout)
        found.append(Program("the reward model", scored, args, reads, (2,)))
    reference = held.base if options.reference == "base" else held.reference
    if reference is not None:
        reads = base if options.reference == "base" else ("reference",)
        args = (reference, rollout)
        found.append(Program("the reference", priced, args, reads, (1,)))
    scores = jax.ShapeDtypeStruct((rows,), jnp.float32)
    ref = rollout.old_logprobs if reference is not None else None
    learned = (held.state, held.base, rollout, scores, ref, key)
    state = ("policy", "policy's optimizer", "critic", "critic's optimizer")
    found.append(
        Program(
            name="scoring and learning",
            function=learn,
            args=learned,
            reads=(*state, *base),
            batch=(2, 3, 4),
            donate=(0,),
        )
    )
    return found


def cache_bytes(model: ModelConfig, *, rows: int, columns: int) -> int:
    """2·B·K·d·Σ_l W_l numbers in `model.dtype`: keys and values of every layer.

    Args:
      rows: B.
      columns: of prompt and response together; W_l are those that layer l keeps.

    Returns:
      Bytes.
    """
    places = sum(
        caches.width(model, layer, columns=columns) for layer in range(model.num_layers)
    )
    head = model.num_kv_heads * model.head_dim * jnp.dtype(model.dtype).itemsize
    return 2 * rows * places * head


def _shapes_of_prompts(options: Options) -> Prompts:
    rows = options.batch_size
    shape = (rows, options.prompt_length)
    return jax.eval_shape(
        lambda: Prompts(
            tokens=jnp.zeros(shape, jnp.int32),
            mask=jnp.zeros(shape, bool),
            index=jnp.zeros(rows, jnp.int32),
            sample=jnp.zeros(rows, jnp.int32),
        )
    )


def _made(key: jax.Array, *, options: Options, recipe: PPO) -> Held:
    """What a run holds, made as a run makes it; for `jax.eval_shape` alone."""
    model = recipe.model
    params = decoder.init(key, model=model)
    base, policy = None, params
    critic = from_policy(params, model=model)
    if recipe.lora is not None:
        base = _freeze(params, options.base)
        policy = init(key, model=model, lora=recipe.lora)
        critic = from_base(key, model=model, lora=recipe.lora)
    reference, reward = None, None
    if options.reference != "base":
        reference = _freeze(params, options.reference)
    if options.reward == "base" and recipe.lora is not None:
        reward = frozen.freeze(rewards.from_base(key, model=model, lora=recipe.lora))
    elif options.reward != "base":
        scorer = rewards.init(key, params, model=model)
        reward = _freeze(scorer, options.reward)
    return Held(
        state=ppo_state(
            policy=policy,
            critic=critic,
            policy_optimizer=recipe.policy_optimizer,
            critic_optimizer=recipe.critic_optimizer,
            kl=control.fixed(0.1),
        ),
        base=base,
        reference=reference,
        reward=reward,
    )


def _freeze(params: PyTree, way: str) -> Frozen | None:
    return None if way == "none" else frozen.freeze(params, **WAYS[way])
