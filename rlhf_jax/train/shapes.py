"""Checkpoints and models of a run as shapes; no weights are read or allocated.

Under `jax.eval_shape` of `build` the zeros are only shapes. From them `check` decides
whether the models and one iteration fit a device, before weights are read.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlhf_jax.checkpoints import hf
from rlhf_jax.checkpoints.frozen_models import Loader
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import memory_check
from rlhf_jax.planning.memory_check import Part, Passing
from rlhf_jax.roles import critic
from rlhf_jax.roles.reference import storage
from rlhf_jax.train.build import Meshes, Models, build
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.sampler import Here

Params = Any


def params(model: ModelConfig) -> Params:
    """Returns the parameters of a decoder, all 0."""
    shapes = decoder.shapes(model)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def start(model: ModelConfig, *, backend: str) -> Pretrained:
    """Returns a checkpoint without parameters or a tokenizer."""
    nothing: Any = None
    return Pretrained(
        model, params=None, tokenizer=nothing, stop_ids=(), backend=backend
    )


def model_of(path: str) -> ModelConfig:
    """Returns the model config of a checkpoint, or of a known name."""
    if Path(path).exists():  # loads no family but its own
        return hf.model_config(path)
    from rlhf_jax.models.families import registry

    if path in registry.KNOWN:
        return registry.KNOWN[path]
    try:
        return hf.model_config(path)
    except InputError as error:
        longer = [name for name in registry.KNOWN if name.startswith(f"{path}-")]
        close = longer or difflib.get_close_matches(path, registry.KNOWN, n=1)
        if not close or "/" in path:
            raise
        raise InputError(f"{error}; the nearest known name is {close[0]}") from error


def load(path: str, **_: Any) -> tuple[ModelConfig, Params]:
    """Replaces `hf.load`: reads only the config of a checkpoint; parameters are 0."""
    model = model_of(path)
    return model, params(model)


def load_reward(path: str, **_: Any) -> tuple[ModelConfig, Params]:
    """Replaces `hf.load_reward`: reads only the config; parameters are 0."""
    model, trunk = load(path)
    return model, critic.from_policy(trunk, model=model)


def loader(policy: Pretrained, mesh: Mesh) -> Loader:
    """Returns a loader that reads only the configs of checkpoints."""
    return Loader(policy, mesh, model=load, reward=load_reward)


def of_run(
    config: PolicyGradientConfig, *, meshes: Meshes, start: Pretrained
) -> Models:
    """Returns the result of `build` as shapes, from the configs of the checkpoints.

    Args:
      start: --model without parameters; it gets the run's compute dtype.
    """
    model = dataclasses.replace(start.model, dtype=config.start.dtype)

    def made() -> Models:
        begin = start._replace(model=model, params=params(model))
        return build(config, begin, meshes=meshes, loader=loader(begin, meshes.policy))

    return jax.eval_shape(made)


def reward_names(models: Models) -> list[str]:
    """Returns the names of reward models in tables, numbered from the second."""
    count = len(models.rewards)
    return ["reward model", *(f"reward model {i}" for i in range(2, count + 1))][:count]


def parts(
    config: PolicyGradientConfig, models: Models, *, meshes: Meshes
) -> list[Part]:
    """Returns every model and optimizer of a run, with its mesh."""
    mesh, placement = meshes.policy, config.placement
    policy, of_critic = models.train.policy, models.train
    valued, valued_opt = of_critic.critic, of_critic.critic_opt
    if models.critic is not None:
        valued, valued_opt = models.critic.params, models.critic.opt
    reference_mesh = placement.reference.memory_mesh(mesh)
    whole = [
        Part("policy", policy, mesh),
        Part("policy's optimizer", models.train.policy_opt, mesh),
        Part("critic", valued, meshes.critic),
        Part("critic's optimizer", valued_opt, meshes.critic),
    ]
    if models.base is not None:
        whole.append(Part("base", models.base.stored, mesh))
    chosen = config.reference
    alias = chosen.checkpoint is None and models.base is not None
    if models.reference is not None and not (alias and not chosen.lifecycle.moves):
        whole.append(Part("reference", models.reference.stored, reference_mesh))
    if models.head is not None:
        whole.append(Part("reference's head", models.head.stored, mesh))
    for reference in chosen.references:
        stored = models.further[reference.name].stored
        whole.append(
            Part(
                f"reference {reference.name}", stored, reference.place.memory_mesh(mesh)
            )
        )
    for name, one in zip(reward_names(models), models.rewards, strict=True):
        place = placement.reward.memory_mesh(mesh)
        whole.append(Part(name, one.stored, place))
    return whole


def check(config: PolicyGradientConfig, models: Models, *, meshes: Meshes) -> None:
    """Raises InputError if a run cannot fit into the memory of a device.

    It is a lower bound: prompts count neither in the cache nor as activations.
    """
    recipe, mesh, placement = models.recipe, meshes.policy, config.placement
    resident = parts(config, models, meshes=meshes)
    policy, valued = models.train.policy, models.train.critic
    if models.critic is not None:
        valued = models.critic.params
    options, whole = config.sampler.sampler, storage_of_sampler(config, models)
    sampler_mesh, copies = meshes.sampler, []
    handed_over = placement.sampler.apart or config.staleness > 0
    rounds = isinstance(options, Here) and config.sampler_dtype != "float32"
    if handed_over or rounds:
        copies = [Part("policy", whole, sampler_mesh)]
        resident += [
            Part(f"policy for the batch {i} ahead", whole, sampler_mesh)
            for i in range(2, config.staleness + 1)
        ]
    plays_apart = config.sampler.environment is not None and mesh.size > 1
    if plays_apart:
        handed = copies if config.staleness > 0 else []
        from rlhf_jax.devices import replicas

        sampler_mesh = replicas.of_mesh(sampler_mesh).everyone
        of_player = decoder.shapes(recipe.model)
        copies = [*handed, Part("policy that plays episodes", of_player, sampler_mesh)]
    if (placement.sampler.apart or plays_apart) and models.base is not None:
        resident.append(Part("sampler's base", models.base.stored, sampler_mesh))

    def passing() -> list[Passing]:
        rows = config.batch.batch_size
        if recipe.continuous_batching is not None:
            rows = min(rows, recipe.continuous_batching)
        model = recipe.model
        if isinstance(options, Here):
            model = options.sampled(model)
        tokens = config.batch.batch_size * recipe.max_new_tokens
        records = tuple(recipe.record_bytes(tokens=tokens).items())
        programs = [
            memory_check.gradients("gradients", policy, model=recipe.model, mesh=mesh)
        ]
        if not config.sampler.is_outside:
            cache = memory_check.cache(
                model,
                rows=rows,
                max_new_tokens=recipe.max_new_tokens,
                mesh=sampler_mesh,
                beside=tuple(copies),
            )
            programs.insert(0, cache)
        programs = [one._replace(others=records) for one in programs]
        if valued is not None:
            of_critic = memory_check.gradients(
                "gradients", valued, model=recipe.model, mesh=meshes.critic
            )
            # A critic on its own devices reads none of the records.
            shared = () if models.critic is not None else records
            programs.append(of_critic._replace(others=shared))
        return programs

    memory_check.check(
        resident,
        passing,
        change="lower --max-new-tokens, --batch-size or --continuous-batching, share "
        "pages with cache_pages of --sampler, train adapters with --lora, store the "
        "reference with --reference-storage.dtype, or share it among devices with "
        "--placement.policy",
    )


def storage_of_sampler(config: PolicyGradientConfig, models: Models) -> Params:
    """Returns the shapes of the parameters that the sampler reads."""
    options, policy = config.sampler.sampler, models.train.policy
    if not isinstance(options, Here) or config.sampler_dtype == "float32":
        return policy
    store = functools.partial(
        storage.store,
        dtype=config.sampler_dtype,
        embeddings=options.embeddings,
        vectors="float32",
    )
    return jax.eval_shape(store, policy)
