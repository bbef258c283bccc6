"""The cost of an update from the shapes of its models, for `--auto`.

    of_policy_gradient(config, start, ...)     a minibatch of rollouts
    of_task(task, ...)                         a batch of SFT, reward model or DPO

Nothing is compiled.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jax.sharding import Mesh

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.models import layout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import memory_check, model_flops
from rlhf_jax.planning.memory_check import Part
from rlhf_jax.runs.profile.profiler import Text
from rlhf_jax.train import shapes
from rlhf_jax.train.build import Meshes
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.supervised import SupervisedConfig
from rlhf_jax.train.supervised import build
from rlhf_jax.train.supervised.task import Task


class Update(NamedTuple):
    """An update whose devices are to be chosen."""

    model: ModelConfig  # with the attention engine that it runs with
    rows: int  # per update
    texts: int  # per row, which models read one after the other
    columns: int  # tokens of a text
    passes: int  # over a batch
    minibatches: int  # per pass
    forward: float  # FLOPs of a forward pass over a batch
    trained: Any  # shapes of the trained parameters
    frozen: Any  # shapes of the base under adapters, or None
    parts: Callable[[Mesh], list[Part]]  # models and optimizers on a mesh

    def resident(self, mesh: Mesh) -> int:
        """Returns bytes per device of models, optimizers and float32 gradients."""
        return memory_check.bytes_per_device(self.trained, mesh=mesh) + sum(
            memory_check.bytes_per_device(part.shapes, mesh=part.mesh)
            for part in self.parts(mesh)
            if part.mesh is not None and part.shapes is not None
        )


def of_policy_gradient(
    config: PolicyGradientConfig, start: Pretrained, mesh: Mesh, *, columns: int
) -> Update:
    """Returns the update of a minibatch of rollouts.

    Args:
      start: --model without parameters.
      mesh: any mesh, on which shapes are made.
      columns: of a prompt with its response.
    """
    models = shapes.of_run(config, meshes=Meshes(mesh, mesh, mesh), start=start)
    model = _ran(config, start, columns=columns)
    new, rows = config.batch.max_new_tokens, config.batch.batch_size
    texts = [Text(columns - new, new)] * rows
    return Update(
        model=model,
        rows=rows // config.method.num_minibatches,
        texts=1,
        columns=columns,
        passes=config.method.num_epochs,
        minibatches=config.method.num_minibatches,
        forward=model_flops.forward(model, texts, head=True),
        trained=(models.train.policy, models.train.critic),
        frozen=None if models.base is None else models.base.stored,
        parts=lambda mesh: shapes.parts(
            config, models, meshes=Meshes(mesh, mesh, mesh)
        ),
    )


def of_task(task: Task[Any], start: Pretrained, mesh: Mesh) -> Update:
    """Returns the update of SFT, reward model or DPO on rows of the greatest length.

    Args:
      start: --model without parameters.
      mesh: any mesh, on which shapes are made.
    """
    config, columns = task.config, task.row_columns(start)
    model = _ran(config, start, columns=columns)
    initial, models = build.shapes_of(task, start, mesh=mesh)
    rows, texts = config.batch.batch_size, task.texts_per_row
    whole = [Text(0, columns)] * (rows * texts)
    return Update(
        model=model,
        rows=rows,
        texts=texts,
        columns=columns,
        passes=1,
        minibatches=1,
        forward=model_flops.forward(model, whole, head=task.role == "policy"),
        trained=initial.params,
        frozen=None if models.base is None else models.base.stored,
        parts=lambda mesh: build.parts(task, initial, models, mesh=mesh),
    )


def _ran(
    config: PolicyGradientConfig | SupervisedConfig, start: Pretrained, *, columns: int
) -> ModelConfig:
    model = dataclasses.replace(
        start.model, dtype=config.start.dtype, attention=config.start.attention
    )
    engine = layout.choose(
        model,
        columns=columns,
        backend=start.backend,
        context=config.placement.policy.context,
        tensor=config.placement.policy.tensor,
    ).engine
    return dataclasses.replace(model, attention=engine)
