"""Which layout of the policy's devices to sample on, where the run does not say.

    fsdp=8               every token gathers weights, or sums activations of all rows
    data=8               a copy of the policy per device, which reads all of it
    data=2,tensor=4      a quarter of it per device, and sums over the links

By hand (`planning/decoding.py`), in no time: the least seconds of all tokens and of
bringing the policy there, of the layouts that fit. `rlhf-jax plan --find-sampler-mesh`
asks the compiler about each.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax.numpy as jnp
from jax.sharding import Mesh

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.placement import AUTO, WITH_POLICY, Place
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import decoding, memory_check
from rlhf_jax.planning.chips import Chip
from rlhf_jax.train import shapes
from rlhf_jax.train.build import Meshes, Models
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.sampler import Here

ROOM = 0.9  # of a device's memory; prompts and activations take the rest


class Layout(NamedTuple):
    """A mesh to sample on."""

    mesh: MeshShape
    token: float  # seconds of one, at the least
    seconds: float  # of a rollout, at the least
    bytes: int  # on a device while it samples, at the least


def placed(
    config: PolicyGradientConfig,
    models: Models,
    *,
    mesh: Mesh,
    chip: Chip | None,
    prompt: int,
    per_node: int | None = None,
    memory: int | None = None,
) -> tuple[PolicyGradientConfig, str | None]:
    """The run with a place in place of `auto`, and what was chosen, as a line.

    Args:
      models: shapes.
      mesh: the policy's.
      chip: that its devices are; None, as of a CPU, samples on the policy's mesh.
      prompt: columns of a prompt.
      per_node: devices whose links are fast; None is all.
      memory: bytes that a device gives to programs; None is what the chip's table says.
    """
    if config.placement.sampler != AUTO:
        return config, None
    best = None
    if chip is not None and mesh.size > 1 and can_move(config):
        layouts = []
        for one in candidates(config, models.recipe.model, per_node=per_node):
            # What an axis does not divide, as learned positions, is not sampled there.
            with contextlib.suppress(InputError):
                layouts.append(
                    layout(config, models, one, mesh=mesh, chip=chip, prompt=prompt)
                )
        room = ROOM * (chip.memory if memory is None else memory)
        fitting = [one for one in layouts if one.bytes <= room]
        best = min(fitting, key=lambda one: one.seconds, default=None)
    if best is None:
        return config.sampled_at(WITH_POLICY), None
    name = written(best.mesh)
    line = f"Sampling on {name}: {best.token * 1e3:.2f} ms per token at the least"
    if best.mesh == config.placement.policy:
        return config.sampled_at(WITH_POLICY), line
    return config.sampled_at(Place(mesh=best.mesh)), line


def written(mesh: MeshShape) -> str:
    """The axes of a mesh that share anything, as an option takes them."""
    axes = ((axis, size) for axis, size in vars(mesh).items() if size > 1)
    return ",".join(f"{axis}={size}" for axis, size in axes) or "1"


def can_move(config: PolicyGradientConfig) -> bool:
    """Whether a sampler on a mesh of its own goes with the rest of the run."""
    sampler = config.sampler
    return (
        isinstance(sampler.sampler, Here)
        and sampler.sampler.cache_pages is None  # whose number is for a mesh
        and sampler.environment is None
        and not config.mixes_reference
    )


def candidates(
    config: PolicyGradientConfig, model: ModelConfig, *, per_node: int | None = None
) -> Iterator[MeshShape]:
    """(data, tensor) of all devices: rows by data, heads by a power of two.

    Slices have rows of their own.
    """
    slices, rows = config.placement.policy.dcn, config.batch.batch_size
    devices = config.placement.policy.size // slices
    places = config.method.continuous_batching or rows
    most = math.gcd(devices, model.num_heads, model.common_kv_heads, model.hidden_size)
    tensor = 1
    while tensor <= most:
        shares = devices // tensor if most % tensor == 0 else 0
        near = per_node is None or per_node % tensor == 0
        if shares and near and math.gcd(rows, places) % (slices * shares) == 0:
            yield MeshShape(dcn=slices, data=shares, tensor=tensor)
        tensor *= 2


def layout(
    config: PolicyGradientConfig,
    models: Models,
    shape: MeshShape,
    *,
    mesh: Mesh,
    chip: Chip,
    prompt: int,
) -> Layout:
    """What a mesh takes; the other arguments are those of `placed`.

    Raises:
      InputError: an axis of the mesh does not divide what it shards.
    """
    options, recipe = config.sampler.sampler, models.recipe
    assert isinstance(options, Here)
    model = options.sampled(recipe.model)
    rows = recipe.continuous_batching or config.batch.batch_size
    columns = prompt + recipe.max_new_tokens
    dtype = "int8" if options.dtype == "int8" else model.dtype
    token = decoding.token(
        model,
        mesh=shape,
        rows=rows,
        columns=columns,
        weight_bytes=jnp.dtype(dtype).itemsize,
    )
    seconds = token.seconds(chip)
    own = sum(
        memory_check.bytes_per_device(part.shapes, mesh=part.mesh)
        for part in shapes.parts(config, models, meshes=Meshes(mesh, mesh, mesh))
        if part.mesh is not None and part.shapes is not None
    )
    policy = base = 0
    if shape != config.placement.policy:
        devices = sorted(mesh.devices.flat, key=lambda device: device.id)
        sampling = shape.make(devices)
        stored = shapes.storage_of_sampler(config.sampled_at(Place(mesh=shape)), models)
        policy = memory_check.bytes_per_device(stored, mesh=sampling)
        if models.base is not None:
            base = memory_check.bytes_per_device(models.base.stored, mesh=sampling)
    copied = base + policy * max(config.staleness, 1)  # one per batch that is ahead
    # Layers are taken apart for the loop: the weights are there once more, all experts.
    experts = decoding.expert_numbers(model) - decoding.expert_numbers(
        model, rows=-(-rows // (shape.dcn * shape.data))
    )
    unmet = int(jnp.dtype(dtype).itemsize * experts) // shape.tensor
    size = own + copied + token.weights + unmet + token.cache
    brought = policy / chip.links  # the base once, before the first rollout
    turns = recipe.max_new_tokens * config.batch.batch_size / rows
    return Layout(shape, seconds, seconds * turns + brought, size)
