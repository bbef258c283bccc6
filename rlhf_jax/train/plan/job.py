"""The options of a plan; the model and the step of a run as shapes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

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
from rlhf_jax.planning.model_flops import Texts
from rlhf_jax.planning.workload import Workload
from rlhf_jax.train import shapes
from rlhf_jax.train.build import Meshes
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.supervised import SupervisedConfig
from rlhf_jax.train.plan import auto, policy_gradient, supervised
from rlhf_jax.train.rollouts import fastest

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


def workload_of(
    config: Config,
    options: Options,
    *,
    target: Target,
    lengths: Sequence[int] | None = None,
) -> Workload:
    """Returns the workload of a step.

    Args:
      lengths: of responses in increasing order, tokens; None fills all columns.
    """
    texts = 2 if config.name in supervised.PAIRS else 1
    rows = texts * config.batch.batch_size
    longest = columns_of(config, options) - options.prompt_length
    responses = (longest,) * rows
    if lengths is not None:
        checks.within(
            most=longest,
            advice="raise --max-new-tokens or --max-length",
            **{"tokens of a response in --lengths": lengths[-1]},
        )
        responses = histogram.spread(lengths, rows=rows)
    batch = Texts(options.prompt_length, responses)
    start = start_of(config, options, target=target)
    if isinstance(config, SupervisedConfig):
        columns = columns_of(config, options)
        return supervised.workload_of(
            config, start, mesh=target.mesh, columns=columns, texts=batch
        )
    return policy_gradient.workload_of(config, start, mesh=target.mesh, texts=batch)


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
    start = start_of(config, options, target=target)
    devices = auto.Devices(among, target.chip, per_node=target.per_node)
    if isinstance(config, SupervisedConfig):
        task = supervised.TASKS[config.name](config)
        task, lines = auto.chosen_of_task(task, start, devices)
        return task.config, lines
    return auto.chosen(config, start, devices, prompt=options.prompt_length)


def placed(
    config: Config, options: Options, *, target: Target
) -> tuple[Config, str | None]:
    """Replaces `auto` by the place of the sampler on these chips (`fastest.placed`).

    Raises:
      InputError: as `workload_of`.
    """
    if isinstance(config, SupervisedConfig) or config.placement.sampler != AUTO:
        return config, None
    mesh = target.mesh
    return fastest.placed(
        config,
        shapes.of_run(
            config,
            meshes=Meshes(mesh, mesh, mesh),
            start=start_of(config, options, target=target),
        ),
        mesh=mesh,
        chip=target.chip,
        prompt=options.prompt_length,
        per_node=target.per_node,
    )


def start_of(config: Config, options: Options, *, target: Target) -> Pretrained:
    """Returns --model without parameters or tokenizer, with the chips' attention."""
    start, context = config.start, config.placement.policy.context
    shape = _shape(config)
    layout.refuse_context(start.attention, context=context, model=shape)
    layout.refuse_expert_axis(config.placement.policy.expert, model=shape)
    model = dataclasses.replace(
        shape,
        dtype=start.dtype,
        remat=start.remat,
        attention=start.attention,
    )
    backend = layout.backend_of(target.mesh.abstract_mesh)
    choice = layout.choose(
        model,
        columns=columns_of(config, options),
        backend=backend,
        context=context,
        tensor=config.placement.policy.tensor,
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
