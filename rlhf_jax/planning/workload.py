"""A PPO run as shapes: what it holds, and the programs that it runs one after another.

    sampling ─> the reward model ─> the reference ─> scoring and learning
    policy      reward model        reference        policy, critic and both optimizers

`memory` asks the compiler about them on one device, `plan` on a slice of many. Nothing
is allocated: everything here comes from `jax.eval_shape`.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import ppo
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.ppo.recipe import PPO
from rlhf_jax.algorithms.state import TrainState, ppo_state
from rlhf_jax.functional.kl import control
from rlhf_jax.models import caches, decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import init
from rlhf_jax.planning import run_shape
from rlhf_jax.planning.run_shape import Options
from rlhf_jax.roles import rewards
from rlhf_jax.roles.critic import from_base, from_policy
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen

PyTree = Any


class Resident(NamedTuple):
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
    # Of loops that end when every row has stopped, in their order, at the most.
    trips: tuple[int, ...] = (1,)


def resident(options: Options, *, recipe: PPO) -> Resident:
    """Shapes of what a run holds.

    Raises:
      InputError: the reference or reward model cannot be stored so; names the leaf.
    """
    made = functools.partial(_made, options=options, recipe=recipe)
    return jax.eval_shape(made, jax.eval_shape(jax.random.key, 0))


def parts(resident: Resident) -> dict[str, PyTree]:
    """The resident arrays by name, without those that a run does not have."""
    named = {
        "base of the adapters": resident.base,
        "policy": resident.state.policy,
        "policy's optimizer": resident.state.policy_opt,
        "critic": resident.state.critic,
        "critic's optimizer": resident.state.critic_opt,
        "reference": resident.reference,
        "reward model": resident.reward,
    }
    return {name: tree for name, tree in named.items() if tree is not None}


def programs(options: Options, resident: Resident, *, recipe: PPO) -> list[Program]:
    """The programs of a step in their order, as `rlhf-jax ppo` has them.

    Raises:
      InputError: sizes that do not fit.
    """
    rows = options.batch_size
    prompts = _shapes_of_prompts(options)
    key = jax.eval_shape(jax.random.key, 0)
    base = ("base of the adapters",) if resident.base is not None else ()

    def sample(policy: PyTree, base: Any, prompts: Prompts, key: Any) -> Any:
        return ppo.sample(policy, prompts=prompts, key=key, recipe=recipe, base=base)

    def scored(reward: Frozen, base: Any, rollout: Any) -> Any:
        lora = None if base is None else recipe.lora
        return rewards.from_model(reward, model=recipe.model, base=base, lora=lora)(
            rollout
        )

    def ref_logprobs(reference: Frozen, rollout: Any) -> Any:
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
        return ppo.learn(
            state,
            rollout=rollout,
            scores=scores,
            reference=None,
            ref_logprobs=ref,
            key=key,
            recipe=recipe,
            base=base,
        )

    drawn = (resident.state.policy, resident.base, prompts, key)
    rollout = jax.eval_shape(sample, *drawn)
    turns = decoding_turns(options.prompt_length, options.max_new_tokens)
    of_step = [Program("sampling", sample, drawn, ("policy", *base), (2,), trips=turns)]
    if resident.reward is not None:
        over = resident.base if options.reward == "base" else None
        reads = ("reward model", *(base if options.reward == "base" else ()))
        args = (resident.reward, over, rollout)
        of_step.append(Program("the reward model", scored, args, reads, (2,)))
    reference = resident.base if options.reference == "base" else resident.reference
    if reference is not None:
        reads = base if options.reference == "base" else ("reference",)
        args = (reference, rollout)
        of_step.append(Program("the reference", ref_logprobs, args, reads, (1,)))
    scores = jax.ShapeDtypeStruct((rows,), jnp.float32)
    ref = rollout.old_logprobs if reference is not None else None
    learned = (resident.state, resident.base, rollout, scores, ref, key)
    state = ("policy", "policy's optimizer", "critic", "critic's optimizer")
    of_step.append(
        Program(
            name="scoring and learning",
            function=learn,
            args=learned,
            reads=(*state, *base),
            batch=(2, 3, 4),
            donate=(0,),
        )
    )
    return of_step


def decoding_turns(prompt_length: int, max_new_tokens: int) -> tuple[int, ...]:
    """Tokens that are decoded in each window of a cache that grows, at the most.

    The first token comes from the prompts' own pass, and the last is run no more.

    Args:
      prompt_length: columns of prompts, tokens.
      max_new_tokens: columns of responses, tokens.

    Returns:
      Turns of the sampler's loops, one after another.
    """
    size = prompt_length + max_new_tokens
    ends = caches.growing_widths(size, first=prompt_length)
    ends = (prompt_length, *(min(end, size - 1) for end in ends))
    return tuple(end - start for start, end in itertools.pairwise(ends)) or (1,)


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


def _made(key: jax.Array, *, options: Options, recipe: PPO) -> Resident:
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
    return Resident(
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
    return None if way == "none" else frozen.freeze(params, **run_shape.WAYS[way])
