"""The options of the study of the reference's storages."""

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
    """What all storages are measured on: a reference, a policy and its responses."""

    text: str
    """A .txt file; a share of it is held out, and the rest trains a model without
    --model."""
    model: str | None = None
    """A trained checkpoint, a folder or a hub id; None trains one on bytes."""
    hidden_size: int = 256
    """Width of the model that is trained."""
    num_layers: int = 6
    """Depth of the model that is trained."""
    num_heads: int = 4
    """Attention heads of the model that is trained."""
    num_steps: int = 500
    """Updates that train it."""
    learning_rate: float = 2e-3
    """Peak learning rate; it falls to 0 along a cosine."""
    nudge_steps: int = 20
    """Updates on other blocks that make the policy out of the reference."""
    nudge_learning_rate: float = 2e-4
    """Learning rate of these updates, constant."""
    batch_size: int = 16
    """Blocks of text per update."""
    max_length: int = 128
    """Tokens of a block, and of prompt and response together."""
    max_new_tokens: int = 64
    """Tokens of a response."""
    responses: int = 32
    """Responses in the batch that is scored."""
    temperature: float = 1.0
    """Temperature of sampling and of log-probs."""
    held_out: float = 0.05
    """Share of the blocks that measures log-probs; as many more make the policy."""

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
    """One storage, and where what it shares with the others is prepared."""

    storage: str
    """Storage of the reference that is measured: copy, bf16, fp16, int8, int8-bf16,
    host, host-int8, cpu, lora-base, none or precomputed."""
    prepared: Path | None = None
    """Folder of what runs of all storages share, made by the first of them; None is
    OUT/prepared."""
    repeats: int = 5
    """Times that a batch is scored; the median of the seconds counts."""
    topology: str | None = None
    """TPU whose compiler is asked too, for instance v5e:2x2 (extra plan); None is no
    TPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(repeats=self.repeats)
        if self.storage not in STORAGES:
            raise InputError(
                f"--storage: expected one of {', '.join(STORAGES)}, got "
                f"{self.storage}; choose one of them"
            )

    def preparation(self) -> Preparation:
        """The options of what is shared, with the folder of this seed as `out`."""
        shared = {field.name for field in dataclasses.fields(Preparation)}
        fields = {name: value for name, value in vars(self).items() if name in shared}
        at = self.out / "prepared" if self.prepared is None else self.prepared
        own = {"out": at / f"seed_{self.seed}", "resume": False, "resume_from": None}
        # The others that read it may want none of these.
        own |= {"profile": None, "tensorboard": False, "wandb": False, "trackio": False}
        return Preparation(**(fields | own))
