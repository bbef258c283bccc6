"""Chooses the mesh for sampling on the policy's devices (--placement.sampler auto).

    fsdp=8               every token gathers weights, or sums activations of all rows
    data=8               every device holds and reads the whole policy
    data=2,tensor=4      every device reads a quarter, and activations are summed

Of the meshes that fit, it takes the one with the least estimated seconds for resharding
and for all tokens (`planning/decoding.py`). `rlhf-jax plan --find-sampler-mesh`
compiles for each mesh instead.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlhf_jax.devices.mesh_shape import ONE_DEVICE, MeshShape
from rlhf_jax.devices.placement import AUTO, WITH_POLICY, Place
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import chips, decoding, memory_check
from rlhf_jax.planning.chips import Chip
from rlhf_jax.train import shapes
from rlhf_jax.train.build import Meshes, Models
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.sampler import Here

ROOM = 0.9  # share of a device's memory; prompts and activations take the rest


class Devices(NamedTuple):
    """The devices that a run may use."""

    devices: Sequence[Any]
    chip: Chip | None  # None is a chip without known figures, such as a CPU
    memory: int | None = None  # bytes for programs; None takes the chip's table
    per_node: int | None = None  # number of devices with fast links; None is all

    @classmethod
    def here(cls) -> Self:
        """Returns all devices of this run."""
        devices = jax.devices()
        chip = chips.of_device(devices[0])
        # The same in all processes, which must choose the same.
        memory = memory_check.least_limit()
        return cls(devices, chip, memory, chips.per_node(chip))

    @property
    def one(self) -> Mesh:
        """A mesh of one device, on which shapes are made."""
        return ONE_DEVICE.make(list(self.devices[:1]))

    @property
    def room(self) -> float:
        """Bytes of a device for models, optimizers, gradients and activations."""
        assert self.chip is not None
        memory = self.chip.memory if self.memory is None else self.memory
        return ROOM * memory

    def rate(self, devices: int) -> float:
        """Returns bytes per second between `devices` neighbouring devices."""
        assert self.chip is not None
        far = self.per_node is not None and devices > self.per_node
        return self.chip.network if far and self.chip.network else self.chip.links


class Layout(NamedTuple):
    """A mesh to sample on, with lower bounds of its cost."""

    mesh: MeshShape
    token: float  # seconds per token
    seconds: float  # per rollout
    bytes: int  # per device during sampling


def placed(
    config: PolicyGradientConfig,
    models: Models,
    among: Devices,
    *,
    mesh: Mesh,
    prompt: int,
) -> tuple[PolicyGradientConfig, str | None]:
    """Replaces `auto` by a place of the sampler; returns the choice as a line too.

    Args:
      models: shapes.
      among: without a chip (on a CPU) the policy's mesh samples.
      mesh: the policy's mesh.
      prompt: columns of a prompt.
    """
    if config.placement.sampler != AUTO:
        return config, None
    best, chip = None, among.chip
    if chip is not None and mesh.size > 1 and can_move(config):
        layouts = []
        for one in candidates(config, models.recipe.model, per_node=among.per_node):
            # A mesh whose axes do not divide some weights is no candidate.
            with contextlib.suppress(InputError):
                layouts.append(
                    layout(config, models, one, mesh=mesh, chip=chip, prompt=prompt)
                )
        fitting = [one for one in layouts if one.bytes <= among.room]
        best = min(fitting, key=lambda one: one.seconds, default=None)
    if best is None:
        return config.sampled_at(WITH_POLICY), None
    name = written(best.mesh)
    line = f"Sampling on {name}: {best.token * 1e3:.2f} ms per token at the least"
    if best.mesh == config.placement.policy:
        return config.sampled_at(WITH_POLICY), line
    return config.sampled_at(Place(mesh=best.mesh)), line


def written(mesh: MeshShape) -> str:
    """Returns the axes larger than 1, in the form of the option."""
    axes = ((axis, size) for axis, size in vars(mesh).items() if size > 1)
    return ",".join(f"{axis}={size}" for axis, size in axes) or "1"


def can_move(config: PolicyGradientConfig) -> bool:
    """Returns whether the options of the run allow sampling on another mesh."""
    sampler = config.sampler
    return (
        isinstance(sampler.sampler, Here)
        and sampler.sampler.cache_pages is None  # their number fits one mesh only
        and sampler.environment is None
        and not config.mixes_reference
    )


def candidates(
    config: PolicyGradientConfig, model: ModelConfig, *, per_node: int | None = None
) -> Iterator[MeshShape]:
    """Yields meshes of all devices: rows over data, heads over a power of two.

    Every slice of a multi-slice mesh has its own rows.
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
    """Estimates the cost of sampling on a mesh; other arguments as in `placed`.

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
    copied = base + policy * max(config.staleness, 1)  # one per batch drawn ahead
    # Decoding copies the weights into separate layers, with all experts.
    experts = decoding.expert_numbers(model) - decoding.expert_numbers(
        model, rows=-(-rows // (shape.dcn * shape.data))
    )
    unmet = int(jnp.dtype(dtype).itemsize * experts) // shape.tensor
    size = own + copied + token.weights + unmet + token.cache
    brought = policy / chip.links  # the base is moved once, before the first rollout
    turns = recipe.max_new_tokens * config.batch.batch_size / rows
    return Layout(shape, seconds, seconds * turns + brought, size)
