"""Ours: `ppo.iteration` as one program, or its arrows as programs on two devices.

An iteration is what a user runs. `Together` is one jitted program, its state donated;
its phases are the same work as programs that are waited for: `ppo.sample`; reward with
`score.reference_logprobs`, and `ppo.values`; the rest of `ppo.learn`, advantages
included. They run after the iteration that counts, so they need not add up to it, and
are compiled once the warm-up is over: its memory is that of a run.

`Apart` has the critic on a device of its own, as `--placement.critic last` does: on a
CPU a virtual one, where models are so small that a product is not worth two threads.
XLA:CPU runs policy and critic of one program one after the other; as two programs each
has a core. Its phases are the same programs, waited for. Seconds of an iteration,
together and apart, on 2 cores: tiny 0.103 and 0.070, small 4.7 and 4.6, gpt2-small 7.0
and 7.4.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

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
    masked,
    ppo,
    state,
)
from rlhf_jax.algorithms.batch import Prompts, Rollout, Scored
from rlhf_jax.algorithms.flow import score
from rlhf_jax.devices import critic_devices, program_cache, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models import layout
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any
Found = tuple[masked.Stats, Scored]
Lap = Callable[[str, Any], None]  # (phase, what it is over with)

LARGEST_APART = 64  # hidden size of models that are worth a core each, on a CPU


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


def frozen_scores(
    reference: Frozen, *, answered: Rollout, algorithm: ppo.PPO
) -> dict[str, Array]:
    """What reward and reference say of a rollout."""
    return {
        "scores": reward(answered),
        "ref_logprobs": score.reference_logprobs(
            reference,
            rollout=answered,
            model=algorithm.model,
            max_new_tokens=algorithm.max_new_tokens,
            temperature=algorithm.temperature,
        ),
    }


class Together:
    """Policy and critic in one program."""

    def __init__(
        self, algorithm: ppo.PPO, *, params: Params, workload: Workload
    ) -> None:
        self._reference = frozen.freeze(params)
        self.train = state.ppo_state(
            policy=params,
            critic=critic.from_policy(params, model=algorithm.critic_model),
            policy_optimizer=algorithm.policy_optimizer,
            critic_optimizer=algorithm.critic_optimizer,
            kl=kl_control.fixed(workload.kl_coef),
        )
        donated = functools.partial(jax.jit, donate_argnames=("state",))
        whole = donated(
            functools.partial(ppo.iteration, recipe=algorithm, reward=reward)
        )
        began = time.perf_counter()
        self._iteration = whole.lower(
            self.train,
            prompts=prompts_of(workload, step=0),
            reference=self._reference,
            key=jax.random.key(1),
        ).compile()
        self.about = {"compile": time.perf_counter() - began}
        self._sample = jax.jit(functools.partial(ppo.sample, recipe=algorithm))
        self._frozen_scores = jax.jit(
            functools.partial(frozen_scores, algorithm=algorithm)
        )
        self._values = jax.jit(functools.partial(ppo.values, recipe=algorithm))
        self._learn = donated(
            functools.partial(ppo.learn, recipe=algorithm, reference=None)
        )

    def iteration(self, *, prompts: Prompts, key: Array) -> Found:
        self.train, stats, scored = jax.block_until_ready(
            self._iteration(
                self.train, prompts=prompts, reference=self._reference, key=key
            )
        )
        return stats, scored

    def phases(self, *, prompts: Prompts, key: Array, lap: Lap) -> None:
        answered = self._sample(self.train.policy, prompts=prompts, key=key)
        lap("rollout", answered)
        outputs = self._frozen_scores(self._reference, answered=answered)
        outputs["values"] = self._values(self.train, rollout=answered)
        lap("score", outputs)
        self.train, *_ = self._learn(self.train, rollout=answered, key=key, **outputs)
        lap("update", self.train)


class Apart:
    """The critic on a device of its own; compiled as it runs for the first time."""

    about: Mapping[str, float] = {}

    def __init__(
        self, algorithm: ppo.PPO, *, params: Params, workload: Workload
    ) -> None:
        here, there = (MeshShape().make([device]) for device in jax.devices()[:2])
        place = functools.partial(sharding.place, mesh=here)
        self._reference = place(frozen.freeze(params))
        self._devices = critic_devices.CriticDevices(
            recipe=algorithm, mesh=there, home=here
        )
        self._critic = self._devices.state_of(
            critic.from_policy(params, model=algorithm.critic_model)
        )
        self.train = place(
            state.grpo_state(
                policy=params,
                policy_optimizer=algorithm.policy_optimizer,
                kl=kl_control.fixed(workload.kl_coef),
            )
        )
        donated = functools.partial(jax.jit, donate_argnames=("state",))
        self._sample = jax.jit(functools.partial(ppo.sample, recipe=algorithm))
        self._frozen_scores = jax.jit(
            functools.partial(frozen_scores, algorithm=algorithm)
        )
        self._make_experience = donated(
            functools.partial(ppo.make_experience, recipe=algorithm, reference=None)
        )
        self._update = donated(
            functools.partial(ppo.update, recipe=algorithm, critic_apart=True)
        )
        self._shuffle_key = jax.jit(ppo.shuffle_key)

    def iteration(self, *, prompts: Prompts, key: Array) -> Found:
        found = self.phases(prompts=prompts, key=key, lap=lambda phase, done: None)
        jax.block_until_ready((self.train, self._critic))
        return found

    def phases(self, *, prompts: Prompts, key: Array, lap: Lap) -> Found:
        answered = self._sample(self.train.policy, prompts=prompts, key=key)
        lap("rollout", answered)
        values = self._devices.values(self._critic, rollout=answered)
        outputs = self._frozen_scores(self._reference, answered=answered)
        lap("score", (values, outputs))
        self.train, experience, _, scored = self._make_experience(
            self.train, rollout=answered, values=values, **outputs
        )
        key = self._shuffle_key(key)
        self._critic, _ = self._devices.update(
            self._critic, experience=experience, key=key
        )
        self.train, stats = self._update(self.train, experience=experience, key=key)
        lap("update", (self.train, self._critic))
        return stats, scored


def main(workload: Workload) -> None:
    kind = Together
    if workload.hidden_size <= LARGEST_APART:
        jax.config.update("jax_num_cpu_devices", 2)  # read by the backend as it starts
        kind = Apart if jax.default_backend() == "cpu" else Together
    algorithm = algorithm_of(workload)
    init = jax.jit(decoder.init, static_argnames=("model",))
    params = init(jax.random.key(0), model=algorithm.model)
    before = jax.tree.map(np.array, params["final_norm"])
    parameters = sum(leaf.size for leaf in jax.tree.leaves(params))
    learner = kind(algorithm, params=params, workload=workload)
    program_cache.give_back_memory()  # as a run does once its programs are compiled

    def lap(phase: str, done: Any) -> None:
        jax.block_until_ready(done)
        clock.lap(phase)

    def prepare() -> None:
        learner.phases(prompts=prompts, key=key, lap=lap)
        program_cache.give_back_memory()

    def check() -> dict[str, float]:
        loss, weight = stats["loss/policy"]
        assert weight is not None
        after = jax.device_get(learner.train.policy["final_norm"])
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
        about={"parameters": parameters, **learner.about},
        check=check,
        prepare=prepare,
    ):
        prompts = jax.block_until_ready(prompts_of(workload, step=step))
        key = jax.block_until_ready(jax.random.fold_in(jax.random.key(2), step))
        clock.start()
        stats, scored = learner.iteration(prompts=prompts, key=key)
        if step == 0:
            program_cache.give_back_memory()
        if line_protocol.counts(step):
            clock.lap("update")
            seconds = clock.total
            key = jax.block_until_ready(jax.random.fold_in(key, 0))
            clock.start()
            learner.phases(prompts=prompts, key=key, lap=lap)
            clock.seconds["iteration"] = seconds


if __name__ == "__main__":
    main(line_protocol.read_workload())
