"""The config of every supervised command, of the groups of policy gradients.

start  data  reference  batch  method  optimizer  watch  placement
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, ClassVar

from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.devices.placement import WITH_POLICY, Place, PolicyPlacement
from rlhf_jax.functional import checks
from rlhf_jax.runs import alarms
from rlhf_jax.runs.alarms import Limits
from rlhf_jax.runs.run_config import RunConfig
from rlhf_jax.train.config import capabilities
from rlhf_jax.train.config.config import FLAT, AutoUpdate
from rlhf_jax.train.config.models import Stored
from rlhf_jax.train.config.optimizer import Optimizer
from rlhf_jax.train.config.watch import WatchTexts


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """The batch of an update."""

    batch_size: int = 16
    """Rows per update, of one or several texts."""

    def __post_init__(self) -> None:
        checks.rows(batch_size=self.batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How the rows of an update are cut."""

    micro_batch_size: int | None = None
    """Rows per forward and backward pass; None is all of an update."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What a supervised run looks at."""

    held_out: float = 0.1
    """Share of --data that is held out, by prompt; 0 holds out none. It is evaluated
    before and after the run."""
    held_out_every: int | None = None
    """Steps between further evaluations of what is held out; None has none."""
    alarms: Limits = alarms.LIMITS
    """Limits beyond which the run asks for a look."""

    def __post_init__(self) -> None:
        checks.positive(held_out_every=self.held_out_every)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchPolicy(WatchTexts, HeldOut):
    """What a run that trains a policy looks at."""

    def __post_init__(self) -> None:
        WatchTexts.__post_init__(self)
        HeldOut.__post_init__(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedConfig(RunConfig):
    """What every supervised command is asked; each adds its data and its method."""

    start: Annotated[Any, FLAT]
    """The model that is trained."""
    data: Annotated[Any, FLAT]
    """What is learned."""
    reference: Annotated[Stored, FLAT] = Stored()
    """The frozen models."""
    batch: Annotated[Rows, FLAT] = Rows()
    """The batch of an update."""
    method: Annotated[Any, FLAT]
    """Coefficients and choices of the method."""
    optimizer: Annotated[Optimizer, FLAT] = Optimizer()
    """How parameters follow their gradients."""
    watch: Annotated[HeldOut, FLAT] = HeldOut()
    """What is measured and not trained on."""
    placement: PolicyPlacement = PolicyPlacement()
    """Where each role is: devices, mesh and memory."""
    num_steps: int | None = None
    """Number of updates; None is one pass over the data."""
    auto: tuple[AutoUpdate, ...] | None = None
    """What an estimate from model, devices and the longest row (--max-length) chooses,
    and prints: mesh of the policy, remat and micro-batch; --auto alone chooses all of
    them. Options that are not at their default stay."""
    check_memory: bool = True
    """Whether a run that cannot fit is refused before weights are read."""

    name: ClassVar[str]
    """The command, as rlhf-jax has it; its stage with _ for -."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(num_steps=self.num_steps)
        stored = self.reference.reference_storage != frozen_models.COPY
        capabilities.need(
            {"--reference-storage": stored},
            "--lora or a reference",
            has=self.start.lora is not None or self.has_reference,
        )

    @property
    def compute_dtype(self) -> str:
        """What models compute in, --dtype."""
        return self.start.dtype

    @property
    def stage(self) -> str:
        """The name of the stage and its snapshots."""
        return self.name.replace("-", "_")

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference."""
        return False

    @property
    def reference_place(self) -> Place:
        """Where the reference is, and the base where that is the reference."""
        return WITH_POLICY

    @property
    def reference_is_base(self) -> bool:
        """Whether the base under adapters is the reference too."""
        return False
