"""Who samples: our decoder here, a process, or a server."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.devices import processes, sharding
from rlhf_jax.devices.mesh_shape import ONE_DEVICE
from rlhf_jax.models.lora import LoRA
from rlhf_jax.models.lora import merge as merged
from rlhf_jax.roles.frozen_models import FrozenModels
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.samplers import protocol
from rlhf_jax.samplers.retries import Retries
from rlhf_jax.train.build import Meshes, Models
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.sampler import Here, Process, Server
from rlhf_jax.train.sampling.sampler import Sampler

if TYPE_CHECKING:
    from rlhf_jax.train.outside.sampler import OutsideSampler


def make_sampler(
    config: PolicyGradientConfig, models: Models, *, meshes: Meshes
) -> Sampler | OutsideSampler:
    """The sampler of a run.

    Raises:
      InputError: a sampler outside cannot be used.
    """
    options, recipe = config.sampler.sampler, models.recipe
    if isinstance(options, Here):
        # Episodes are drawn by programs that have a copy of their own.
        alone = config.sampler.environment is None
        frozen = FrozenModels(base=models.base if alone else None)
        if config.mixes_reference:
            frozen = FrozenModels(models.reference, models.base)
        return Sampler(
            recipe,
            mesh=meshes.sampler,
            home=meshes.policy,
            frozen=frozen,
            options=options,
        )
    # Here and below, as they are modules that no other run needs.
    from rlhf_jax.train.outside.sampler import OutsideSampler

    merge = None
    if models.base is not None and recipe.lora is not None:
        merge = _merging(models.base, recipe.lora, mesh=meshes.policy)
        recipe = dataclasses.replace(recipe, lora=None)
    retries = Retries(options.tries)
    made: list[protocol.Sampler] = []
    processes.on_first(
        lambda: made.append(
            _outside(config, recipe, options=options, retries=retries, meshes=meshes)
        )
    )
    return OutsideSampler(
        made[0] if made else None,
        home=meshes.policy,
        max_new_tokens=recipe.max_new_tokens,
        merge=merge,
        retries=retries,
        # Programs of two threads on several devices could wait for each other for
        # ever: the check of a server's hand-over runs on those of the policy.
        threaded=isinstance(options, Process) or meshes.policy.devices.size == 1,
    )


def _outside(
    config: PolicyGradientConfig,
    recipe: PolicyGradient,
    *,
    options: Process | Server,
    retries: Retries,
    meshes: Meshes,
) -> protocol.Sampler:
    """A process, or a server that answers."""
    if isinstance(options, Process):
        from rlhf_jax.samplers.process import ProcessSampler

        return ProcessSampler(recipe, weights=options.weights, timeout=options.timeout)
    from rlhf_jax.samplers.server import ServerSampler

    mesh = meshes.policy
    if jax.process_count() > 1:  # a program on the devices of all would wait for them
        mesh = ONE_DEVICE.make(jax.local_devices()[:1])
    tolerance = options.check_tolerance
    if tolerance is None:
        tolerance = self_check.TOLERANCE[config.start.dtype]
    return ServerSampler(
        options.address,
        recipe,
        tolerance=tolerance,
        mesh=mesh,
        model=options.model,
        weights=options.weights,
        timeout=options.timeout,
        retries=retries,
    )


def _merging(base: Frozen, lora: LoRA, *, mesh: Mesh) -> Callable[[Any], Any]:
    """What samplers outside draw with, who know no adapters: f32, on the mesh."""

    def of_base(policy: Any, base: Frozen) -> Any:
        return merged(frozen.read(base), policy, lora=lora, rounded_to=jnp.float32)

    return functools.partial(jax.jit(sharding.on(mesh, of_base)), base=base)
