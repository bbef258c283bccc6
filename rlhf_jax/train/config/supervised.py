"""The config of every supervised command, from the groups of policy gradients.

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
    """Rows per update; a packed row holds several texts."""

    def __post_init__(self) -> None:
        checks.rows(batch_size=self.batch_size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MicroBatches:
    """How the rows of an update are split."""

    micro_batch_size: int | None = None
    """Rows per forward and backward pass; None takes all rows of an update at once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The held-out data and the alarms of a supervised run."""

    held_out: float = 0.1
    """Share of --data that is held out, by prompt; 0 holds out none. It is evaluated
    before and after the run."""
    held_out_every: int | None = None
    """Steps between further evaluations on the held-out data; None has none."""
    alarms: Limits = alarms.LIMITS
    """Limits beyond which the run raises an alarm."""

    def __post_init__(self) -> None:
        checks.positive(held_out_every=self.held_out_every)
        checks.within(
            least=0,
            below=1,
            advice="choose a share of the rows, such as 0.1",
            held_out=self.held_out,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchPolicy(WatchTexts, HeldOut):
    """Texts, held-out data and alarms of a supervised run that trains a policy."""

    def __post_init__(self) -> None:
        WatchTexts.__post_init__(self)
        HeldOut.__post_init__(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SupervisedConfig(RunConfig):
    """The options of every supervised command; each adds its data and its method."""

    start: Annotated[Any, FLAT]
    """The model that is trained."""
    data: Annotated[Any, FLAT]
    """The training data."""
    reference: Annotated[Stored, FLAT] = Stored()
    """The frozen models."""
    batch: Annotated[Rows, FLAT] = Rows()
    """The batch of an update."""
    method: Annotated[Any, FLAT]
    """Coefficients and choices of the method."""
    optimizer: Annotated[Optimizer, FLAT] = Optimizer()
    """How parameters are updated from their gradients."""
    watch: Annotated[HeldOut, FLAT] = HeldOut()
    """What is measured but not trained on."""
    placement: PolicyPlacement = PolicyPlacement()
    """Devices, mesh and memory of each role."""
    num_steps: int | None = None
    """Number of updates; None is one pass over the data."""
    auto: tuple[AutoUpdate, ...] | None = None
    """Options to choose by an estimate from model, devices and the longest row
    (--max-length): mesh of the policy, remat and micro-batch. --auto alone chooses all
    of them. Options that are not at their default are kept; None chooses none."""
    check_memory: bool = True
    """Whether a run that cannot fit into memory is refused before weights are read."""

    name: ClassVar[str]
    """The name of the command."""

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
        """Dtype of activations, --dtype."""
        return self.start.dtype

    @property
    def stage(self) -> str:
        """The name of the stage and its snapshots: the command with _ for -."""
        return self.name.replace("-", "_")

    @property
    def has_reference(self) -> bool:
        """Whether the run has a reference."""
        return False

    @property
    def reference_place(self) -> Place:
        """The place of the reference, and of a base that is the reference too."""
        return WITH_POLICY

    @property
    def reference_is_base(self) -> bool:
        """Whether a reference would be the base under adapters."""
        return self.start.lora is not None and self.reference.checkpoint is None
