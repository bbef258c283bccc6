"""The compiled programs of a run: `jax.jit` stands here."""

from __future__ import annotations

import functools
from typing import Any

import jax

from rlhf_jax.algorithms import evaluation, ppo, self_check
from rlhf_jax.algorithms.batch import (
    Prompts,
    Rollout,
    RolloutPacking,
    Scored,
    Sequences,
)
from rlhf_jax.algorithms.flow import objective, score
from rlhf_jax.algorithms.state import SupervisedState, TrainState
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.masked import Stats
from rlhf_jax.inspection import sampled_tokens
from rlhf_jax.models.lora import merge
from rlhf_jax.roles import adapted
from rlhf_jax.roles.reference import drift, frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.reference.further import Further
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.packed_rollouts import EndPacker, RolloutPacker
from rlhf_jax.train.ppo.models import Models
from rlhf_jax.train.ppo.options import Config
from rlhf_jax.train.references import FurtherPrograms
from rlhf_jax.train.sampling.sampler import Sampler

Array = jax.Array
Params = Any


class Programs:
    """The compiled programs, one per stage; parameters are always arguments."""

    def __init__(self, models: Models, *, options: Config) -> None:
        algorithm = models.algorithm
        widest = None
        if options.buckets is not None:
            widest = max(options.buckets) + options.max_new_tokens
        packed: dict[str, Any] = {
            "recipe": algorithm,
            "rows": options.batch_size,
            "mesh": models.mesh,
            "columns": widest,
        }
        self.pack = RolloutPacker(options, **packed)
        self.pack_ends = EndPacker(options, **packed)
        shape = {
            "model": algorithm.model,
            "max_new_tokens": algorithm.max_new_tokens,
            "temperature": algorithm.temperature,
        }
        on, mesh = functools.partial(sharding.on, models.mesh), models.mesh
        self._models = models
        self._lora = algorithm.lora if models.adapters_are_the_reference else None
        self._base = models.base if models.adapters_are_the_reference else None
        self.sample = Sampler(
            algorithm,
            mesh=mesh if models.sampling is None else models.sampling,
            home=mesh,
            # Episodes are drawn by programs that have a copy of their own.
            base=models.base if options.environment is None else None,
            storage=options.sampler_storage,
            cache=options.sampler_cache,
            cache_pages=options.sampler_cache_pages,
            page_size=options.sampler_page_size,
            prefill_chunk=options.prefill_chunk,
        )
        self._values = jax.jit(functools.partial(on(ppo.values), recipe=algorithm))
        donated = functools.partial(jax.jit, donate_argnames=("state",))
        self._learn = donated(functools.partial(on(ppo.learn), recipe=algorithm))
        self._make_experience = donated(
            functools.partial(on(ppo.make_experience), recipe=algorithm)
        )
        self._update = donated(
            functools.partial(on(ppo.update), recipe=algorithm, critic_apart=True)
        )
        self._shuffle_key = jax.jit(ppo.shuffle_key)
        self.measure = jax.jit(
            functools.partial(
                on(self_check.measure), reference=None, lora=algorithm.lora, **shape
            )
        )
        self._count = options.num_alternatives
        if self._count and jax.process_count() > 1:
            raise InputError(
                f"--num-alternatives {self._count}: expected one process, got "
                f"{jax.process_count()}; leave it out"
            )
        self._likeliest = jax.jit(
            functools.partial(
                on(sampled_tokens.likeliest),
                model=algorithm.model,
                temperature=algorithm.temperature,
                count=min(self._count, algorithm.model.num_tokens),
            )
        )
        self.positions = jax.jit(
            functools.partial(
                objective.kl_by_position, max_new_tokens=algorithm.max_new_tokens
            )
        )
        self.evaluate = jax.jit(
            on(
                lambda policy, texts, base: evaluation.text_stats(
                    adapted.params(policy, base=base, lora=algorithm.lora),
                    texts,
                    model=algorithm.model,
                )
            )
        )
        if models.reference is not None:  # it may be on another mesh
            on = functools.partial(sharding.on, frozen.mesh_of(models.reference))
        self._reference_logprobs = jax.jit(
            functools.partial(on(score.reference_logprobs), lora=self._lora, **shape)
        )
        self._drift = jax.jit(self._drift_of)
        self.further = FurtherPrograms(
            models.further, options=options, recipe=algorithm
        )

    def draw(
        self, policy: Params, *, prompts: Prompts, key: Array, version: Array
    ) -> tuple[Rollout, None]:
        """A draw of a step, whose rewards are then computed."""
        of_step = {"prompts": prompts, "key": key, "version": version}
        return self.sample(policy, **of_step), None

    def draw_ahead(
        self, policy: Params, *, prompts: Prompts, key: Array, version: Array
    ) -> tuple[Rollout, None]:
        """A draw of the queue; its rewards are computed in the step that learns."""
        handed = {"prompts": prompts, "key": key, "version": version}
        return self.sample.draw(policy, **handed), None

    def _inside(self, reference: Frozen | None) -> Frozen | None:
        """The reference if `learn` runs it once more, for exact KL; else None."""
        return reference if self._models.algorithm.penalty.needs_logits else None

    def values(
        self,
        train: TrainState,
        critic: SupervisedState | None,
        rollout: Rollout,
        packing: RolloutPacking | None,
    ) -> Array:
        """The critic's values, computed on the critic's devices."""
        if critic is None:
            return self._values(
                train, rollout=rollout, base=self._models.base, packing=packing
            )
        assert self._models.critic_devices is not None  # as it has them
        return self._models.critic_devices.values(
            critic, rollout=rollout, packing=packing
        )

    def learn(
        self,
        train: TrainState,
        critic: SupervisedState | None,
        *,
        rollout: Rollout,
        scores: Array | Scores,
        reference: Frozen | None,
        ref_logprobs: Array | None,
        values: Array | None,
        key: Array,
        ptx: Sequences | None,
        packing: RolloutPacking | None,
        further: dict[str, Further],
    ) -> tuple[TrainState, SupervisedState | None, Stats, Scored]:
        """`ppo.learn`; a critic that is apart is updated beside it."""
        base, reference = self._models.base, self._inside(reference)
        arguments = {
            "rollout": rollout,
            "scores": scores,
            "reference": reference,
            "ref_logprobs": ref_logprobs,
            "values": values,
            "base": base,
            "packing": packing,
            "further": further,
        }
        if critic is None:
            train, stats, scored = self._learn(train, **arguments, key=key, ptx=ptx)
            return train, None, stats, scored
        assert self._models.critic_devices is not None  # as it has them
        train, experience, stats, scored = self._make_experience(train, **arguments)
        key = self._shuffle_key(key)
        critic, critic_stats = self._models.critic_devices.update(
            critic, experience=experience, key=key, packing=packing
        )
        train, update_stats = self._update(
            train,
            experience=experience,
            key=key,
            base=base,
            reference=reference,
            ptx=ptx,
            packing=packing,
            further=further,
        )
        return train, critic, update_stats | stats | critic_stats, scored

    def reference_logprobs(
        self, reference: Frozen, rollout: Rollout, packing: RolloutPacking | None
    ) -> Array:
        """The reference's log-probs, computed on the reference's devices."""

        def compute(rollout: Rollout) -> Array:
            return self._reference_logprobs(
                reference,
                rollout=rollout,
                base=self._base,
                packing=None if packing is None else packing.batch,
            )

        return frozen_models.run_beside(compute, reference, rollout)

    def likeliest(
        self, policy: Params, reference: Frozen | None, rollout: Rollout, *, rows: int
    ) -> tuple[Array, Array, Array] | None:
        """`sampled_tokens.likeliest` of the first rows, or None where not asked for."""
        if not self._count or not rows:
            return None
        assert reference is not None  # as the options ask for it
        tokens, mask = row_sharding.local_rows((rollout.tokens, rollout.mask))
        return self._likeliest(policy, reference.stored, tokens[:rows], mask[:rows])

    def drift(self, policy: Params, reference: Frozen) -> dict[str, Any]:
        """`drift.weight_drift` of the policy, merged with its base under LoRA."""
        policy = frozen.beside(reference, policy)
        return self._drift(policy, reference, self._models.base)

    def _drift_of(
        self, policy: Params, reference: Frozen, base: Frozen | None
    ) -> dict[str, Any]:
        lora, anchor = self._models.algorithm.lora, reference.stored
        if base is None or lora is None:
            return drift.weight_drift(policy, anchor)
        start = frozen.read(base)
        if self._models.adapters_are_the_reference:
            anchor = merge(start, anchor, lora=lora)
        return drift.weight_drift(merge(start, policy, lora=lora), anchor)
