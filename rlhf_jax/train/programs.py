"""The compiled programs of a run, one per stage: `jax.jit` is applied here.

Parameters are always arguments: a closure would bake them into the program.
"""

from __future__ import annotations

import dataclasses
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
from rlhf_jax.devices import (
    moving,
    processes,
    program_cache,
    row_sharding,
    sharding,
)
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
    from rlhf_jax.train.packed_rollouts import RolloutPacker

Array = jax.Array
Params = Any


class Read(NamedTuple):
    """What the frozen models and the critic computed from a rollout."""

    reference: ReferenceOutput | None = None
    further: Mapping[str, Further] = {}
    values: Array | None = None  # f32[B, S]; None: no critic, or `learn` computes them
    packing: RolloutPacking | None = None  # how models read the rollout
    experts: Array | None = None  # to replay, if a reference replays them


class LearnInputs(NamedTuple):
    """Inputs of `learn` other than the states that it updates."""

    rollout: Rollout
    scores: Array | Scores | None
    reference: Frozen | None  # None in a step without a KL
    read: Read
    key: Array  # of the step
    ptx: Sequences | None


class Programs:
    """The compiled programs of a run; all but `learn` compile at their first call."""

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
        # Recipes and shapes are bound before `jit`: static arguments would be hashed at
        # each call.
        on, bind, jit = functools.partial(sharding.on, mesh), functools.partial, jax.jit
        self.pack: RolloutPacker | None = None
        if config.batch.packing is not None:
            # Imported here and below because few runs need them.
            from rlhf_jax.train.packed_rollouts import RolloutPacker

            self.pack = RolloutPacker(
                config.batch.packing,
                recipe=recipe,
                rows=config.batch.batch_size,
                mesh=mesh,
                columns=None
                if config.data.buckets is None
                else max(config.data.buckets) + recipe.max_new_tokens,
            )
        # Donation writes the new state over the old one, so that parameters and moments
        # exist once. Frozen models are never donated.
        donated = bind(jit, donate_argnames=("state",))
        self._learn = donated(bind(on(iteration.learn), recipe=recipe))
        self._make_experience = donated(
            bind(on(iteration.make_experience), recipe=recipe)
        )
        self._update = donated(bind(on(update), recipe=recipe))
        # A critic on its own devices takes the same key, and so the same minibatches.
        self._shuffle_key = jit(shuffle_key)
        self._values = jit(bind(on(ppo.values), recipe=recipe))
        self._critic = None
        if models.critic is not None:
            assert isinstance(recipe, ppo.PPO)  # the only recipe with a critic
            from rlhf_jax.devices.critic_devices import CriticDevices

            self._critic = CriticDevices(
                recipe=recipe, mesh=meshes.critic, home=mesh, base=models.base
            )
        moving = models.adapters_are_the_reference
        self._reference_base = models.base if moving else None
        placed = on
        if models.reference is not None:  # it may be on another mesh
            placed = bind(sharding.on, frozen.mesh_of(models.reference))
        replaying = {**shape, "replays": recipe.reference_replays}
        compute = bind(
            score.reference_logprobs, lora=recipe.lora if moving else None, **replaying
        )
        if models.head is not None:
            from rlhf_jax.algorithms.flow import teacher

            compute = bind(teacher.teacher_states, **replaying)
        # A separate program on the reference's mesh, which runs while the host computes
        # rewards.
        self._reference: Callable[..., Any] = jit(placed(compute))
        self._further = {
            name: jit(
                bind(
                    sharding.on(frozen.mesh_of(one), score.reference_logprobs),
                    **replaying,
                )
            )
            for name, one in models.further.items()
        }
        self.measure = jit(
            # reference=None: the check takes the reference log-probs of the program
            # that computes them in every step.
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
            # Stop tokens before `after` end no response, as in training.
            return rollout.truncate(responses, stop_ids=recipe.stop_ids, after=after)

        # Compiled separately for greedy decoding, which draws no random numbers.
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
        """Returns responses to held-out prompts, by greedy decoding or sampled."""
        return self._respond(
            policy, self._models.base, prompts=prompts, key=key, greedy=greedy
        )

    def text_stats(self, policy: Params, texts: Mapping[str, Sequences]) -> Stats:
        """Applies `evaluation.text_stats` to the policy."""
        if not texts:
            return {}
        return self._text_stats(policy, texts, base=self._models.base)

    @functools.cached_property
    def _text_stats(self) -> Callable[..., Stats]:
        from rlhf_jax.algorithms import evaluation  # few runs watch texts

        shape: dict[str, Any] = {"model": self.recipe.model, "lora": self.recipe.lora}
        on_mesh = sharding.on(self._mesh, evaluation.text_stats)
        return jax.jit(functools.partial(on_mesh, **shape))

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
        """Runs the frozen models and the critic on a rollout; dispatches only.

        Args:
          reference: as its lifecycle left it; None in a step without a KL.
          values_first: run the critic now, and not in the program of the update.
          of_teacher: prompts that a teacher reads in place of the rollout's; None uses
            the rollout's.
        """
        # Packed on the host by the minibatches that `update` draws from this key.
        packing = None if self.pack is None else self.pack(rollout, key=key)
        output, further, experts = None, {}, None
        if reference is not None:
            replayed = rollout
            if self.recipe.reference_replays and rollout.experts is None:
                replayed = self._recorded(
                    rollout, train.policy, base=self._models.base, packing=packing
                )
                experts = replayed.experts
            output = self.reference_output(
                reference, replayed, packing, of_teacher=of_teacher
            )
            further = self._further_of(replayed, packing)
        values = None
        # Dispatched after the reference, so that devices work while the host computes
        # rewards.
        if values_first and self._config.critic is not None:
            values = self._values_of(train, critic, rollout, packing)
        return Read(output, further, values, packing, experts)

    @functools.cached_property
    def _recorded(self) -> Callable[..., Rollout]:
        from rlhf_jax.algorithms.policy_gradient import routing_replay

        recipe = self.recipe

        def recorded(
            rollout: Rollout,
            policy: Params,
            *,
            base: Frozen | None,
            packing: RolloutPacking | None,
        ) -> Rollout:
            return routing_replay.recorded(
                rollout,
                adapted_params(policy, base=base, lora=recipe.lora),
                recipe=recipe,
                packing=None if packing is None else packing.batch,
            )

        return jax.jit(sharding.on(self._mesh, recorded))

    def reference_output(
        self,
        reference: Frozen,
        rollout: Rollout,
        packing: RolloutPacking | None = None,
        *,
        of_teacher: TeacherPrompts | None = None,
    ) -> ReferenceOutput:
        """Computes the reference's log-probs, or a teacher's states, on its devices."""
        inputs: dict[str, Any] = {"prompts": of_teacher}
        if self._models.head is None:
            of_batch = None if packing is None else packing.batch
            inputs = {"base": self._reference_base, "packing": of_batch}
        output = frozen_models.run_beside(
            lambda moved: self._reference(reference, rollout=moved, **inputs),
            reference,
            rollout,
        )
        return ReferenceOutput(output) if self._models.head is None else output

    def _further_of(
        self, rollout: Rollout, packing: RolloutPacking | None
    ) -> dict[str, Further]:
        of_batch = None if packing is None else packing.batch
        # Only exact KL runs these models again in the update; otherwise their
        # parameters are no argument of its program.
        inside, further = self.recipe.penalty.needs_logits, {}
        for one in self._config.reference.references:
            model, run = self._models.further[one.name], self._further[one.name]
            logprobs = frozen_models.run_beside(
                lambda moved, run=run, model=model: run(
                    model, rollout=moved, packing=of_batch
                ),
                model,
                rollout,
            )
            frozen_model = model if inside else None
            further[one.name] = Further(frozen_model, logprobs, one.weight)
        return further

    def _values_of(
        self,
        train: TrainState,
        critic: SupervisedState | None,
        rollout: Rollout,
        packing: RolloutPacking | None,
    ) -> Array:
        if self._critic is not None:
            assert critic is not None
            return self._critic.values(critic, rollout=rollout, packing=packing)
        base = FrozenModels(base=self._models.base)
        return self._values(train, rollout=rollout, frozen=base, packing=packing)

    def learn(
        self,
        train: TrainState,
        critic: SupervisedState | None,
        inputs: LearnInputs,
    ) -> tuple[TrainState, SupervisedState | None, Stats, Scored]:
        """Runs `policy_gradient.iteration.learn`, and updates a separate critic."""
        arguments = self._arguments(inputs)
        key, ptx, packing = inputs.key, inputs.ptx, inputs.read.packing
        if self._critic is None:
            # One program from scores to the next state, in which the host never waits.
            train, stats, scored = self._learn(train, **arguments, key=key, ptx=ptx)
            return train, None, stats, scored
        # Separate programs, so that the critic's update overlaps with the policy's.
        train, experience, stats, scored = self._make_experience(
            train, **arguments, key=key
        )
        key = self._shuffle_key(key)
        assert critic is not None
        # Dispatched first, so that the policy's update is queued while it runs.
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
          runs_next: whether the first step takes exactly these inputs. If not, or if
            the critic is on its own devices, `learn` is only traced.
        """
        if self._critic is not None or not runs_next:
            jax.eval_shape(functools.partial(self.learn, train, critic), inputs)
            return
        # Errors of compilation and memory surface here, before there is a run folder.
        self._learn.lower(
            train, **self._arguments(inputs), key=inputs.key, ptx=inputs.ptx
        ).compile()
        program_cache.give_back_memory()

    def _arguments(self, inputs: LearnInputs) -> dict[str, Any]:
        """Returns the arguments shared by `learn` and `make_experience`."""
        read = inputs.read
        # The teacher's head, if its hidden states are computed already; the reference
        # for exact KL; otherwise None, so that its parameters are no argument.
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
        rollout = inputs.rollout
        if read.experts is not None:
            rollout = dataclasses.replace(rollout, experts=read.experts)
        return {
            "rollout": rollout,
            "scores": inputs.scores,
            "frozen": FrozenModels(inside, self._models.base, read.further),
            "ref_output": read.reference,
            "values": read.values,
            "packing": read.packing,
        }

    @property
    def critic_base(self) -> Frozen | None:
        """The base under the adapters of a critic on its own devices, or None."""
        return None if self._critic is None else self._critic.base

    def likeliest(
        self, policy: Params, reference: Frozen | None, rollout: Rollout
    ) -> tuple[Array, Array, Array] | None:
        """Applies `sampled_tokens.likeliest` to the rows shown; None when disabled."""
        watch = self._config.watch
        if not watch.num_alternatives or not watch.num_shown:
            return None
        assert reference is not None  # by the capability table
        # Rows of the first process, which writes them: a program of all processes must
        # read the same ones in each.
        mine = row_sharding.local_rows((rollout.tokens, rollout.mask))
        shown = (rows[: watch.num_shown] for rows in mine)
        tokens, mask = processes.from_owners(
            [processes.Owned(rows, {0}, rows.shape, rows.dtype) for rows in shown]
        )
        return self._likeliest(policy, reference.stored, tokens, mask)

    def brought(self, reference: Frozen, policy: Params, *, due: bool) -> Params:
        """Returns the policy on devices that `lifecycle.after_step` can copy from."""
        mesh = frozen.mesh_of(reference)
        apart = self._config.placement.reference.apart and mesh is not None
        # With one process JAX copies between any two devices.
        if not (due and apart and jax.process_count() > 1):
            return policy
        return sharding.place(policy, mesh=mesh)

    def drift(self, policy: Params, reference: Frozen) -> dict[str, Any]:
        """Applies `drift.of_policy` on the reference's mesh."""
        # One program reads both, so both are on one mesh.
        policy = frozen.beside(reference, policy, put=moving.move)
        return self._drift(policy, reference, self._models.base)
