"""PPO and GRPO as shapes: a step of `rlhf-jax ppo` or `rlhf-jax grpo`.

    sampling ─> the reward model ─> the reference ─> scoring and learning
    policy      reward model        reference        policy, critic and both optimizers

GRPO has a verifier, of which nothing is planned, in the reward model's place, unless
one is asked for, and no critic: its last program is `learning`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms import ppo
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.ppo.recipe import PPO
from rlhf_jax.algorithms.state import TrainState, grpo_state, ppo_state
from rlhf_jax.devices.mesh_shape import ONE_DEVICE
from rlhf_jax.functional.kl import control
from rlhf_jax.models import decoder
from rlhf_jax.models.generation import continuous_batching, row_shares
from rlhf_jax.models.lora import init
from rlhf_jax.planning import model_flops, run_shape, workload
from rlhf_jax.planning.model_flops import Texts
from rlhf_jax.planning.run_shape import Options
from rlhf_jax.planning.workload import Program, Workload
from rlhf_jax.roles import rewards
from rlhf_jax.roles.critic import from_base, from_policy
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen

PyTree = Any
SCORING_TOO = "scoring and learning"  # where the critic values the rollout first


class Resident(NamedTuple):
    """Shapes of all that a run holds, None for what it does not."""

    state: TrainState
    base: Frozen | None
    reference: Frozen | None  # None too where it is the base
    reward: Frozen | None


def workload_of(options: Options, *, recipe: PolicyGradient, texts: Texts) -> Workload:
    """A step of PPO or GRPO, by its recipe.

    Args:
      options: sizes and storages.
      recipe: the algorithm with its shapes and optimizers.
      texts: the lengths of a batch.

    Raises:
      InputError: sizes that do not fit, or a model that cannot be stored so.
    """
    shapes = resident(options, recipe=recipe)
    rows, columns = options.batch_size, options.columns
    numbers = 4 if shapes.state.critic is None else 6  # f32 a token
    masks = 2 if shapes.state.critic is None else 3
    return Workload(
        model=recipe.model,
        parts=parts(shapes),
        programs=programs(options, shapes, recipe=recipe, texts=texts),
        tokens=texts.tokens,
        within={
            "KV cache": workload.cache_bytes(
                recipe.model, rows=options.sampled_rows, columns=columns
            ),
            # `batch.Experience` or `batch.PolicyExperience`, and tokens.
            "experience": rows * columns * (4 + masks + 4 * numbers),
        },
    )


def resident(options: Options, *, recipe: PolicyGradient) -> Resident:
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


def programs(
    options: Options,
    resident: Resident,
    *,
    recipe: PolicyGradient,
    texts: Texts | None = None,
) -> list[Program]:
    """The programs of a step in their order, as the trainer has them.

    Args:
      texts: the lengths of a batch; None are responses of all columns.

    Raises:
      InputError: sizes that do not fit.
    """
    if texts is None:
        texts = options.texts
    flops = functools.partial(model_flops.forward, recipe.model, texts)
    train = functools.partial(
        model_flops.training,
        recipe.model,
        texts,
        adapters=run_shape.adapter_count(options, resident.state.policy),
    )
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

    sampler_mesh = getattr(options, "sampler_mesh", None)
    policy = run_shape.sampled_with(resident.state.policy, options.sampler)
    apart = sampler_mesh is not None or options.sampler != "copy"
    drawn = (policy, resident.base, prompts, key)
    rollout = jax.eval_shape(sample, *drawn)
    sampled = model_flops.forward(
        recipe.model, texts, head=True, group_size=recipe.rows_per_prompt
    )
    turns, repeats = _turns(options, recipe=recipe, texts=texts)
    of_step = [
        Program(
            name="sampling",
            function=sample,
            args=drawn,
            # A copy of the policy is there while this runs, beside the policy.
            reads=() if apart else ("policy", *base),
            batch=(2,),
            stage="rollout",
            model_flops=sampled,
            trips=turns,
            repeats=repeats,
            mesh=sampler_mesh,
            resharded=() if sampler_mesh is None else (0,),
        )
    ]
    if resident.reward is not None:
        over = resident.base if options.reward_model == "base" else None
        of_step.append(
            Program(
                name="the reward model",
                function=scored,
                args=(resident.reward, over, rollout),
                reads=("reward model", *(base if over is not None else ())),
                batch=(2,),
                stage="score",
                model_flops=flops(head=False),
            )
        )
    reference = resident.base if options.reference == "base" else resident.reference
    if reference is not None:
        of_step.append(
            Program(
                name="the reference",
                function=ref_logprobs,
                args=(reference, rollout),
                reads=base if options.reference == "base" else ("reference",),
                batch=(1,),
                stage="score",
                model_flops=flops(head=True),
            )
        )
    scores = jax.ShapeDtypeStruct((rows,), jnp.float32)
    ref = rollout.old_logprobs if reference is not None else None
    learned = (resident.state, resident.base, rollout, scores, ref, key)
    learning = recipe.num_epochs * train(head=True)
    state = ["policy", "policy's optimizer"]
    if resident.state.critic is not None:
        state += ["critic", "critic's optimizer"]
        # And the values before the first update.
        learning += recipe.num_epochs * train(head=False) + flops(head=False)
    of_step.append(
        Program(
            name="learning" if resident.state.critic is None else SCORING_TOO,
            function=learn,
            args=learned,
            reads=(*state, *base),
            batch=(2, 3, 4),
            stage="update",
            model_flops=learning,
            donate=(0,),
        )
    )
    return of_step


def _turns(
    options: Options, *, recipe: PolicyGradient, texts: Texts
) -> tuple[tuple[int, ...], int]:
    """Turns of the sampler's loops, and how often the first of them runs.

    In pages every share of the rows has loops of its own, of which the longest count.
    """
    places = recipe.continuous_batching
    if places is None:
        turns = workload.decoding_turns(
            options.prompt_length, options.max_new_tokens, longest=max(texts.responses)
        )
        return turns, 1
    model, shares = recipe.model, 1
    if model.cache_pages is not None:
        of_policy = getattr(options, "mesh", ONE_DEVICE)
        shares = (getattr(options, "sampler_mesh", None) or of_policy).data
        row_shares.check_shares(
            shares,
            rows=options.batch_size,
            places=places,
            pages=model.cache_pages,
            group_size=recipe.rows_per_prompt,
        )
        model = dataclasses.replace(model, cache_pages=model.cache_pages // shares)
    arriving = continuous_batching.prompts_at_a_time(
        model,
        places=places // shares,
        prompt=options.prompt_length,
        new=options.max_new_tokens,
        group_size=recipe.rows_per_prompt,
    )
    arrivals = -(-options.batch_size // shares // arriving)
    turns = max(
        (
            workload.batching_turns(
                # Dealt out, as they are sorted here and in a batch are not.
                texts.responses[share::shares],
                places=places // shares,
                arriving=arriving,
            )
            for share in range(shares)
        ),
        key=lambda turns: arrivals * turns[0] + sum(turns[1:]),
    )
    return turns, arrivals


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


def _made(key: jax.Array, *, options: Options, recipe: PolicyGradient) -> Resident:
    """What a run holds, made as a run makes it; for `jax.eval_shape` alone."""
    model = recipe.model
    params = decoder.init(key, model=model)
    base, policy = None, params
    if recipe.lora is not None:
        base = run_shape.freeze(params, options.base)
        policy = init(key, model=model, lora=recipe.lora)
    reference, reward = None, None
    if options.reference != "base":
        reference = run_shape.freeze(params, options.reference)
    if options.reward_model == "base" and recipe.lora is not None:
        reward = frozen.freeze(rewards.from_base(key, model=model, lora=recipe.lora))
    elif options.reward_model != "base":
        scorer = rewards.init(key, params, model=model)
        reward = run_shape.freeze(scorer, options.reward_model)
    trained = {
        "policy": policy,
        "policy_optimizer": recipe.policy_optimizer,
        "kl": control.fixed(0.1),
    }
    if not isinstance(recipe, PPO):
        return Resident(grpo_state(**trained), base, reference, reward)
    if recipe.lora is None:
        critic = from_policy(params, model=model)
    else:
        critic = from_base(key, model=model, lora=recipe.lora)
    state = ppo_state(
        **trained, critic=critic, critic_optimizer=recipe.critic_optimizer
    )
    return Resident(state, base, reference, reward)
