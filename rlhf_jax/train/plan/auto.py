"""`--auto`: chooses how the devices share a run, from shapes.

    mesh          all devices: data, data over nodes with fsdp inside them, or fsdp
    remat         none, dots or full
    micro-batch   rows of a forward and backward pass
    cache         all rows decoded at a time, or fewer if no mesh has room

Of the updates that fit it takes the one with the least estimated time: its matrix
products (with rematerialised ones), or the bytes that it sends. `rollouts/fastest.py`
chooses the mesh for sampling. Models and optimizers are counted exactly
(`memory_check`), activations are estimated (`workload.activation_bytes`). Options that
are not at their default are kept.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices.mesh_shape import ONE_DEVICE, MeshShape
from rlhf_jax.devices.placement import AUTO
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import Remat
from rlhf_jax.planning import chips, memory_check, workload
from rlhf_jax.planning.chips import Chip
from rlhf_jax.train import shapes
from rlhf_jax.train.build import Meshes
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.supervised import SupervisedConfig
from rlhf_jax.train.plan.updates import Update, of_policy_gradient, of_task
from rlhf_jax.train.rollouts import fastest
from rlhf_jax.train.supervised.task import Task

AnyConfig: TypeAlias = PolicyGradientConfig | SupervisedConfig
Config = TypeVar("Config", bound=AnyConfig)
GIB = 2**30
# Cost of an update in forward passes: full remat repeats all of one, dots a part.
PASSES: dict[Remat, float] = {"none": 3.0, "dots": 3.1, "full": 4.0}


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
        return fastest.ROOM * memory

    def rate(self, devices: int) -> float:
        """Returns bytes per second between `devices` neighbouring devices."""
        assert self.chip is not None
        far = self.per_node is not None and devices > self.per_node
        return self.chip.network if far and self.chip.network else self.chip.links


class Fit(NamedTuple):
    """An update that fits."""

    mesh: MeshShape
    remat: Remat
    micro: int  # rows
    seconds: float  # lower bound, per pass over a batch
    models: int  # bytes per device: models, optimizers and gradients
    activations: int  # bytes per device


def chosen(
    config: PolicyGradientConfig, start: Pretrained, among: Devices, *, prompt: int
) -> tuple[PolicyGradientConfig, list[str]]:
    """Returns the config with the choices of `--auto`, and lines that report them.

    Args:
      start: --model without parameters.
      prompt: columns of a prompt.
    """
    columns = prompt + config.batch.max_new_tokens

    def update() -> Update:
        return of_policy_gradient(config, start, among.one, columns=columns)

    made, lines = _updated(config, update, among)
    if made is config:
        return config, lines
    made, line = _places(made, start, among, prompt=prompt)
    return made, [*lines, *line]


def chosen_of_task(
    task: Task[Any], start: Pretrained, among: Devices
) -> tuple[Task[Any], list[str]]:
    """As `chosen`, for SFT, reward model and DPO with rows of the greatest length."""
    config, lines = _updated(
        task.config, lambda: of_task(task, start, among.one), among
    )
    return task if config is task.config else type(task)(config), lines


def _updated(
    config: Config, update_of: Callable[[], Update], among: Devices
) -> tuple[Config, list[str]]:
    """Chooses mesh, remat and micro-batch; returns `config` itself if it cannot."""
    if config.auto is None:
        return config, []
    count = len(among.devices)
    if among.chip is None:
        kind = among.devices[0].device_kind
        return config, [
            f"--auto: no figures of {kind} are known, so every option is kept; the "
            f"policy is on {config.placement.policy.size} of {count} devices"
        ]
    update = update_of()
    head = (
        f"--auto, for {count} x {among.chip.kind} and rows of {update.columns:,} "
        f"columns:"
    )
    fits = list(_fits(config, update, among))
    if not fits:
        return config, [
            head,
            "  every option is kept, as no mesh and remat have room for an update: use"
            " --lora 16, a bfloat16 reference or more devices",
        ]
    best = min(fits, key=lambda fit: fit.seconds)
    placement = dataclasses.replace(config.placement, policy=best.mesh)
    policy = dataclasses.replace(config.start, remat=best.remat)
    micro = None if best.micro == update.rows else best.micro
    method = dataclasses.replace(config.method, micro_batch_size=micro)
    made: Any = dataclasses.replace(
        config, placement=placement, start=policy, method=method
    )
    lines = [
        head,
        f"  --placement.policy {fastest.written(best.mesh)}: models, optimizers and "
        f"gradients take {best.models / GIB:.2f} GiB of {among.room / GIB:.2f} "
        f"per device",
        f"  --remat {best.remat} --micro-batch-size {best.micro}: activations take "
        f"about {best.activations / GIB:.2f} GiB, an update {best.seconds:.2g} s at "
        f"the least",
    ]
    if idle := count - best.mesh.size - _taken(config):
        lines.append(
            f"  {idle} of {count} devices are idle: at most {best.mesh.size} can share "
            f"the {update.rows} rows of an update and the heads"
        )
    return made, lines


def _fits(config: AnyConfig, update: Update, among: Devices) -> Iterator[Fit]:
    """Yields, for every mesh and remat, the largest micro-batch that fits."""
    chip = among.chip
    assert chip is not None
    for shape in _meshes(config, update, among):
        resident = update.resident(shape.make(list(among.devices)[: shape.size]))
        shares = shape.rows
        for remat in _remats(config):
            ran = dataclasses.replace(update.model, remat=remat)
            for micro in _micros(config, update.rows, shares):
                activations = workload.activation_bytes(
                    ran,
                    rows=update.texts * micro // shares,
                    columns=update.columns // shape.context,
                    tensor=shape.tensor,
                )
                if resident + activations <= among.room:
                    # The base under adapters has no weight gradients.
                    passes = PASSES[remat] - (update.frozen is not None)
                    products = passes * update.forward / shape.size / chip.flops
                    times = config.batch.batch_size // micro
                    sent = _sent(config, update, shape, among, times=times)
                    seconds = update.passes * max(products, sent)
                    yield Fit(shape, remat, micro, seconds, resident, activations)
                    break  # smaller micro-batches are not faster


def _meshes(config: AnyConfig, update: Update, among: Devices) -> Iterator[MeshShape]:
    """Yields the user's mesh, or meshes of as many devices as rows and heads allow."""
    chosen_mesh = config.placement.policy
    if chosen_mesh != ONE_DEVICE or not _may("mesh", config):
        yield chosen_mesh
        return
    free, model = len(among.devices) - _taken(config), update.model
    shares = math.gcd(free, update.rows)
    tensor = math.gcd(free // shares, model.num_heads, model.common_kv_heads)
    yield MeshShape(data=shares, tensor=tensor)
    near = among.per_node or shares
    if near < shares and shares % near == 0:
        # TPUs have slices in place of nodes.
        of_slices = among.chip is not None and not among.chip.is_gpu
        across = {"dcn" if of_slices else "data": shares // near}
        yield MeshShape(fsdp=near, tensor=tensor, **across)
    if shares > 1:
        yield MeshShape(fsdp=shares, tensor=tensor)


def _remats(config: AnyConfig) -> tuple[Remat, ...]:
    remat = config.start.remat
    free = remat == "none" and _may("remat", config)
    return ("none", "dots", "full") if free else (remat,)


def _micros(config: AnyConfig, rows: int, shares: int) -> list[int]:
    """Returns micro-batch sizes that the devices divide, in decreasing order."""
    size = config.method.micro_batch_size
    if size is not None or not _may("micro-batch", config):
        sizes = [rows if size is None else size]
    else:
        sizes = range(rows, 0, -1)
    return [n for n in sizes if rows % n == 0 and n % shares == 0]


def _sent(
    config: AnyConfig, update: Update, mesh: MeshShape, among: Devices, *, times: int
) -> float:
    """Returns seconds of communication for a pass in `times` micro-batches.

    With fsdp, weights are gathered in the forward and the backward pass, and gradients
    summed, for every micro-batch. Gradients are summed over data once per update.
    """
    size = jnp.dtype(config.start.dtype).itemsize
    trained, read = _count(update.trained), _count((update.trained, update.frozen))
    gathered = times * (1 - 1 / mesh.fsdp) * (2 * size * read + 4 * trained)
    copies = mesh.dcn * mesh.data
    summed = update.minibatches * (1 - 1 / copies) * 2 * 4 * trained
    inner = mesh.fsdp * mesh.tensor
    return gathered / mesh.tensor / among.rate(inner) + summed / inner / among.rate(
        mesh.size
    )


def _places(
    config: PolicyGradientConfig, start: Pretrained, among: Devices, *, prompt: int
) -> tuple[PolicyGradientConfig, list[str]]:
    """Lowers the number of rows decoded at a time until a sampling mesh has room."""
    shape, rows = config.placement.policy, config.batch.batch_size
    mesh = shape.make(list(among.devices)[: shape.size])
    tried, known = config, among._asdict()
    del known["devices"]
    fixed = config.method.continuous_batching is not None
    here = config.placement.sampler == AUTO and fastest.can_move(config)
    if fixed or not here or not _may("cache", config):
        return config, []
    while rows >= shape.size > 1:
        models = shapes.of_run(tried, meshes=Meshes(mesh, mesh, mesh), start=start)
        _, fits = fastest.placed(tried, models, mesh=mesh, prompt=prompt, **known)
        if fits is not None and tried is config:
            return config, [f"  KV cache: all {rows} rows are decoded at a time"]
        if fits is not None:
            why = f"as no layout has room for {config.batch.batch_size} rows"
            return tried, [f"  --continuous-batching {rows}: {why} of KV cache"]
        rows //= 2
        method: Any = dataclasses.replace(config.method, continuous_batching=rows)
        try:
            tried = dataclasses.replace(config, method=method)
        except InputError:  # for instance in an environment
            break
    return config, []


def _may(choice: str, config: AnyConfig) -> bool:
    """Whether --auto may make a choice; without names it makes all."""
    return config.auto is not None and (not config.auto or choice in config.auto)


def _taken(config: AnyConfig) -> int:
    """Returns the number of devices at the end that other roles take."""
    return max((at.num_last for at in config.placement.places().values()), default=0)


def _count(tree: Any) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))
