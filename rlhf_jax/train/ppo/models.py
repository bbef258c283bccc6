"""Policy, critic, reference and reward model of a run, each where it is to be."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import optax
from jax.sharding import Mesh

from rlhf_jax.algorithms import optimizers, ppo, self_check, state
from rlhf_jax.algorithms.state import SupervisedState, TrainState
from rlhf_jax.checkpoints import frozen_models, further_references, hf
from rlhf_jax.checkpoints.frozen_models import RewardModel
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices import sharding
from rlhf_jax.devices.critic_devices import CriticDevices
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import init
from rlhf_jax.planning import profiled
from rlhf_jax.roles import critic
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs.profile.profiler import Text
from rlhf_jax.train.ppo.options import Config

ADAPTERS = 2**32 - 1  # folded into the root key where a step is, which none reaches


class Models(NamedTuple):
    """Every model of a run, on its devices."""

    mesh: Mesh  # the policy's, and of each role that is with it
    sampling: Mesh | None  # the sampler's, where it is not the policy's
    algorithm: ppo.PPO
    train: TrainState  # without a critic where the critic is apart
    critic: SupervisedState | None  # a critic that is apart
    critic_devices: CriticDevices | None
    base: Frozen | None  # that policy and critic adapt, with LoRA
    reference: Frozen | None
    further: dict[str, Frozen]  # references beside the first, by name
    rewards: tuple[RewardModel, ...]  # none with a Python reward

    @property
    def frozen_rewards(self) -> dict[str, Frozen]:
        """The reward models by their names in snapshots and tables."""
        if len(self.rewards) == 1:
            return {"reward": self.rewards[0].frozen}
        return {f"reward_{i}": each.frozen for i, each in enumerate(self.rewards)}

    def flops(self, texts: Sequence[Text]) -> dict[str, float]:
        """Model FLOPs of an iteration over these texts, by scope."""
        recipe, references = self.algorithm, []
        if self.reference is not None:
            references = [self.reference, *self.further.values()]
        return profiled.policy_gradient_flops(
            texts,
            model=recipe.model,
            num_epochs=recipe.num_epochs,
            group_size=recipe.rows_per_prompt,
            adapters=None if recipe.lora is None else self.train.policy,
            references=[
                frozen.shape_of(each, policy=recipe.model) for each in references
            ],
            rewards=[each.model for each in self.rewards],
            critic=recipe.critic_model,
            shared_trunk=recipe.shared_trunk,
        )

    @property
    def adapters_are_the_reference(self) -> bool:
        """The reference is adapters over the base, as it is to be reset."""
        return self.base is not None and self.algorithm.lifecycle.moves


def make_models(options: Config, policy: Pretrained) -> Models:
    """Policy and critic to train, reference and reward model frozen."""
    lora, model = options.lora.lora, policy.model
    placement = options.placement
    mesh = options.policy_mesh(placement)
    over = functools.partial(sharding.shardings, mesh=mesh)
    reward_models = tuple(
        frozen_models.load_reward_model(
            name,
            policy=policy,
            storage=options.reward_storage,
            place=placement.reward,
            mesh=mesh,
            sharding=over,
        )
        for name in options.reward_models
    )
    critic_mesh = placement.critic.mesh_beside(mesh)
    assert critic_mesh is not None  # the host is for frozen models
    over_critic = functools.partial(sharding.shardings, mesh=critic_mesh)
    base, critic_model = None, model
    if lora is not None:
        base = options.reference_storage.freeze(
            policy.params, place=placement.reference
        )
        policy_key, critic_key = jax.random.split(
            jax.random.fold_in(jax.random.key(options.seed), ADAPTERS)
        )
        trained = init(policy_key, model=model, lora=lora)
        valued = (
            critic.on_policy_trunk(model=model)
            if options.ppo.shared_trunk
            else critic.from_base(critic_key, model=model, lora=lora)
        )
    elif options.ppo.shared_trunk:
        trained, valued = policy.params, critic.on_policy_trunk(model=model)
    elif options.critic_from == "policy":
        trained = policy.params
        trunk = trained
        if placement.critic.apart:
            trunk = sharding.place(trained, mesh=critic_mesh)
        valued = critic.from_policy(trunk, model=model)
    elif options.critic_from != "reward_model":
        trained = policy.params
        critic_model, valued = frozen_models.load_critic(
            options.critic_from, policy=policy, sharding=over_critic
        )
    else:
        [name], [reward] = options.reward_models, reward_models  # checked by Config
        # Read again: what is frozen may be rounded, or be on the host.
        _, valued = hf.load_reward(name, dtype="float32", sharding=over_critic)
        trained, critic_model = policy.params, reward.model
    algorithm = make_ppo(
        options, model=model, critic_model=critic_model, stop_ids=policy.stop_ids
    )
    reference = None
    if options.measure_kl and base is not None and options.reference is None:
        reference = frozen.freeze(trained) if options.lifecycle.moves else base
    elif options.measure_kl:
        reference = frozen_models.load_reference(
            options.reference,
            policy=policy,
            storage=options.reference_storage,
            place=placement.reference,
            mesh=mesh,
            sharding=over,
        )
        options.lifecycle.refuse_another_shape(reference.model)
    further = further_references.load(
        options.further, policy=policy, mesh=mesh, sharding=over
    )
    kl = options.kl_control.controller(options.kl_coef, num_steps=options.num_steps)
    devices, critic_state = None, None
    if not placement.critic.apart:
        train = state.ppo_state(
            policy=trained,
            critic=valued,
            policy_optimizer=algorithm.policy_optimizer,
            critic_optimizer=algorithm.critic_optimizer,
            kl=kl,
        )
    else:
        train = state.grpo_state(
            policy=trained, policy_optimizer=algorithm.policy_optimizer, kl=kl
        )
        devices = CriticDevices(
            recipe=algorithm, mesh=critic_mesh, home=mesh, base=base
        )
        critic_state = devices.state_of(valued)
    # All of it, as what comes back from a frozen model is on the mesh: a state that is
    # not would be after its first step, and `jit` would compile everything again.
    train = sharding.place(train, mesh=mesh)
    return Models(
        mesh,
        placement.sampler.mesh_beside(mesh) if placement.sampler.apart else None,
        algorithm,
        train,
        critic_state,
        devices,
        base,
        reference,
        further,
        reward_models,
    )


def make_ppo(
    options: Config,
    *,
    model: ModelConfig,
    critic_model: ModelConfig,
    stop_ids: tuple[int, ...],
) -> ppo.PPO:
    """What is fixed during the run."""
    recipe = options.corrected(options.ppo)
    updates = recipe.num_epochs * recipe.num_minibatches  # an iteration

    def adam(learning_rate: float, iterations: int) -> optax.GradientTransformation:
        schedule = optax.linear_schedule(learning_rate, 0.0, iterations * updates)
        optimizer = optimizers.adam(
            schedule, eps=1e-5, style=options.adam, mu_dtype=options.adam_mu_dtype
        )
        if options.max_grad_norm is None:
            return optimizer
        clip = optax.clip_by_global_norm(options.max_grad_norm)
        return optax.chain(clip, optimizer)

    return ppo.PPO(
        **vars(recipe),
        model=model,
        critic_model=critic_model,
        policy_optimizer=adam(
            options.policy_learning_rate, options.num_steps - recipe.critic_warmup
        ),
        critic_optimizer=adam(options.critic_learning_rate, options.num_steps),
        max_new_tokens=options.max_new_tokens,
        stop_ids=stop_ids,
        lifecycle=options.lifecycle,
        lora=options.lora.lora,
    )


def rounding_of(models: Models, options: Config) -> float:
    """How far the reference may be from the policy it is a copy of, nats per token."""
    dtype = options.reference_storage.dtype
    if models.base is not None or dtype == "float32":
        return 0.0  # under LoRA the two are rounded alike
    return self_check.TOLERANCE[dtype]
