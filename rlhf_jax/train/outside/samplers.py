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
from rlhf_jax.devices import sharding
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.lora import LoRA
from rlhf_jax.models.lora import merge as merged
from rlhf_jax.roles.frozen_models import FrozenModels
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.samplers.retries import Retries
from rlhf_jax.train.build import Meshes, Models
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.sampler import Here, Process
from rlhf_jax.train.sampling.sampler import Sampler

if TYPE_CHECKING:
    from rlhf_jax.train.outside.sampler import OutsideSampler


def make_sampler(
    config: PolicyGradientConfig, models: Models, *, meshes: Meshes
) -> Sampler | OutsideSampler:
    """The sampler of a run.

    Raises:
      InputError: several processes train, for a sampler outside, or it cannot be used.
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
    if jax.process_count() > 1:
        raise InputError(
            f"--sampler: expected a trainer of one process with a sampler outside, got "
            f"{jax.process_count()}; leave out --coordinator, or --sampler"
        )
    # Here and below, as they are modules that no other run needs.
    from rlhf_jax.train.outside.sampler import OutsideSampler

    retries, merge = Retries(options.tries), None
    if models.base is not None and recipe.lora is not None:
        merge = _merging(models.base, recipe.lora, mesh=meshes.policy)
        recipe = dataclasses.replace(recipe, lora=None)
    if isinstance(options, Process):
        from rlhf_jax.samplers.process import ProcessSampler

        outside = ProcessSampler(
            recipe, weights=options.weights, timeout=options.timeout
        )
        return OutsideSampler(outside, home=meshes.policy, merge=merge, retries=retries)
    from rlhf_jax.samplers.server import ServerSampler

    tolerance = options.check_tolerance
    if tolerance is None:
        tolerance = self_check.TOLERANCE[config.start.dtype]
    server = ServerSampler(
        options.address,
        recipe,
        tolerance=tolerance,
        mesh=meshes.policy,
        model=options.model,
        weights=options.weights,
        timeout=options.timeout,
        retries=retries,
    )
    # Programs of two threads on several devices could wait for each other for ever:
    # the check of a hand-over runs on those of the policy.
    return OutsideSampler(
        server,
        home=meshes.policy,
        merge=merge,
        retries=retries,
        threaded=meshes.policy.devices.size == 1,
    )


def _merging(base: Frozen, lora: LoRA, *, mesh: Mesh) -> Callable[[Any], Any]:
    """What samplers outside draw with, who know no adapters: f32, on the mesh."""

    def of_base(policy: Any, base: Frozen) -> Any:
        return merged(frozen.read(base), policy, lora=lora, rounded_to=jnp.float32)

    return functools.partial(jax.jit(sharding.on(mesh, of_base)), base=base)
