"""Whether the models and one iteration fit a device, before weights are read."""

from __future__ import annotations

import dataclasses
import functools

import jax

from rlhf_jax.checkpoints import hf
from rlhf_jax.models.lora import init
from rlhf_jax.planning import memory_check
from rlhf_jax.planning.memory_check import Part
from rlhf_jax.roles import critic
from rlhf_jax.train.ppo.models import last_devices, make_ppo, mesh_of
from rlhf_jax.train.ppo.options import Config


def check_memory(options: Config) -> None:
    """Refuses a run that cannot fit, by the shapes of what `make_models` will make.

    Raises:
      InputError: as `memory_check.check`, or there is no such checkpoint.
    """
    model = dataclasses.replace(hf.model_config(options.model), dtype=options.dtype)
    mesh, lora = mesh_of(options), options.lora.lora
    there = last_devices(options.critic_mesh) or mesh
    sampling = last_devices(options.sampling_mesh)
    stored, rewarding = options.reference_storage, options.reward_storage
    params = memory_check.shapes_of(model)
    policy, held = params, list[Part]()
    valued = jax.eval_shape(functools.partial(critic.from_policy, model=model), params)
    key, critic_model = jax.eval_shape(jax.random.key, 0), model
    if options.reward_model is not None:
        scoring = hf.model_config(options.reward_model)
        scorer = jax.eval_shape(
            functools.partial(critic.from_policy, model=scoring),
            memory_check.shapes_of(scoring),
        )
        if options.critic_from == "reward_model":
            valued, critic_model = scorer, scoring
        at = rewarding.mesh_beside(mesh)
        held += [Part("reward model", rewarding.shapes(scorer), at)]
    if options.ppo.shared_trunk:
        valued = jax.eval_shape(functools.partial(critic.on_policy_trunk, model=model))
    base = []
    if lora is not None:
        base = [Part("base", stored.shapes(params), stored.mesh_beside(mesh))]
        adapters = functools.partial(init, model=model, lora=lora)
        policy = jax.eval_shape(adapters, key)
        if not options.ppo.shared_trunk:
            from_base = functools.partial(critic.from_base, model=model, lora=lora)
            valued = jax.eval_shape(from_base, key)
    if options.measure_kl and (lora is None or options.reference is not None):
        at = stored.mesh_beside(mesh)
        held += [Part("reference", stored.shapes(params), at)]
    elif options.measure_kl and options.lifecycle.moves:
        held += [Part("reference", policy, mesh)]
    algorithm = make_ppo(options, model=model, critic_model=critic_model, stop_ids=())
    moments = jax.eval_shape(algorithm.policy_optimizer.init, policy)
    critic_moments = jax.eval_shape(algorithm.critic_optimizer.init, valued)
    held = [
        Part("policy", policy, mesh),
        Part("policy's optimizer", moments, mesh),
        Part("critic", valued, there),
        Part("critic's optimizer", critic_moments, there),
        *base,
        *held,
    ]
    sampled = [] if sampling is None else [Part("policy", policy, sampling)]

    def passing() -> list[memory_check.Passing]:
        rows = min(options.batch_size, options.ppo.slots or options.batch_size)
        return [
            memory_check.cache(
                model,
                rows=rows,
                max_new_tokens=options.max_new_tokens,
                mesh=mesh if sampling is None else sampling,
                beside=tuple(sampled),
            ),
            memory_check.gradients("gradients", policy, model=model, mesh=mesh),
            memory_check.gradients("gradients", valued, model=model, mesh=there),
        ]

    memory_check.check(
        held,
        passing,
        change="lower --max-new-tokens, --batch-size or --slots, train adapters with "
        "--lora.rank, store the reference with --reference-storage.dtype, or share it "
        "among devices with --mesh",
    )
