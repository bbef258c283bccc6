"""Policy gradients with β annealed in stages, in the world of `enumerable`."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from worlds import enumerable
from worlds.enumerable import World

from certificates.verdicts import Policy
from rlhf_jax import critic, kl_control, masked, ppo, state
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.functional import checks
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import Frozen, FrozenModels, References
from rlhf_jax.runs import run

Array = jax.Array
# `ppo.iteration`, or another method's, with its recipe bound.
Iteration = Callable[..., tuple[TrainState, masked.Stats, Any]]
ITERATIONS_A_STEP = 25  # iterations in one program, which is a step of a stage
SLIDE = 0.4  # share of a level's iterations in which β falls to the level
HOLD = 0.5  # share of a level's iterations before its learning rates fall
LAST = 0.01  # final learning rate, as a share of the first


def check_annealing(betas: Sequence[float], *, iterations: int) -> None:
    """Raises InputError unless `betas` fall and `iterations` fill whole steps."""
    checks.positive(iterations=iterations)
    checks.positive(**{f"betas[{i}]": beta for i, beta in enumerate(betas)})
    falls = all(high > low for high, low in itertools.pairwise(betas))
    if not betas or not falls:
        raise checks.InputError(
            f"betas: expected one or more, each below the last, as the policy is "
            f"annealed along them, got {betas}; order them"
        )
    low, high = enumerable.FRONTIER_BETAS
    if betas[-1] < low or betas[0] > high:
        raise checks.InputError(
            f"betas: expected from {low:g} to {high:g}, along which the exact frontier "
            f"is drawn, got {betas}; choose others"
        )
    if iterations % ITERATIONS_A_STEP:
        raise checks.InputError(
            f"iterations: expected a multiple of {ITERATIONS_A_STEP}, the iterations "
            f"of one program, got {iterations}"
        )


def falling(learning_rate: float, *, updates: int, iterations: int) -> optax.Schedule:
    """A learning rate that is constant and then falls, anew at each level of β.

    Args:
      updates: number of updates in an iteration.
    """

    def schedule(update: Any) -> Any:
        share = (update // updates) % iterations / iterations
        return learning_rate * LAST ** jnp.clip((share - HOLD) / (1 - HOLD), 0, 1)

    return schedule


def annealing(betas: Sequence[float], *, iterations: int) -> kl_control.ScheduledKL:
    """A controller under which β falls to each of `betas` in turn and stays there."""
    levels = jnp.asarray(betas, jnp.float32)
    before = jnp.concatenate([levels[:1], levels[:-1]])

    def schedule(iteration: Array) -> Array:
        level = jnp.minimum(iteration // iterations, len(betas) - 1)
        share = (iteration - level * iterations) / iterations
        way = jnp.clip(share / SLIDE, 0.0, 1.0).astype(jnp.float32)
        return before[level] ** (1 - way) * levels[level] ** way

    return kl_control.scheduled(schedule, num_steps=iterations * len(betas))


@functools.partial(
    jax.jit, static_argnames=("iteration", "batch_size"), donate_argnames=("train",)
)
def advance(
    train: TrainState,
    *,
    reference: Frozen,
    table: Array,
    key: Array,
    iteration: Iteration,
    batch_size: int,
    further: References | None = None,
) -> tuple[TrainState, masked.Stats]:
    """Runs ITERATIONS_A_STEP iterations in one program and sums their stats."""

    def iterate(train: TrainState, _: None) -> tuple[TrainState, masked.Stats]:
        train, stats, _ = iteration(
            train,
            prompts=enumerable.prompts(batch_size),
            frozen=FrozenModels(reference=reference, further=further or {}),
            reward=enumerable.reward_of(table),
            key=jax.random.fold_in(key, train.step),
        )
        return train, stats

    train, stats = jax.lax.scan(iterate, train, None, length=ITERATIONS_A_STEP)
    return train, masked.total_stats(stats)


def improve(
    world: World,
    *,
    name: str,
    train: TrainState,
    iteration: Iteration,
    betas: Sequence[float],
    key: Array,
    job: run.Run,
    model: ModelConfig,
    iterations: int,
    batch_size: int,
    further: References | None = None,
) -> list[Policy]:
    """Trains from the reference and returns the policy at the end of each of `betas`.

    Every level has `iterations` iterations; the controller in `train` sets their β.
    With further references the KL of a policy is KL_ref + Σ_i w_i·KL_i.
    """
    table = jnp.asarray(world.rewards, jnp.float32)
    reached = jnp.zeros((len(betas), enumerable.NUM_RESPONSES), jnp.float32)
    kl = jnp.zeros(len(betas), jnp.float32)
    stage_state = {
        "train": train,
        "reference": world.reference,
        "reached": reached,
        "kl": kl,
    }
    with job.stage(name, stage_state, meta={}) as stage:
        for step in stage.steps():
            stage.state["train"], stats = advance(
                stage.state["train"],
                reference=stage.state["reference"],
                table=table,
                key=key,
                iteration=iteration,
                batch_size=batch_size,
                further=further,
            )
            level = step * ITERATIONS_A_STEP // iterations
            log_policy = enumerable.known(
                stage.state["train"].policy, model=model, temperature=1.0
            )
            stage.state["reached"] = (
                stage.state["reached"]
                .at[level]
                .set(jnp.asarray(log_policy, jnp.float32))
            )
            policy_kl = enumerable.run_kl(
                stage.state["train"].policy,
                stage.state["reference"],
                model=model,
                temperature=1.0,
                further=further,
            )
            stage.state["kl"] = stage.state["kl"].at[level].set(policy_kl)
            best = world.optimum(betas[level]).log_policy
            distance = jnp.float32(enumerable.divergence(log_policy, best))
            stats["exact/kl_to_optimum"] = (distance, jnp.ones((), jnp.float32))
            stage.end_step(step, stats)
        return [
            Policy(log_policy, float(policy_kl))
            for log_policy, policy_kl in zip(
                np.asarray(stage.state["reached"], np.float64),
                stage.state["kl"],
                strict=True,
            )
        ]


def start(
    world: World, algorithm: ppo.PPO, controller: kl_control.KLController
) -> TrainState:
    """Initial state: policy and critic trunk are copies of the reference."""
    return state.ppo_state(
        policy=storage.store(world.start),
        critic=critic.from_policy(world.start, model=algorithm.critic_model),
        policy_optimizer=algorithm.policy_optimizer,
        critic_optimizer=algorithm.critic_optimizer,
        kl=controller,
    )
