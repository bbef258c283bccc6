"""Options of the study of the reference's storages."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.storage import WAYS
from rlhf_jax.runs.run_config import RunConfig

STORAGES = (*WAYS, "cpu", "lora-base", "none", "precomputed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preparation(RunConfig):
    """Options of the reference, the policy and the responses that storages share."""

    text: str
    """Path of a .txt file; a share of it is held out, and without --model the rest
    trains a model."""
    model: str | None = None
    """A trained checkpoint, a folder or a hub id; None trains one on bytes."""
    hidden_size: int = 256
    """Width of the trained model."""
    num_layers: int = 6
    """Depth of the trained model."""
    num_heads: int = 4
    """Attention heads of the trained model."""
    num_steps: int = 500
    """Updates of the trained model."""
    learning_rate: float = 2e-3
    """Peak learning rate; it falls to 0 along a cosine."""
    nudge_steps: int = 20
    """Updates on other blocks that turn the reference into the policy."""
    nudge_learning_rate: float = 2e-4
    """Constant learning rate of the --nudge-steps."""
    batch_size: int = 16
    """Blocks of text per update."""
    max_length: int = 128
    """Tokens of a block, and of a prompt with its response."""
    max_new_tokens: int = 64
    """Tokens of a response."""
    responses: int = 32
    """Responses in the batch that is scored."""
    temperature: float = 1.0
    """Temperature of sampling and of log-probs."""
    held_out: float = 0.05
    """Share of the blocks on which log-probs are measured; equally many train the
    policy."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            num_steps=self.num_steps,
            nudge_steps=self.nudge_steps,
            learning_rate=self.learning_rate,
            nudge_learning_rate=self.nudge_learning_rate,
            max_new_tokens=self.max_new_tokens,
            responses=self.responses,
            temperature=self.temperature,
            held_out=self.held_out,
        )
        if self.max_new_tokens >= self.max_length:
            raise InputError(
                f"max_new_tokens: expected less than max_length, {self.max_length}, "
                f"so that there is a prompt, got {self.max_new_tokens}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(Preparation):
    """Options of the measurement of one storage."""

    storage: str
    """Storage of the reference to measure: copy, bf16, fp16, int8, int8-bf16, host,
    host-int8, cpu, lora-base, none or precomputed."""
    prepared: Path | None = None
    """Folder that the runs of all storages share, prepared by the first run; None is
    OUT/prepared."""
    repeats: int = 5
    """Number of times that a batch is scored, for the median of the seconds."""
    topology: str | None = None
    """TPU for whose compiler the program is compiled too, for instance v5e:2x2 (extra
    plan); None skips it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(repeats=self.repeats)
        if self.storage not in STORAGES:
            raise InputError(
                f"--storage: expected one of {', '.join(STORAGES)}, got "
                f"{self.storage}; choose one of them"
            )

    def preparation(self) -> Preparation:
        """The options of the shared preparation, with the folder of this seed."""
        shared = {field.name for field in dataclasses.fields(Preparation)}
        fields = {name: value for name, value in vars(self).items() if name in shared}
        at = self.out / "prepared" if self.prepared is None else self.prepared
        own = {"out": at / f"seed_{self.seed}", "resume": False, "resume_from": None}
        # Options of this run alone, not of the shared preparation.
        own |= {"profile": None, "tensorboard": False, "wandb": False, "trackio": False}
        return Preparation(**(fields | own))
