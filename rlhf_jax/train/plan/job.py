"""The options of a plan; the model and the step of a run as shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import jax

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.devices.placement import AUTO
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import layout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.planning import compiled, histogram, measured
from rlhf_jax.planning.measured import Target
from rlhf_jax.planning.workload import Workload
from rlhf_jax.runs.profile.profiler import Text
from rlhf_jax.train import shapes
from rlhf_jax.train.build import Meshes
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.supervised import SupervisedConfig
from rlhf_jax.train.plan import auto, policy_gradient, supervised
from rlhf_jax.train.rollouts import fastest
from rlhf_jax.train.rollouts.fastest import Devices

Config: TypeAlias = PolicyGradientConfig | SupervisedConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The chips of a run, and the lengths of its texts."""

    topology: str | None = None
    """Chips to compile for, as v5e:2x2, or h100:8x8 for nodes x GPUs; None compiles for
    this machine's device."""
    chip: str | None = None
    """Chip of a --topology without a name, as h100 with 8x8; without a topology, the
    chip that this machine's compiler stands in for. None takes that of the topology or
    the machine."""
    prompt_length: int = 64
    """Columns of prompts, tokens."""
    lengths: Path | None = None
    """File of response lengths, an integer or an object with "length" per line; None
    plans responses that fill all columns."""
    find_batch: bool = False
    """Whether to find the largest batch that fits, with some more compiles."""
    find_sampler_mesh: bool = False
    """Whether to compare the meshes that the chips allow for sampling, and plan with
    the fastest that fits; some more compiles."""
    json: Path | None = None
    """File to write the plan to; None writes none."""

    def __post_init__(self) -> None:
        checks.positive(prompt_length=self.prompt_length)
        if ":" in (self.topology or "") and self.chip is not None:
            raise InputError(
                f"expected --topology or --chip, got {self.topology} and {self.chip}; "
                f"a topology names its chip"
            )

    @property
    def slice(self) -> str | None:
        """The topology with its chip, as "h100:8x8"."""
        if self.topology is None or self.chip is None:
            return self.topology
        return f"{self.chip}:{self.topology}"


def chosen(config: Config, options: Options) -> tuple[Config, list[str]]:
    """Returns the config with the choices of `--auto` for these chips, and a report.

    Raises:
      InputError: as `measured.target`, or a role is on devices of its own.
    """
    if not isinstance(config, SupervisedConfig):
        policy_gradient.refuse_apart(config)
    if config.auto is None:
        return config, []
    among = jax.devices() if options.slice is None else compiled.slice_of(options.slice)
    every = MeshShape(data=len(among))
    target = measured.target(options.slice, chip=options.chip, mesh=every)
    start = Job(options, target).start_of(config)
    devices = Devices(among, target.chip, per_node=target.per_node)
    if isinstance(config, SupervisedConfig):
        task = supervised.TASKS[config.name](config)
        task, lines = auto.chosen_of_task(task, start, devices)
        return task.config, lines
    return auto.chosen(config, start, devices, prompt=options.prompt_length)


class Job(NamedTuple):
    """The chips that runs are planned for, and the lengths of their responses."""

    options: Options
    target: Target
    lengths: Sequence[int] | None = None  # increasing, tokens; None fills all columns

    def workload_of(self, config: Config) -> Workload:
        """Returns the workload of a step."""
        options, lengths, mesh = self.options, self.lengths, self.target.mesh
        texts = 2 if config.name in supervised.PAIRS else 1
        rows, columns = texts * config.batch.batch_size, columns_of(config, options)
        longest = columns - options.prompt_length
        responses = (longest,) * rows
        if lengths is not None:
            checks.within(
                most=longest,
                advice="raise --max-new-tokens or --max-length",
                **{"tokens of a response in --lengths": lengths[-1]},
            )
            responses = histogram.spread(lengths, rows=rows)
        batch = [Text(options.prompt_length, response) for response in responses]
        start = self.start_of(config)
        if isinstance(config, SupervisedConfig):
            return supervised.workload_of(
                config, start, mesh=mesh, columns=columns, texts=batch
            )
        return policy_gradient.workload_of(config, start, mesh=mesh, texts=batch)

    def placed(self, config: Config) -> tuple[Config, str | None]:
        """Replaces `auto` by the place of the sampler on the chips (`fastest.placed`).

        Raises:
          InputError: as `workload_of`.
        """
        if isinstance(config, SupervisedConfig) or config.placement.sampler != AUTO:
            return config, None
        target, mesh = self.target, self.target.mesh
        meshes, start = Meshes(mesh, mesh, mesh), self.start_of(config)
        return fastest.placed(
            config,
            shapes.of_run(config, meshes=meshes, start=start),
            Devices([*mesh.devices.flat], target.chip, per_node=target.per_node),
            mesh=mesh,
            prompt=self.options.prompt_length,
        )

    def start_of(self, config: Config) -> Pretrained:
        """Returns --model without parameters, with the attention of the chips."""
        start, placed = config.start, config.placement.policy
        shape = _shape(config)
        layout.refuse_context(start.attention, context=placed.context, model=shape)
        layout.refuse_expert_axis(placed.expert, model=shape)
        model = dataclasses.replace(
            shape, dtype=start.dtype, remat=start.remat, attention=start.attention
        )
        backend = layout.backend_of(self.target.mesh.abstract_mesh)
        choice = layout.choose(
            model,
            columns=columns_of(config, self.options),
            backend=backend,
            context=placed.context,
            tensor=placed.tensor,
        )
        model = dataclasses.replace(model, attention=choice.engine)
        return shapes.start(model, backend=backend)


def _shape(config: Config) -> ModelConfig:
    if config.start.model is None:
        raise InputError(
            "--model: expected a checkpoint or a known name, got none; name one"
        )
    return shapes.model_of(config.start.model)


def columns_of(config: Config, options: Options) -> int:
    """Returns the columns of a text, prompt included."""
    if isinstance(config, PolicyGradientConfig):
        return options.prompt_length + config.batch.max_new_tokens
    columns = config.data.max_length
    if columns is None:
        columns = _shape(config).max_positions
    checks.within(
        below=columns,
        advice="lower it, or raise --max-length",
        **{"--prompt-length": options.prompt_length},
    )
    return columns


def minibatches(config: Config) -> int:
    """Returns the number of updates of a pass over a batch."""
    return getattr(config.method, "num_minibatches", 1)
