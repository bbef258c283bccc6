"""The compiled programs of a run, one per stage: `jax.jit` stands here.

Parameters are always arguments: a closure would bake them into the program.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from rlhf_jax.algorithms import ppo, self_check
from rlhf_jax.algorithms.batch import (
    Prompts,
    ReferenceOutput,
    Rollout,
    RolloutPacking,
    Scored,
    Sequences,
)
from rlhf_jax.algorithms.flow import objective, rollout, score
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.algorithms.policy_gradient.update import shuffle_key, update
from rlhf_jax.algorithms.state import SupervisedState, TrainState
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.devices import moving, program_cache, row_sharding, sharding
from rlhf_jax.functional.masked import Stats
from rlhf_jax.models.generation.sampling import Shaping
from rlhf_jax.roles.reference import drift, frozen
from rlhf_jax.roles.reference.frozen import (
    Frozen,
    FrozenModels,
    Further,
    adapted_params,
)
from rlhf_jax.roles.rewards.scores import Scores
from rlhf_jax.train.build import Meshes, Models
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.watch import sampled_tokens

if TYPE_CHECKING:
    from rlhf_jax.algorithms.flow.teacher import TeacherPrompts
    from rlhf_jax.train.packed_rollouts import EndPacker, RolloutPacker

Array = jax.Array
Params = Any


class Read(NamedTuple):
    """What the frozen models and the critic computed of a rollout."""

    reference: ReferenceOutput | None = None
    further: Mapping[str, Further] = {}
    values: Array | None = None  # f32[B, S]; None where `learn` computes them
    packing: RolloutPacking | None = None  # how models read the rollout


class LearnInputs(NamedTuple):
    """What `learn` takes of a step, beside the states that it updates."""

    rollout: Rollout
    scores: Array | Scores | None
    reference: Frozen | None  # None in a step that takes no KL
    read: Read
    key: Array  # of the step
    ptx: Sequences | None


class Programs:
    """The compiled programs of a run; all but `learn` by their first call."""

    def __init__(
        self, models: Models, *, meshes: Meshes, config: PolicyGradientConfig
    ) -> None:
        self._models, self._config, mesh = models, config, meshes.policy
        self._mesh = mesh
        recipe = self.recipe = models.recipe
        shape: dict[str, Any] = {
            "model": recipe.model,
            "max_new_tokens": recipe.max_new_tokens,
            "temperature": recipe.temperature,
        }
        # Recipes and shapes are bound before `jit`, so they are part of the function
        # and not static arguments to be hashed at each call.
        on, bind, jit = functools.partial(sharding.on, mesh), functools.partial, jax.jit
        self.pack: RolloutPacker | None = None
        self.pack_ends: EndPacker | None = None
        if config.batch.packing is not None:
            # Here and below: programs of few runs.
            from rlhf_jax.train.packed_rollouts import EndPacker, RolloutPacker

            packed: dict[str, Any] = {
                "recipe": recipe,
                "rows": config.batch.batch_size,
                "mesh": mesh,
                "columns": None
                if config.data.buckets is None
                else max(config.data.buckets) + recipe.max_new_tokens,
            }
            self.pack = RolloutPacker(config.batch.packing, **packed)
            self.pack_ends = EndPacker(config.batch.packing, **packed)
        # The new state is written over the old one: without donation parameters and
        # moments would be there twice. Frozen models are never among the donated.
        donated = bind(jit, donate_argnames=("state",))
        self._learn = donated(bind(on(iteration.learn), recipe=recipe))
        self._make_experience = donated(
            bind(on(iteration.make_experience), recipe=recipe)
        )
        self._update = donated(bind(on(update), recipe=recipe))
        # With a critic apart both updates take this key: equal minibatches on both
        # meshes.
        self._shuffle_key = jit(shuffle_key)
        self._values = jit(bind(on(ppo.values), recipe=recipe))
        self._critic = None
        if models.critic is not None:
            assert isinstance(recipe, ppo.PPO)  # which alone has a critic
            from rlhf_jax.devices.critic_devices import CriticDevices

            self._critic = CriticDevices(
                recipe=recipe, mesh=meshes.critic, home=mesh, base=models.base
            )
        moving = models.adapters_are_the_reference
        self._reference_base = models.base if moving else None
        placed = on
        if models.reference is not None:  # it may be on another mesh
            placed = bind(sharding.on, frozen.mesh_of(models.reference))
        compute = bind(
            score.reference_logprobs, lora=recipe.lora if moving else None, **shape
        )
        if models.head is not None:
            from rlhf_jax.algorithms.flow import teacher

            compute = bind(teacher.teacher_states, **shape)
        # A program of its own, on the reference's mesh: it runs while the host has the
        # reward.
        self._reference: Callable[..., Any] = jit(placed(compute))
        self._further = {
            name: jit(
                bind(
                    sharding.on(frozen.mesh_of(one), score.reference_logprobs), **shape
                )
            )
            for name, one in models.further.items()
        }
        self.measure = jit(
            # reference=None: the check compares the log-probs of the very program that
            # will score every step.
            bind(on(self_check.measure), reference=None, lora=recipe.lora, **shape)
        )

        def respond(
            policy: Params,
            base: Frozen | None,
            *,
            prompts: Prompts,
            key: Array,
            greedy: bool,
        ) -> Rollout:
            after = recipe.fixed_length.truncate_after if recipe.fixed_length else 0
            responses = rollout.rollout(
                adapted_params(policy, base=base, lora=recipe.lora),
                prompts=prompts,
                key=key,
                stop_ids=() if after else recipe.stop_ids,
                shaping=Shaping(greedy=True) if greedy else None,
                **shape,
            )
            if not after:
                return responses
            # A stop token before it ends no response here either.
            return rollout.truncate(responses, stop_ids=recipe.stop_ids, after=after)

        # Two programs: a greedy one has no random draw in it.
        self._respond = jit(on(respond), static_argnames="greedy")
        self.positions = jit(
            bind(objective.kl_by_position, max_new_tokens=recipe.max_new_tokens)
        )
        self._likeliest = jit(
            bind(
                on(sampled_tokens.likeliest),
                model=recipe.model,
                temperature=recipe.temperature,
                count=min(config.watch.num_alternatives, recipe.model.num_tokens),
            )
        )

        def text_stats(
            policy: Params, texts: Mapping[str, Sequences], base: Frozen | None
        ) -> Stats:
            from rlhf_jax.algorithms import evaluation

            params = adapted_params(policy, base=base, lora=recipe.lora)
            return evaluation.text_stats(params, texts, model=recipe.model)

        self._text_stats = jit(on(text_stats))
        self._drift = jit(
            bind(
                drift.of_policy,
                lora=recipe.lora,
                of_adapters=models.adapters_are_the_reference,
            )
        )

    def respond(
        self, policy: Params, *, prompts: Prompts, key: Array, greedy: bool
    ) -> Rollout:
        """Responses to held-out prompts, with the likeliest tokens or drawn."""
        return self._respond(
            policy, self._models.base, prompts=prompts, key=key, greedy=greedy
        )

    def text_stats(self, policy: Params, texts: Mapping[str, Sequences]) -> Stats:
        """`evaluation.text_stats` of the policy."""
        return self._text_stats(policy, texts, self._models.base) if texts else {}

    def read(
        self,
        train: TrainState,
        critic: SupervisedState | None,
        rollout: Rollout,
        *,
        reference: Frozen | None,
        key: Array,
        values_first: bool,
        of_teacher: TeacherPrompts | None = None,
    ) -> Read:
        """What frozen models and critic make of a rollout, beside the reward's work.

        Args:
          reference: as its lifecycle left it; None in a step that takes no KL.
          values_first: the critic runs now and not in the program of the update.
          of_teacher: what a teacher reads in place of the prompts; None is the same.
        """
        # On the host, from lengths: the same minibatches as `update` will draw from
        # this key.
        packing = None if self.pack is None else self.pack(rollout, key=key)
        output, further = None, {}
        if reference is not None:
            output = self.reference_output(
                reference, rollout, packing, of_teacher=of_teacher
            )
            further = self._further_of(rollout, packing)
        values = None
        # Dispatched after the reference and before the host's reward, so that devices
        # work while it waits.
        if values_first and self._config.critic is not None:
            values = self._values_of(train, critic, rollout, packing)
        return Read(output, further, values, packing)

    def reference_output(
        self,
        reference: Frozen,
        rollout: Rollout,
        packing: RolloutPacking | None = None,
        *,
        of_teacher: TeacherPrompts | None = None,
    ) -> ReferenceOutput:
        """The reference's log-probs, computed on the reference's devices."""
        if self._models.head is not None:
            return frozen_models.run_beside(
                lambda moved: self._reference(
                    reference, rollout=moved, prompts=of_teacher
                ),
                reference,
                rollout,
            )
        logprobs = frozen_models.run_beside(
            lambda moved: self._reference(
                reference,
                rollout=moved,
                base=self._reference_base,
                packing=None if packing is None else packing.batch,
            ),
            reference,
            rollout,
        )
        return ReferenceOutput(logprobs)

    def _further_of(
        self, rollout: Rollout, packing: RolloutPacking | None
    ) -> dict[str, Further]:
        of_batch = None if packing is None else packing.batch
        # Exact KL reads their hidden states in the update; else log-probs are enough,
        # and their parameters stay out of its program.
        inside = self.recipe.penalty.needs_logits

        def logprobs(name: str, model: Frozen) -> Array:
            return frozen_models.run_beside(
                lambda moved: self._further[name](
                    model, rollout=moved, packing=of_batch
                ),
                model,
                rollout,
            )

        weights = {ref.name: ref.weight for ref in self._config.reference.references}
        return {
            name: Further(
                frozen=model if inside else None,
                logprobs=logprobs(name, model),
                weight=weights[name],
            )
            for name, model in self._models.further.items()
        }

    def _values_of(
        self,
        train: TrainState,
        critic: SupervisedState | None,
        rollout: Rollout,
        packing: RolloutPacking | None,
    ) -> Array:
        if self._critic is not None:
            assert critic is not None  # it is apart
            return self._critic.values(critic, rollout=rollout, packing=packing)
        base = FrozenModels(base=self._models.base)
        return self._values(train, rollout=rollout, frozen=base, packing=packing)

    def learn(
        self,
        train: TrainState,
        critic: SupervisedState | None,
        inputs: LearnInputs,
    ) -> tuple[TrainState, SupervisedState | None, Stats, Scored]:
        """`policy_gradient.iteration.learn`; a critic apart is updated beside it."""
        arguments = self._arguments(inputs)
        key, ptx, packing = inputs.key, inputs.ptx, inputs.read.packing
        if self._critic is None:
            # One program from scores to the next state: XLA sees all of it, and the
            # host waits for nothing in between.
            train, stats, scored = self._learn(train, **arguments, key=key, ptx=ptx)
            return train, None, stats, scored
        # Two programs, so that the critic's update can start beside the policy's.
        train, experience, stats, scored = self._make_experience(train, **arguments)
        key = self._shuffle_key(key)
        assert critic is not None  # that is apart
        # First, as it returns when dispatched: the policy's update is queued while it
        # runs.
        critic, critic_stats = self._critic.update(
            critic, experience=experience, key=key, packing=packing
        )
        train, update_stats = self._update(
            train,
            experience=experience,
            key=key,
            frozen=arguments["frozen"],
            ptx=ptx,
            packing=packing,
        )
        return train, critic, update_stats | stats | critic_stats, scored

    def compile_learn(
        self,
        train: TrainState,
        critic: SupervisedState | None,
        inputs: LearnInputs,
        *,
        runs_next: bool,
    ) -> None:
        """Compiles `learn`, so that its first step runs without the compiler's memory.

        Args:
          runs_next: whether the first step takes these arguments. Where it draws again,
            and with a critic apart, whose programs take what others return, `learn` is
            traced alone: what does not fit is told.
        """
        if self._critic is not None or not runs_next:
            jax.eval_shape(functools.partial(self.learn, train, critic), inputs)
            return
        # Before there is a run folder: what does not compile or fit fails here.
        self._learn.lower(
            train, **self._arguments(inputs), key=inputs.key, ptx=inputs.ptx
        ).compile()
        program_cache.give_back_memory()

    def _arguments(self, inputs: LearnInputs) -> dict[str, Any]:
        """Of the programs that make experience of a rollout."""
        read = inputs.read
        # The teacher's head, where its states are at hand; the reference itself for
        # exact KL; else None, so that its parameters are no argument of `learn`.
        inside = self._models.head
        teacher, moves = inputs.reference, self.recipe.lifecycle.moves
        if inside is not None and teacher is not None and moves:
            from rlhf_jax.algorithms.flow.teacher import head_of

            inside = head_of(
                teacher,
                model=self.recipe.model,
                place=functools.partial(sharding.place, mesh=self._mesh),
            )
        if (
            inside is None
            and self.recipe.penalty.needs_logits
            and read.reference is not None
        ):
            inside = inputs.reference
        return {
            "rollout": inputs.rollout,
            "scores": inputs.scores,
            "frozen": FrozenModels(inside, self._models.base, read.further),
            "ref_output": read.reference,
            "values": read.values,
            "packing": read.packing,
        }

    @property
    def critic_base(self) -> Frozen | None:
        """The base under the adapters of a critic apart, on its own devices."""
        return None if self._critic is None else self._critic.base

    def likeliest(
        self, policy: Params, reference: Frozen | None, rollout: Rollout
    ) -> tuple[Array, Array, Array] | None:
        """`sampled_tokens.likeliest` of the rows shown, or None where not asked for."""
        watch = self._config.watch
        if not watch.num_alternatives or not watch.num_shown:
            return None
        assert reference is not None  # as the capability table has it
        tokens, mask = row_sharding.local_rows((rollout.tokens, rollout.mask))
        rows = slice(watch.num_shown)
        return self._likeliest(policy, reference.stored, tokens[rows], mask[rows])

    def brought(self, reference: Frozen, policy: Params, *, due: bool) -> Params:
        """The policy where a reference that is due to move is, or where that copies."""
        mesh = frozen.mesh_of(reference)
        apart = self._config.placement.reference.apart and mesh is not None
        # On one process JAX copies from any device to any other.
        if not (due and apart and jax.process_count() > 1):
            return policy
        return sharding.place(policy, mesh=mesh)

    def drift(self, policy: Params, reference: Frozen) -> dict[str, Any]:
        """`drift.of_policy`, on the reference's mesh."""
        # Onto the reference's mesh, as one program reads both.
        policy = frozen.beside(reference, policy, put=moving.move)
        return self._drift(policy, reference, self._models.base)
