"""Whether the models and one iteration fit a device, before weights are read."""

from __future__ import annotations

import dataclasses
import functools

import jax

from rlhf_jax.checkpoints import frozen_models, hf
from rlhf_jax.devices import replicas
from rlhf_jax.models.lora import init
from rlhf_jax.planning import memory_check
from rlhf_jax.planning.memory_check import Part
from rlhf_jax.roles import critic
from rlhf_jax.train.ppo.models import make_ppo
from rlhf_jax.train.ppo.options import Config


def check_memory(options: Config) -> None:
    """Refuses a run that cannot fit, by the shapes of what `make_models` will make.

    Prompts count neither in the cache nor as activations: `prefill_chunk`, which saves
    the latter, changes nothing here.

    Raises:
      InputError: the run needs more memory than there is, or there is no such
        checkpoint.
    """
    model = dataclasses.replace(hf.model_config(options.model), dtype=options.dtype)
    placement, lora = options.placement, options.lora.lora
    mesh = options.policy_mesh(placement)
    critic_mesh = placement.critic.mesh_beside(mesh)
    sampler_mesh = placement.sampler.mesh_beside(mesh)
    assert critic_mesh is not None  # the host is for frozen models
    assert sampler_mesh is not None
    storage = options.reference_storage
    reference_mesh = placement.reference.memory_mesh(mesh)
    params = memory_check.shapes_of(model)
    policy, parts = params, list[Part]()
    valued = jax.eval_shape(functools.partial(critic.from_policy, model=model), params)
    key, critic_model = jax.eval_shape(jax.random.key, 0), model
    for name in options.reward_models:
        scoring = hf.model_config(name)
        scorer = jax.eval_shape(
            functools.partial(critic.from_policy, model=scoring),
            memory_check.shapes_of(scoring),
        )
        if options.critic_from == "reward_model":
            valued, critic_model = scorer, scoring
        shapes = options.reward_storage.shapes(scorer)
        parts += [Part("reward model", shapes, placement.reward.memory_mesh(mesh))]
    if options.critic_from not in ("policy", "reward_model"):
        critic_model = hf.model_config(options.critic_from)
        start = functools.partial(critic.from_policy, model=critic_model)
        valued = jax.eval_shape(start, memory_check.shapes_of(critic_model))
    if options.ppo.shared_trunk:
        valued = jax.eval_shape(functools.partial(critic.on_policy_trunk, model=model))
    base = []
    if lora is not None:
        base = [Part("base", storage.shapes(params), reference_mesh)]
        adapters = functools.partial(init, model=model, lora=lora)
        policy = jax.eval_shape(adapters, key)
        if not options.ppo.shared_trunk:
            from_base = functools.partial(critic.from_base, model=model, lora=lora)
            valued = jax.eval_shape(from_base, key)
    if options.measure_kl and (lora is None or options.reference is not None):
        reference = params
        if options.reference is not None:
            reference = memory_check.shapes_of(hf.model_config(options.reference))
        parts += [Part("reference", storage.shapes(reference), reference_mesh)]
    elif options.measure_kl and options.lifecycle.moves:
        parts += [Part("reference", policy, mesh)]
    for each in options.further:
        shapes = memory_check.shapes_of(hf.model_config(each.path))
        where = each.place.memory_mesh(mesh)
        parts += [Part(f"reference {each.name}", each.storage.shapes(shapes), where)]
    algorithm = make_ppo(  # none of whose stop tokens is drawn here
        options, model=model, critic_model=critic_model, stop_ids=(0,)
    )
    moments = jax.eval_shape(algorithm.policy_optimizer.init, policy)
    critic_moments = jax.eval_shape(algorithm.critic_optimizer.init, valued)
    parts = [
        Part("policy", policy, mesh),
        Part("policy's optimizer", moments, mesh),
        Part("critic", valued, critic_mesh),
        Part("critic's optimizer", critic_moments, critic_mesh),
        *base,
        *parts,
    ]
    copies = []
    handed_over = placement.sampler.apart or options.staleness > 0
    if handed_over or options.sampler_storage != frozen_models.COPY:
        shapes = options.sampler_storage.shapes(policy)
        copies = [Part("policy", shapes, sampler_mesh)]
        parts += [
            Part(f"policy for the batch {i} ahead", shapes, sampler_mesh)
            for i in range(2, options.staleness + 1)
        ]
    plays_apart = options.environment is not None and mesh.size > 1
    if plays_apart:
        handed = copies if options.staleness > 0 else []
        sampler_mesh = replicas.of_mesh(sampler_mesh).everyone
        copies = [*handed, Part("policy that plays episodes", params, sampler_mesh)]
    if (placement.sampler.apart or plays_apart) and lora is not None:
        parts += [Part("sampler's base", storage.shapes(params), sampler_mesh)]

    def passing() -> list[memory_check.Passing]:
        rows = options.batch_size
        if options.ppo.continuous_batching is not None:
            rows = min(rows, options.ppo.continuous_batching)
        return [
            memory_check.cache(
                dataclasses.replace(
                    model,
                    cache=options.sampler_cache,
                    cache_pages=options.sampler_cache_pages,
                    page_size=options.sampler_page_size,
                ),
                rows=rows,
                max_new_tokens=options.max_new_tokens,
                mesh=sampler_mesh,
                beside=tuple(copies),
            ),
            memory_check.gradients("gradients", policy, model=model, mesh=mesh),
            memory_check.gradients("gradients", valued, model=model, mesh=critic_mesh),
        ]

    memory_check.check(
        parts,
        passing,
        change="lower --max-new-tokens, --batch-size or --continuous-batching, share "
        "pages with --sampler-cache-pages, train adapters with --lora.rank, store the "
        "reference with --reference-storage.dtype, or share it among devices with "
        "--placement.policy",
    )
