"""Memory before anything is allocated: shapes for what is held, the compiler for the
rest.

    rlhf-jax memory --model gpt2 --reference int8 --policy lora

Parameters, optimizer states and the KV cache are counted from `jax.eval_shape`. What a
step needs beside them is the temporaries of its own programs, `ppo.sample`, the reward
and `ppo.learn`, as the compiler reports them for one device: this machine's, or that of
a TPU that is not there (`--topology v5e:2x2`, extra `plan`).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.functional import checks, kl_control
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import config, decoder, leaves
from rlhf_jax.models import lora as lora_
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles import critic as critic_
from rlhf_jax.roles import frozen, rewards, storage
from rlhf_jax.roles.frozen import Frozen
from rlhf_jax.runtime import compiled, hf, report
from rlhf_jax.stages import ppo as ppo_
from rlhf_jax.stages import state as state_
from rlhf_jax.stages.batch import Prompts
from rlhf_jax.stages.ppo_config import PPO
from rlhf_jax.stages.state import TrainState

PyTree = Any
Way = Literal[
    "copy", "bfloat16", "float16", "int8", "int8-bfloat16", "host", "host-int8"
]
WAYS: dict[str, dict[str, Any]] = {
    "copy": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "int8"},
    "int8-bfloat16": {"dtype": "int8", "embeddings": "bfloat16"},
    "host": {"memory": "pinned_host"},
    # Not tables in int8: the TPU compiler of jax 0.10 cannot fetch those from the host.
    "host-int8": {"dtype": "int8", "embeddings": "bfloat16", "memory": "pinned_host"},
}
"""Storages by the name a command line has for them, as options of `frozen.freeze`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """A PPO run, as far as its memory goes."""

    model: str | None = None
    """Checkpoint folder or hub id, of which only config.json is read; None is a GPT-2
    of the shape below."""
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
    reference: Way | Literal["base", "none"] = "copy"
    """How the reference is stored; base is that of the adapters."""
    reward: Way | Literal["base", "none"] = "copy"
    """How the reward model is stored; base is adapters over it, none a function."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations and of the KV cache; what is trained is float32."""
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


class Line(NamedTuple):
    """What something takes, bytes."""

    what: str
    device: int
    host: int = 0


class Held(NamedTuple):
    """Shapes of all that a run holds, None for what it does not."""

    state: TrainState
    base: Frozen | None
    reference: Frozen | None
    reward: Frozen | None


def memory(options: Options) -> list[Line]:
    """`models`, and what a PPO run needs beside them.

    The last two lines are all that is held, and that with the most that a program of a
    step needs at a time. Batches, a few numbers a token, are left out.

    Raises:
      InputError: as `models`, or sizes that do not fit.
    """
    device = compiled.target(options.topology)
    lines = models(options)
    ppo = _ppo(options)
    temporaries = _temporaries(options, _shapes(options), ppo=ppo, device=device)
    columns = options.prompt_length + options.max_new_tokens
    cache = cache_bytes(ppo.model, rows=options.batch_size, columns=columns)
    held = sum(line.device for line in lines)
    host = sum(line.host for line in lines)
    most = held + max(cache, *temporaries.values())
    sampling = temporaries.pop("sampling")
    return [
        *lines,
        Line("KV cache", cache),
        Line("activations of sampling", max(sampling - cache, 0)),
        *(Line(f"activations of {what}", size) for what, size in temporaries.items()),
        Line("held throughout", held, host),
        Line("held at most", most, host),
    ]


def models(options: Options) -> list[Line]:
    """What the models and optimizers of a PPO run take; nothing is compiled.

    Raises:
      InputError: there is no such checkpoint or topology, or a storage that the device
        lacks.
    """
    ways = (WAYS.get(way, {}) for way in (options.reference, options.reward))
    if any("memory" in way for way in ways):
        storage.check_memory(compiled.target(options.topology))
    held = _shapes(options)
    lines = [
        Line("policy", *_bytes(held.state.policy)),
        Line("policy's optimizer", *_bytes(held.state.policy_opt)),
        Line("critic", *_bytes(held.state.critic)),
        Line("critic's optimizer", *_bytes(held.state.critic_opt)),
        Line("reference", *_bytes(held.reference)),
        Line("reward model", *_bytes(held.reward)),
    ]
    if options.reference == "base":
        lines[4] = Line("reference, the base", 0)
    if held.base is None:
        return lines
    return [Line("base of the adapters", *_bytes(held.base)), *lines]


def run(options: Options) -> None:
    """Prints `memory` as a table."""
    where = options.topology or compiled.target(None).device_kind
    name = options.model or f"GPT-2 of {options.num_layers} layers"
    rows = [
        (line.what, round(line.device / 2**20), round(line.host / 2**20))
        for line in memory(options)
    ]
    title = f"Memory of PPO on {name}, on one {where} [MiB]"
    report.table(title, ("", "device", "host"), rows)


def model_of(options: Options) -> ModelConfig:
    """The shape of the model; no parameter is read."""
    if options.model is not None:
        shape = hf.model_config(options.model)
        return dataclasses.replace(shape, dtype=options.dtype)
    return config.gpt2(
        vocab_size=options.vocab_size,
        hidden_size=options.hidden_size,
        num_layers=options.num_layers,
        num_heads=options.num_heads,
        max_positions=options.max_positions,
        dtype=options.dtype,
    )


