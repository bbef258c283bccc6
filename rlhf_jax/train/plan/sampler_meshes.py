"""Compares the meshes for sampling that the chips allow, by the roofline of each.

    policy              every chip gathers weights, or sends activations, per token
    data=8              a copy of the policy per chip, its own rows, no links
    data=4,tensor=2     half of the weights per chip, activations over the links
    ...                 down to one copy over as many chips as there are heads

A mesh costs the time to reshard the policy once, and the time of the sampler.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.placement import Place
from rlhf_jax.functional.checks import InputError
from rlhf_jax.planning import measured, resharding
from rlhf_jax.planning.measured import Waiting
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.plan.job import Config, Job
from rlhf_jax.train.rollouts import fastest


class Layout(NamedTuple):
    """A mesh to sample on, with the compiler's figures per chip."""

    mesh: MeshShape | None  # None is the training mesh
    total: int  # bytes alive during sampling; 0 if refused
    seconds: float  # lower bound, resharding included; inf if refused
    token: float | None  # lower bound of the seconds per decoded token
    refused: str | None  # the reason why it cannot be used

    def described(self) -> dict[str, Any]:
        """Returns the figures as JSON values."""
        return {
            "mesh": self.name,
            "total": self.total,
            "seconds": None if self.refused else self.seconds,
            "seconds_of_token": self.token,
            "refused": self.refused,
        }

    @property
    def name(self) -> str:
        """The mesh in the form of --placement.sampler."""
        return "policy" if self.mesh is None else fastest.written(self.mesh)


def candidates(
    *, chips: int, rows: int, num_heads: int, slices: int = 1
) -> list[MeshShape | None]:
    """Returns the training mesh, and every (data, tensor) that divides the work.

    Args:
      chips: of the run; tensor is a power of two that divides them.
      rows: responses of a batch; data must divide them.
      num_heads: query heads; tensor must divide them.
      slices: number of slices, each with rows of its own.
    """
    chips //= slices
    shapes: list[MeshShape | None] = [None]
    tensor = 1
    while tensor <= chips:
        fits = chips % tensor == 0 and num_heads % tensor == 0
        data = chips // tensor
        if fits and rows % (slices * data) == 0:
            shapes.append(MeshShape(dcn=slices, data=data, tensor=tensor))
        tensor *= 2
    return shapes


def sampled_on(config: Config, mesh: MeshShape | None) -> PolicyGradientConfig:
    """Returns the config with another mesh for sampling; None is the policy's."""
    if not isinstance(config, PolicyGradientConfig):
        raise InputError(
            f"--find-sampler-mesh: expected a command that samples, got {config.name}; "
            f"leave it out"
        )
    return config.sampled_at(Place(mesh=mesh))


def compare(
    config: Config,
    job: Job,
    *,
    resident: dict[str, int],
    waiting: Waiting,
) -> list[Layout]:
    """Compiles the sampler for each mesh; returns the fastest mesh that fits first.

    Args:
      config: of the run; its own --placement.sampler is ignored.
      resident: bytes by name, from `measured.resident`.
    """
    rows, target = config.batch.batch_size, job.target

    def layout(mesh: MeshShape | None) -> Layout:
        tried = sampled_on(config, mesh)
        refused = functools.partial(Layout, mesh, 0, math.inf, None)
        work = job.workload_of(tried)
        try:
            [one] = measured.measure(
                work.programs[:1], target, rows=rows, waiting=waiting
            )
        except InputError as error:  # an axis does not divide what it shards
            return refused(str(error))
        if one.refused is not None:
            return refused(one.refused)
        total = measured.alive(one, resident).total
        brought = resharding.described(one, target)
        drawn = measured.described(one, target.chip, num_chips=target.mesh.size)
        seconds, token = drawn["seconds"]["bound"], drawn["seconds_of_turn"]
        if brought is not None:
            seconds += brought["seconds"]["bound"]
        return Layout(mesh, total, seconds, token and token["bound"], None)

    start = job.start_of(config)
    tried = candidates(
        chips=target.mesh.size,
        rows=rows,
        num_heads=start.model.num_heads,
        slices=config.placement.policy.dcn,
    )
    layouts = map(layout, tried)
    return best_first(layouts, memory=target.chip.memory)


def best_first(layouts: Iterable[Layout], *, memory: int) -> list[Layout]:
    """Sorts by seconds, with layouts that exceed `memory` bytes last."""
    return sorted(
        layouts,
        key=lambda one: (
            one.refused is not None or one.total > memory,
            one.seconds,
        ),
    )
