"""The options of `rlhf-jax dpo`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro

from rlhf_jax.algorithms.dpo.update import DPORecipe
from rlhf_jax.checkpoints import frozen_models, pretrained
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.checkpoints.pretrained import Adapters
from rlhf_jax.data.files import Blank
from rlhf_jax.devices import sharding
from rlhf_jax.devices.sharding import MeshOption
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import Attention, Remat
from rlhf_jax.runs.run_config import RunConfig

RECIPE = DPORecipe()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The options of `rlhf-jax dpo`."""

    model: str
    """Policy to start from, a checkpoint folder or hub id."""
    data: str
    """Preference pairs: JSONL, or hf:NAME:SPLIT."""
    reference: str | None = None
    """Checkpoint folder or hub id; None is --model, as it starts."""
    tokenizer: str | None = None
    """Folder or hub id; None takes the one in --model."""
    dpo: Annotated[DPORecipe, tyro.conf.arg(name="")] = RECIPE
    """The coefficients and choices of DPO, options without a prefix."""
    max_length: int | None = None
    """Tokens of the longest prompt and answer; None is the context."""
    overlong: Literal["error", "drop"] = "error"
    """What becomes of longer pairs."""
    blank: Blank = "error"
    """What becomes of pairs with an answer of nothing but white space."""
    row_width: int | None = None
    """Tokens of a row, into which pairs are packed with both of their texts; None is a
    row for each pair."""
    held_out: float = 0.1
    """Share of the pairs that measures the loss and is not trained on."""
    num_steps: int | None = None
    """Updates; None is one pass over the pairs."""
    batch_size: int = 16
    """Rows an update."""
    learning_rate: float = 1e-6
    """Peak, after the warm-up; falls to 0 along a cosine. 1e-4 with LoRA."""
    warmup: float = 0.1
    """Share of the updates over which the learning rate rises from 0."""
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it."""
    precompute: bool = False
    """Take the reference's log-probs once, before the first update."""
    reference_storage: Storage = frozen_models.COPY
    """How the reference is held; with LoRA it is the base."""
    lora: Adapters = pretrained.ALL_PARAMETERS
    """Adapters instead of all parameters."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations; trained parameters stay float32."""
    remat: Remat = "none"
    """What of a layer a gradient computes again, to save memory."""
    attention: Attention = "xla"
    """Of whole sequences; cudnn is flash attention, on a GPU in bfloat16."""
    mesh: MeshOption = sharding.ONE_DEVICE
    """How several devices share rows and parameters."""

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
        if adapters and self.reference_storage.apart:
            raise InputError(
                "--reference-storage: expected it where the policy lies with "
                "--lora.rank, got memory cpu, a mesh or own_devices; the reference is "
                "the policy's base then, which runs with it"
            )
        stored = self.reference_storage != frozen_models.COPY and not adapters
        for option, given in {
            "--reference": self.reference is not None,
            "--precompute": self.precompute,
            "--reference-storage": stored,
        }.items():
            if given and self.dpo.reference_free:
                raise InputError(
                    f"{option}: expected none with --reference-free, where there is no "
                    f"reference; leave one of them out"
                )
