"""Iterations of rlhf_jax in one program, in two with packed rows, or on two devices."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import line_protocol
from line_protocol import Workload
from rlhf_jax_lengths import Pack, forced

from rlhf_jax import (
    batch,
    critic,
    frozen,
    kl_control,
    masked,
    ppo,
    state,
)
from rlhf_jax.algorithms.batch import Prompts, Rollout, RolloutPacking, Scored
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.state import TrainState
from rlhf_jax.devices import critic_devices, program_cache, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.roles.reference.frozen import NO_MODELS, Frozen, FrozenModels

Array = jax.Array
Params = Any
Output = tuple[masked.Stats, Scored]
Lap = Callable[[str, Any], None]  # (phase, the arrays that end it)


def reward(answered: Rollout) -> Array:
    """f32[B]: the share of response tokens that are multiples of DIVISOR."""
    worth = (answered.tokens % line_protocol.DIVISOR == 0).astype(jnp.float32)
    return masked.masked_mean(worth, mask=answered.response_mask, axis=1)


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
    reference: Frozen,
    *,
    answered: Rollout,
    packing: RolloutPacking | None,
    algorithm: ppo.PPO,
) -> dict[str, Any]:
    """The scores and the reference's log-probs of a rollout."""
    return {
        "scores": reward(answered),
        "ref_output": batch.ReferenceOutput(
            score.reference_logprobs(
                reference,
                rollout=answered,
                model=algorithm.model,
                max_new_tokens=algorithm.max_new_tokens,
                temperature=algorithm.temperature,
                packing=None if packing is None else packing.batch,
            )
        ),
    }


def rewarded(
    state: TrainState,
    *,
    rollout: Rollout,
    reference: Frozen,
    key: Array,
    packing: RolloutPacking,
    algorithm: ppo.PPO,
) -> tuple[TrainState, masked.Stats, Scored]:
    """The part of `ppo.iteration` after the rollout, with packed rows."""
    return ppo.learn(
        state,
        rollout=rollout,
        scores=reward(rollout),
        frozen=FrozenModels(reference=reference),
        key=key,
        recipe=algorithm,
        packing=packing,
    )


class Together:
    """Policy and critic in one program, or in two with packed rows."""

    about: Mapping[str, float] = {}

    def __init__(
        self,
        algorithm: ppo.PPO,
        *,
        params: Params,
        workload: Workload,
        pack: Pack | None,
    ) -> None:
        self._reference = frozen.freeze(params)
        self.train = state.ppo_state(
            policy=params,
            critic=critic.from_policy(params, model=algorithm.critic_model),
            policy_optimizer=algorithm.policy_optimizer,
            critic_optimizer=algorithm.critic_optimizer,
            kl=kl_control.fixed(workload.kl_coef),
        )
        self.pack: Pack | None = pack
        self._is_compiled = False
        stopping = forced(workload)
        donated = functools.partial(jax.jit, donate_argnames=("state",))
        bind = functools.partial
        whole = donated(stopping(bind(ppo.iteration, recipe=algorithm, reward=reward)))
        self._rewarded = donated(bind(rewarded, algorithm=algorithm))
        self._sample = jax.jit(stopping(bind(ppo.sample, recipe=algorithm)))
        self._frozen_scores = jax.jit(bind(frozen_scores, algorithm=algorithm))
        self._values = jax.jit(bind(ppo.values, recipe=algorithm))
        self._learn = donated(bind(ppo.learn, recipe=algorithm, frozen=NO_MODELS))
        if pack is None:
            began = time.perf_counter()
            self._iteration = whole.lower(
                self.train,
                prompts=prompts_of(workload, step=0),
                frozen=FrozenModels(reference=self._reference),
                key=jax.random.key(1),
            ).compile()
            self.about = {"compile": time.perf_counter() - began}

    def iteration(self, *, prompts: Prompts, key: Array) -> Output:
        if self.pack is None:
            models = FrozenModels(reference=self._reference)
            done = self._iteration(self.train, prompts=prompts, frozen=models, key=key)
        else:
            answered = self._sample(self.train.policy, prompts=prompts, key=key)
            read = {
                "rollout": answered,
                "reference": self._reference,
                "packing": self.pack(answered, key=key),
                "key": key,
            }
            if not self._is_compiled:  # compile first, as a run does
                self._rewarded.lower(self.train, **read).compile()
                program_cache.give_back_memory()
                self._is_compiled = True
            done = self._rewarded(self.train, **read)
        self.train, stats, scored = jax.block_until_ready(done)
        return stats, scored

    def phases(self, *, prompts: Prompts, key: Array, lap: Lap) -> None:
        answered = self._sample(self.train.policy, prompts=prompts, key=key)
        lap("rollout", answered)
        packing = None if self.pack is None else self.pack(answered, key=key)
        outputs = self._frozen_scores(
            self._reference, answered=answered, packing=packing
        )
        read = {"rollout": answered, "packing": packing}
        outputs["values"] = self._values(self.train, **read)
        lap("score", outputs)
        self.train, *_ = self._learn(self.train, key=key, **read, **outputs)
        lap("update", self.train)


class Apart:
    """The critic on its own device; programs are compiled on their first call."""

    about: Mapping[str, float] = {}

    def __init__(
        self,
        algorithm: ppo.PPO,
        *,
        params: Params,
        workload: Workload,
        pack: Pack | None,
    ) -> None:
        self.pack: Pack | None = pack
        here, sampler_mesh = (
            MeshShape().make([device]) for device in jax.devices()[:2]
        )
        place = functools.partial(sharding.place, mesh=here)
        self._reference = place(frozen.freeze(params))
        self._devices = critic_devices.CriticDevices(
            recipe=algorithm, mesh=sampler_mesh, home=here
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
        stopping = forced(workload)
        self._sample = jax.jit(
            stopping(functools.partial(ppo.sample, recipe=algorithm))
        )
        self._frozen_scores = jax.jit(
            functools.partial(frozen_scores, algorithm=algorithm)
        )
        self._make_experience = donated(
            functools.partial(ppo.make_experience, recipe=algorithm, frozen=NO_MODELS)
        )
        self._update = donated(functools.partial(ppo.update, recipe=algorithm))
        self._shuffle_key = jax.jit(ppo.shuffle_key)

    def iteration(self, *, prompts: Prompts, key: Array) -> Output:
        output = self.phases(prompts=prompts, key=key, lap=lambda phase, done: None)
        jax.block_until_ready((self.train, self._critic))
        return output

    def phases(self, *, prompts: Prompts, key: Array, lap: Lap) -> Output:
        answered = self._sample(self.train.policy, prompts=prompts, key=key)
        lap("rollout", answered)
        packing = None if self.pack is None else self.pack(answered, key=key)
        read = {"rollout": answered, "packing": packing}
        values = self._devices.values(self._critic, **read)
        outputs = self._frozen_scores(
            self._reference, answered=answered, packing=packing
        )
        lap("score", (values, outputs))
        self.train, experience, _, scored = self._make_experience(
            self.train, values=values, **read, **outputs
        )
        learned = {
            "experience": experience,
            "key": self._shuffle_key(key),
            "packing": packing,
        }
        self._critic, _ = self._devices.update(self._critic, **learned)
        self.train, stats = self._update(self.train, **learned)
        lap("update", (self.train, self._critic))
        return stats, scored
