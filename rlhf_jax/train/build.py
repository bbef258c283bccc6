"""Builds every model of a run from its config, as a pure function of checkpoints.

    build(config, start, meshes=...)                   the trainer, on its devices
    jax.eval_shape(build with `shapes.loader`)          memory check and plan, as shapes

It is the only description of a run's models.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import flax.struct
import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms import state
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.state import SupervisedState, TrainState
from rlhf_jax.checkpoints.frozen_models import Loader, RewardModel
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices import sharding
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import init
from rlhf_jax.roles import critic
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.optimizer import POLICY, REWARD_MODEL

if TYPE_CHECKING:
    from rlhf_jax.train.config.optimizer import Critic

Array = jax.Array
Params = Any
ADAPTERS = 2**32 - 1  # folded into the root key in place of a step; no run is so long


class Meshes(NamedTuple):
    """The mesh of each role that runs programs of its own."""

    policy: Mesh
    sampler: Mesh  # the policy's own object where responses are sampled there
    critic: Mesh

    @classmethod
    def of(cls, config: PolicyGradientConfig) -> Meshes:
        """Returns the meshes of a config."""
        policy = config.policy_mesh()
        sampler = config.placement.sampler.mesh_beside(policy)
        apart = policy
        if config.critic is not None:
            apart = config.critic_place.mesh_beside(policy)
        assert sampler is not None  # only frozen models can be on the host
        assert apart is not None
        return cls(policy, sampler, apart)


@flax.struct.dataclass
class Models:
    """Every model of a run."""

    train: TrainState  # includes the critic unless it has devices of its own
    critic: SupervisedState | None  # a critic on devices of its own
    base: Frozen | None  # the base model under LoRA adapters
    reference: Frozen | None
    head: Frozen | None  # the reference's, if the loss reads its hidden states
    further: dict[str, Frozen]  # the references after the first, by name
    rewards: tuple[Frozen, ...]  # in the order of `config.rewards.models`
    recipe: PolicyGradient = flax.struct.field(pytree_node=False)
    reward_shapes: tuple[ModelConfig, ...] = flax.struct.field(pytree_node=False)

    @property
    def reward_models(self) -> tuple[RewardModel, ...]:
        """The reward models with their shapes."""
        return tuple(map(RewardModel, self.reward_shapes, self.rewards))

    @property
    def adapters_are_the_reference(self) -> bool:
        """Whether the reference is a copy of the adapters, because it moves."""
        return self.base is not None and self.recipe.lifecycle.moves

    @property
    def beside(self) -> dict[str, Frozen]:
        """The frozen models that no lifecycle moves, by their names in snapshots."""
        names = [f"reward_{i}" for i in range(len(self.rewards))]
        if len(names) == 1:
            names = ["reward"]
        models = dict(zip(names, self.rewards, strict=True))
        models |= {f"references/{name}": one for name, one in self.further.items()}
        for name, one in {"base": self.base, "reference_head": self.head}.items():
            if one is not None:
                models[name] = one
        return models


def build(
    config: PolicyGradientConfig,
    start: Pretrained,
    *,
    meshes: Meshes,
    loader: Loader | None = None,
) -> Models:
    """Builds the trained policy and critic, and the frozen reference and reward models.

    Args:
      start: the checkpoint of --model; its parameters become the policy's.
      loader: loads the other checkpoints; None reads their files.
    """
    loader = Loader(start, meshes.policy) if loader is None else loader
    mesh, model, lora = meshes.policy, start.model, config.start.lora
    reward_models = tuple(
        loader.reward_model(
            name,
            storage=config.rewards.reward_storage,
            place=config.placement.reward,
        )
        for name in config.rewards.models
    )
    base, trained = None, start.params
    keys = jax.random.split(jax.random.fold_in(jax.random.key(config.seed), ADAPTERS))
    if lora is not None:
        # With LoRA the policy's weights are the frozen base and usually the reference
        # too: one copy serves both.
        base = config.reference.reference_storage.freeze(start.params)
        # On the mesh: a reference that moves is a copy of the adapters there.
        trained = sharding.place(init(keys[0], model=model, lora=lora), mesh=mesh)
    critic_model, valued = model, None
    if config.critic is not None:
        critic_model, valued = _critic(
            config,
            config.critic,
            loader,
            reward_models,
            meshes=meshes,
            key=keys[1],
        )
    recipe = config.algorithm(
        model=model,
        max_new_tokens=config.batch.max_new_tokens,
        stop_ids=start.stop_ids,
        lifecycle=config.reference.lifecycle,
        lora=lora,
        **config.optimizers(),
        **({} if config.critic is None else {"critic_model": critic_model}),
    )
    reference, head = _reference(config, trained, base=base, loader=loader), None
    if reference is not None and config.reads_hidden_states:
        place = functools.partial(sharding.place, mesh=mesh)
        from rlhf_jax.algorithms.flow.teacher import head_of

        head = head_of(reference, model=model, place=place)
    further = {
        one.name: loader.reference(
            one.path, storage=one.storage, place=one.place, option=one.option
        )
        for one in config.reference.references
    }
    kl = config.kl.kl_control.controller(config.kl_coef, num_steps=config.num_steps)
    entropy_coef = None if recipe.entropy_control is None else recipe.entropy_coef
    apart, critic_state = config.critic is not None and config.critic_place.apart, None
    # A critic on other devices is not part of the policy's state.
    if valued is None or apart:
        train = state.grpo_state(
            policy=trained,
            policy_optimizer=recipe.policy_optimizer,
            kl=kl,
            entropy_coef=entropy_coef,
        )
    else:
        train = state.ppo_state(
            policy=trained,
            critic=valued,
            policy_optimizer=recipe.policy_optimizer,
            critic_optimizer=config.optimizers()["critic_optimizer"],
            kl=kl,
            entropy_coef=entropy_coef,
        )
    if apart:
        moved = sharding.place(valued, mesh=meshes.critic)
        critic_state = state.supervised_state(
            moved, optimizer=config.optimizers()["critic_optimizer"]
        )
        # Includes the optimizer's scalars: a count on another device would recompile
        # everything after the first step.
        critic_state = sharding.place(critic_state, mesh=meshes.critic)
    # All leaves: the outputs of the first step are on the mesh, and inputs that are not
    # would make `jit` compile everything twice.
    train = sharding.place(train, mesh=mesh)
    return Models(
        train=train,
        critic=critic_state,
        base=base,
        reference=reference,
        head=head,
        further=further,
        rewards=tuple(reward_model.frozen for reward_model in reward_models),
        recipe=recipe,
        reward_shapes=tuple(reward_model.model for reward_model in reward_models),
    )


def _critic(
    config: PolicyGradientConfig,
    options: Critic,
    loader: Loader,
    reward_models: tuple[RewardModel, ...],
    *,
    meshes: Meshes,
    key: Array,
) -> tuple[ModelConfig, Params]:
    """Returns the critic's model config and initial parameters."""
    start, lora = loader.policy, config.start.lora
    model = start.model
    if getattr(config.method, "shared_trunk", False):
        return model, critic.on_policy_trunk(model=model)
    if lora is not None:
        return model, critic.from_base(key, model=model, lora=lora)
    if options.start == POLICY:
        trunk = start.params
        if config.critic_place.apart:
            trunk = sharding.place(trunk, mesh=meshes.critic)
        return model, critic.from_policy(trunk, model=model)
    if options.start == REWARD_MODEL:
        # Read again: the frozen copy may be rounded or on the host.
        [name], [scorer] = config.rewards.models, reward_models
        return scorer.model, loader.trainable_reward(name, mesh=meshes.critic)
    return loader.critic(options.start, mesh=meshes.critic)


def _reference(
    config: PolicyGradientConfig,
    trained: Params,
    *,
    base: Frozen | None,
    loader: Loader,
) -> Frozen | None:
    """Returns a copy of the initial policy, a checkpoint, or the base under LoRA."""
    chosen = config.reference
    if not chosen.has_reference:
        return None
    if base is not None and chosen.checkpoint is None:
        # A reset copies the adapters, so the reference has their tree structure.
        return frozen.freeze(trained) if chosen.lifecycle.moves else base
    reference = loader.reference(
        chosen.checkpoint,
        storage=chosen.reference_storage,
        place=config.placement.reference,
    )
    chosen.lifecycle.refuse_another_shape(reference.model)
    return reference