def cache_bytes(model: ModelConfig, *, rows: int, columns: int) -> int:
    """Bytes of keys and values of every layer."""
    shape = (rows, columns)
    _, key_values = jax.eval_shape(
        lambda key, tokens, mask: decoder.prefill(
            decoder.init(key, model=model), model=model, tokens=tokens, mask=mask
        ),
        jax.eval_shape(jax.random.key, 0),
        jax.ShapeDtypeStruct(shape, jnp.int32),
        jax.ShapeDtypeStruct(shape, jnp.bool_),
    )
    return storage.nbytes(key_values)


def _ppo(options: Options) -> PPO:
    model = model_of(options)
    return PPO(
        model=model,
        critic_model=model,
        policy_optimizer=optax.adamw(1e-5),
        critic_optimizer=optax.adamw(1e-5),
        max_new_tokens=options.max_new_tokens,
        stop_ids=(),
        num_minibatches=options.num_minibatches,
        micro_batch_size=options.micro_batch_size,
        lora=LoRA(rank=options.lora_rank) if options.policy == "lora" else None,
    )


def _shapes(options: Options) -> Held:
    held = functools.partial(_held, options=options, ppo=_ppo(options))
    return jax.eval_shape(held, jax.eval_shape(jax.random.key, 0))


def _held(key: jax.Array, *, options: Options, ppo: PPO) -> Held:
    """What a run holds, made as a run makes it; for `jax.eval_shape` alone."""
    model = ppo.model
    params = decoder.init(key, model=model)
    base, policy = None, params
    critic = critic_.from_policy(params, model=model)
    if ppo.lora is not None:
        base = frozen.freeze(params)
        policy = lora_.init(key, model=model, lora=ppo.lora)
        critic = critic_.from_base(key, model=model, lora=ppo.lora)
    reference, reward = base, None
    if options.reference != "base":
        reference = _freeze(params, options.reference)
    if options.reward == "base" and ppo.lora is not None:
        reward = frozen.freeze(rewards.from_base(key, model=model, lora=ppo.lora))
    elif options.reward != "base":
        scorer = rewards.init(key, params, model=model)
        reward = _freeze(scorer, options.reward)
    return Held(
        state=state_.ppo_state(
            policy=policy,
            critic=critic,
            policy_optimizer=ppo.policy_optimizer,
            critic_optimizer=ppo.critic_optimizer,
            kl=kl_control.fixed(0.1),
        ),
        base=base,
        reference=reference,
        reward=reward,
    )


def _freeze(params: PyTree, way: str) -> Frozen | None:
    return None if way == "none" else frozen.freeze(params, **WAYS[way])


def _temporaries(
    options: Options, held: Held, *, ppo: PPO, device: Any
) -> dict[str, int]:
    """Bytes that each program of a step needs beside its arguments and results."""
    rows = options.batch_size
    shape = (rows, options.prompt_length)
    prompts = jax.eval_shape(
        lambda: Prompts(
            tokens=jnp.zeros(shape, jnp.int32),
            mask=jnp.zeros(shape, bool),
            index=jnp.zeros(rows, jnp.int32),
            sample=jnp.zeros(rows, jnp.int32),
        )
    )
    key = jax.eval_shape(jax.random.key, 0)

    def sample(policy: PyTree, base: Any, prompts: Prompts, key: Any) -> Any:
        return ppo_.sample(policy, prompts=prompts, key=key, ppo=ppo, base=base)

    def learn(
        state: TrainState, reference: Any, base: Any, rollout: Any, key: Any
    ) -> Any:
        return ppo_.learn(
            state,
            rollout=rollout,
            scores=jnp.zeros(rows, jnp.float32),
            reference=reference,
            key=key,
            ppo=ppo,
            base=base,
        )

    def scored(reward: Frozen, base: Any, rollout: Any) -> Any:
        lora = ppo.lora if options.reward == "base" else None
        base = None if lora is None else base
        return rewards.from_model(reward, model=ppo.model, base=base, lora=lora)(
            rollout
        )

    drawn = (held.state.policy, held.base, prompts, key)
    rollout = jax.eval_shape(sample, *drawn)
    found = {"sampling": compiled.memory(sample, *drawn, device=device)}
    if held.reward is not None:
        args = (held.reward, held.base, rollout)
        found["the reward model"] = compiled.memory(scored, *args, device=device)
    learned = (held.state, held.reference, held.base, rollout, key)
    found["scoring and learning"] = compiled.memory(
        learn, *learned, device=device, donate=(0,)
    )
    return {name: memory.temp_size_in_bytes for name, memory in found.items()}


def _bytes(tree: PyTree) -> tuple[int, int]:
    """On the device and on the host; of a `Frozen` the parameters alone."""
    stored = tree.stored if isinstance(tree, Frozen) else tree
    whole = jax.tree.leaves(stored, is_leaf=leaves.is_stored)
    host = sum(
        storage.nbytes(leaf) for leaf in whole if isinstance(leaf, leaves.OnHost)
    )
    return storage.nbytes(stored) - host, host
