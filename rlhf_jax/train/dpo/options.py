"""The options of `rlhf-jax dpo`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import tyro

from rlhf_jax.algorithms import dpo
from rlhf_jax.algorithms.dpo import DPORecipe
from rlhf_jax.checkpoints import frozen_models, pretrained
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.checkpoints.pretrained import Adapters
from rlhf_jax.data.files import Blank
from rlhf_jax.devices.placement import WITH_POLICY, ReferencePlacement
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train.start import TrainerConfig

RECIPE = DPORecipe()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TrainerConfig):
    """The options of `rlhf-jax dpo`."""

    model: str
    """Policy to start from, a checkpoint folder or hub id."""
    data: str
    """Preference pairs, or with --kind kto responses with a label: JSONL, or
    hf:NAME:SPLIT."""
    reference: str | None = None
    """Reference, a checkpoint of any shape; None is --model as it starts."""
    dpo: Annotated[DPORecipe, tyro.conf.arg(name="")] = RECIPE
    """Coefficients and choices of DPO, options without a prefix."""
    max_length: int | None = None
    """Longest prompt with its response, tokens; None is the model's context."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of longer pairs: an error, or drop them."""
    blank: Blank = "error"
    """Treatment of pairs in which a response is nothing but white space: an error, or
    drop them."""
    row_width: int | None = None
    """Width of a row into which pairs are packed with both of their texts, tokens; None
    is one row per pair."""
    held_out: float = 0.1
    """Share of the pairs that is held out, by prompt, to measure the loss; 0 holds
    out none."""
    num_steps: int | None = None
    """Number of updates; None is one pass over the pairs."""
    batch_size: int = 16
    """Rows per update."""
    learning_rate: float = 1e-6
    """Peak learning rate, after the warm-up; it falls to 0 along a cosine. Use 1e-4
    with LoRA."""
    warmup: float = 0.1
    """Share of the updates over which the learning rate rises from 0."""
    max_grad_norm: float = 1.0
    """Norm to which larger gradients are scaled down."""
    precompute: bool = False
    """Whether the reference log-probs are computed once, before the first update."""
    reference_storage: Storage = frozen_models.COPY
    """Dtype in which the reference is stored; with LoRA it is the base."""
    lora: Adapters = pretrained.ALL_PARAMETERS
    """Adapters that are trained instead of all parameters."""
    placement: ReferencePlacement = dataclasses.field(
        default_factory=ReferencePlacement
    )
    """Where each role is: devices, mesh and memory."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = {"num_steps": self.num_steps, "row_width": self.row_width}
        checks.rows(batch_size=self.batch_size)
        checks.positive(
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
            **{name: count for name, count in counts.items() if count is not None},
        )
        if not 0 <= self.warmup < 1:
            raise InputError(f"warmup: expected a share in [0, 1), got {self.warmup}")
        adapters = self.lora.lora is not None
        place = self.placement.reference
        if adapters and place.apart:
            raise InputError(
                f"--placement.reference: expected policy with --lora.rank, where the "
                f"reference is the policy's base and runs with it, got {place}; leave "
                f"one of them out"
            )
        stored = self.reference_storage != frozen_models.COPY and not adapters
        placed = place != WITH_POLICY and not adapters
        for option, asked in {
            "--reference": self.reference is not None,
            "--precompute": self.precompute,
            "--reference-storage": stored,
            "--placement.reference": placed,
        }.items():
            if asked and not self.dpo.has_reference:
                free = f"--kind {self.dpo.kind}"
                free = "--reference-free" if self.dpo.reference_free else free
                raise InputError(
                    f"{option}: expected none with {free}, where there is no "
                    f"reference; leave one of them out"
                )


SCREEN = {
    "Start": ("model", "reference"),
    "Data": ("data", "row_width", "held_out"),
    "Training": (
        *("dpo.kind", "dpo.beta", "num_steps", "batch_size", "learning_rate"),
        *("precompute", "dpo.micro_batch_size", "lora.rank", "dtype"),
    ),
    "Run": ("out", "resume"),
}
"""The options of --help."""

PRESETS: dict[str, dict[str, Any]] = {
    "simpo": {"dpo": dpo.SIMPO, "batch_size": 128, "learning_rate": 6e-7},
    "orpo": {"dpo": dpo.ORPO, "batch_size": 32, "learning_rate": 5e-6},
}
"""--preset NAME: what was published, where it differs from the defaults."""
