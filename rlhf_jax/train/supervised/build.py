"""Builds every model of SFT, reward model and DPO from the config.

`shapes_of` does so as shapes, for the memory check, the plan and `--auto`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms import state
from rlhf_jax.algorithms.state import Optimizer, SupervisedState
from rlhf_jax.checkpoints.frozen_models import Loader
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices import sharding
from rlhf_jax.planning import memory_check
from rlhf_jax.planning.memory_check import Part
from rlhf_jax.train import shapes
from rlhf_jax.train.supervised.task import Models, Task


def build(
    task: Task[Any],
    start: Pretrained,
    *,
    mesh: Mesh,
    optimizer: Optimizer,
    loader: Loader | None = None,
) -> tuple[SupervisedState, Models]:
    """Builds the training state and the frozen models, as a pure function.

    Args:
      start: the checkpoint of --model; its parameters are trained, or are the base.
      loader: loads other checkpoints; None reads their files.
    """
    config, base = task.config, None
    if config.start.lora is not None:
        base = config.reference.reference_storage.freeze(
            start.params, place=config.reference_place
        )
    loader = Loader(start, mesh) if loader is None else loader
    reference = task.reference(loader, base=base)
    trained = task.trained(start, jax.random.key(config.seed))
    initial = state.supervised_state(trained, optimizer=optimizer)
    # All leaves: the outputs of the first step are on the mesh, and inputs that are not
    # would make `jit` compile everything twice.
    initial = sharding.place(initial, mesh=mesh)
    return initial, Models(base=base, reference=reference)


def shapes_of(
    task: Task[Any], start: Pretrained, *, mesh: Mesh
) -> tuple[SupervisedState, Models]:
    """Returns the result of `build` as shapes, from the configs of the checkpoints."""
    config = task.config
    model = dataclasses.replace(start.model, dtype=config.start.dtype)

    def made() -> tuple[SupervisedState, Models]:
        begin = start._replace(model=model, params=shapes.params(model))
        optimizer = config.optimizer.make(1)
        loader = shapes.loader(begin, mesh)
        return build(task, begin, mesh=mesh, optimizer=optimizer, loader=loader)

    return jax.eval_shape(made)


def parts(
    task: Task[Any], initial: SupervisedState, models: Models, *, mesh: Mesh
) -> list[Part]:
    """Returns every model and optimizer of a run, with its mesh."""
    config = task.config
    whole = [
        Part(task.role, initial.params, mesh),
        Part(f"{task.role}'s optimizer", initial.opt, mesh),
    ]
    places = {"reference": config.reference_place.memory_mesh(mesh)}
    alias = models.base is not None and config.reference_is_base
    for name, model in models.beside.items():
        if not (alias and name == "reference"):
            whole.append(Part(name, model.stored, places.get(name, mesh)))
    return whole


def check_memory(task: Task[Any], *, mesh: Mesh) -> None:
    """Raises InputError if a run cannot fit into memory; reads no weights."""
    config, start = task.config, task.described
    initial, models = shapes_of(task, start, mesh=mesh)
    model = dataclasses.replace(start.model, dtype=config.start.dtype)

    def passing() -> list[memory_check.Passing]:
        return [
            memory_check.gradients("gradients", initial.params, model=model, mesh=mesh)
        ]

    memory_check.check(
        parts(task, initial, models, mesh=mesh),
        passing,
        change="train adapters with --lora, take an --optimizer with less state such "
        "as adafactor, or share the model among devices with --placement.policy",
    )
