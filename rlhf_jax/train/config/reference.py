"""`reference`: the frozen models that the KL is measured to, and how they live."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.checkpoints.further_references import FurtherReference
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference import lifecycle
from rlhf_jax.roles.reference.lifecycle import Lifecycle

START, NONE = "start", "none"
Further = tuple[FurtherReference, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """How a frozen model beside the trained one is stored."""

    reference_storage: Storage = frozen_models.COPY
    """Dtype in which the reference is stored; with LoRA it is the base."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneReference(Stored):
    """The reference."""

    reference: str = START
    """Reference of the KL: start (--model before any update), none, or a checkpoint of
    any shape. With none no reference is loaded or run."""

    @property
    def has_reference(self) -> bool:
        """Whether there is a reference at all."""
        return self.reference != NONE

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint of the reference; None of one that is the start, or none."""
        return None if self.reference in (START, NONE) else self.reference


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference(OneReference):
    """The reference, and further ones."""

    lifecycle: Annotated[Lifecycle, tyro.conf.arg(name="lifecycle")] = lifecycle.FROZEN
    """How the reference moves during the run."""
    references: Further = ()
    """Further references, each NAME=CHECKPOINT,weight=W: a KL to it is penalised with W
    times --kl-coef and logged as objective/kl_NAME; dtype=, embeddings= and place=
    may follow."""

    def __post_init__(self) -> None:
        names = [reference.name for reference in self.references]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(
                f"--references: expected each name once, got {', '.join(twice)} twice; "
                f"rename one"
            )
