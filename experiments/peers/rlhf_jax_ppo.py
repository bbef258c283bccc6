"""Ours: `ppo.iteration` as one program, and its phases as three.

An iteration is what a user runs: one jitted program, its state donated. The phases are
the same work cut into three programs, each waited for: `ppo.sample`; reward,
`score.reference_logprobs` and `ppo.values`; the rest of `ppo.learn`, advantages
included. They run after the iteration that counts, so they need not add up to it, and
are compiled once the warm-up is over: its memory is that of a run.
"""

from __future__ import annotations

import dataclasses
import functools
import time

import jax
import jax.numpy as jnp
import line_protocol
import numpy as np
import optax
from line_protocol import Clock, Workload

from rlhf_jax import (
    batch,
    config,
    critic,
    decoder,
    frozen,
    kl_control,
    layout,
    masked,
    ppo,
    score,
    state,
)
from rlhf_jax.roles.frozen import Frozen
from rlhf_jax.runtime import program_cache
from rlhf_jax.stages.batch import Prompts, Rollout
from rlhf_jax.stages.state import TrainState

Array = jax.Array


def reward(answered: Rollout) -> Array:
    """f32[B]: the share of response tokens that are worth something."""
    worth = (answered.tokens % line_protocol.DIVISOR == 0).astype(jnp.float32)
    return masked.masked_mean(worth, mask=answered.response_mask, axis=1)


def algorithm_of(workload: Workload) -> ppo.PPO:
    model = layout.fastest(
        config.gpt2(
            vocab_size=workload.vocab_size,
            hidden_size=workload.hidden_size,
            num_layers=workload.num_layers,
            num_heads=workload.num_heads,
            max_positions=workload.max_positions,
        )
    )
    # Divides the vocabulary of tiny, whose head the default of 128 would double.
    model = dataclasses.replace(model, vocab_multiple=64)
    adamw = functools.partial(
        optax.adamw, workload.learning_rate, weight_decay=workload.weight_decay
    )
    return ppo.PPO(
        model=model,
        critic_model=model,
        policy_optimizer=adamw(),
        critic_optimizer=adamw(),
        max_new_tokens=workload.response_length,
        stop_ids=(),
        temperature=workload.temperature,
        gamma=workload.gamma,
        lam=workload.lam,
        clip_range=workload.clip_range,
        vf_coef=workload.vf_coef,
        num_epochs=workload.num_epochs,
        num_minibatches=workload.num_minibatches,
    )


def prompts_of(workload: Workload, *, step: int) -> Prompts:
    tokens = jnp.asarray(workload.prompts(step), jnp.int32)
    rows = tokens.shape[0]
    return batch.Prompts(
        tokens=tokens,
        mask=jnp.ones(tokens.shape, bool),
        index=jnp.arange(rows, dtype=jnp.int32),
        sample=jnp.zeros(rows, jnp.int32),
    )


def price(
    train: TrainState, *, answered: Rollout, reference: Frozen, algorithm: ppo.PPO
) -> dict[str, Array]:
    """What `ppo.learn` may be given of a rollout."""
    return {
        "scores": reward(answered),
        "ref_logprobs": score.reference_logprobs(
            reference,
            rollout=answered,
            model=algorithm.model,
            max_new_tokens=algorithm.max_new_tokens,
            temperature=algorithm.temperature,
        ),
        "values": ppo.values(train, rollout=answered, ppo=algorithm),
    }


def main(workload: Workload) -> None:
    algorithm = algorithm_of(workload)
    init = jax.jit(decoder.init, static_argnames=("model",))
    params = init(jax.random.key(0), model=algorithm.model)
    reference = frozen.freeze(params)
    train = state.ppo_state(
        policy=params,
        critic=critic.from_policy(params, model=algorithm.critic_model),
        policy_optimizer=algorithm.policy_optimizer,
        critic_optimizer=algorithm.critic_optimizer,
        kl=kl_control.fixed(workload.kl_coef),
    )
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    before = jax.tree.map(np.array, params["final_norm"])

    donated = functools.partial(jax.jit, donate_argnames=("state",))
    whole = donated(functools.partial(ppo.iteration, ppo=algorithm, reward=reward))
    began = time.perf_counter()
    iteration = whole.lower(
        train,
        prompts=prompts_of(workload, step=0),
        reference=reference,
        key=jax.random.key(1),
    ).compile()
    compile_seconds = time.perf_counter() - began
    program_cache.give_back_memory()  # as a run does once its programs are compiled

    sample = jax.jit(functools.partial(ppo.sample, ppo=algorithm))
    score_all = jax.jit(functools.partial(price, algorithm=algorithm))
    learn = donated(functools.partial(ppo.learn, ppo=algorithm, reference=None))

    def phases(train: TrainState, *, prompts: Prompts, key: Array) -> TrainState:
        answered = jax.block_until_ready(sample(train.policy, prompts=prompts, key=key))
        clock.lap("rollout")
        prices = jax.block_until_ready(
            score_all(train, answered=answered, reference=reference)
        )
        clock.lap("score")
        train, *_ = jax.block_until_ready(
            learn(train, rollout=answered, key=key, **prices)
        )
        clock.lap("update")
        return train

    def prepare() -> None:
        nonlocal train
        train = phases(train, prompts=prompts, key=key)
        program_cache.give_back_memory()

    def check() -> dict[str, float]:
        loss, weight = stats["loss/policy"]
        assert weight is not None
        after = jax.device_get(train.policy["final_norm"])
        moved = jax.tree.map(lambda new, old: np.abs(new - old).max(), after, before)
        return {
            "response_tokens": int(scored.rollout.response_mask.sum()),
            "mean_score": float(scored.scores.mean()),
            "loss": float(loss / weight),
            "moved": float(max(jax.tree.leaves(moved))),
        }

    clock = Clock()
    for step in line_protocol.iterations(
        clock=clock,
        versions=line_protocol.versions_of("rlhf-jax", "jax", "jaxlib", "flax"),
        about={"compile": compile_seconds, "parameters": parameters},
        check=check,
        prepare=prepare,
    ):
        prompts = jax.block_until_ready(prompts_of(workload, step=step))
        key = jax.block_until_ready(jax.random.fold_in(jax.random.key(2), step))
        clock.start()
        train, stats, scored = jax.block_until_ready(
            iteration(train, prompts=prompts, reference=reference, key=key)
        )
        if line_protocol.counts(step):
            clock.lap("update")
            seconds = clock.total
            key = jax.block_until_ready(jax.random.fold_in(key, 0))
            clock.start()
            train = phases(train, prompts=prompts, key=key)
            clock.seconds["iteration"] = seconds


if __name__ == "__main__":
    main(line_protocol.read_workload())
