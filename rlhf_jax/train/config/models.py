"""`start`, `reference` and `kl`: the trained model, and the frozen ones beside it.

How each is read, stored, run and written; how references live; the KL coefficient.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal, Self

import tyro

from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.checkpoints.hf import SaveDtype
from rlhf_jax.devices.placement import WITH_POLICY, Place, refuse_auto
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.control import Control, Fixed
from rlhf_jax.models.config import Attention, Remat
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles.reference import frozen, lifecycle
from rlhf_jax.roles.reference.lifecycle import Lifecycle
from rlhf_jax.runs import choices
from rlhf_jax.train.config.watch import refuse_twice

Adapters = LoRA | None
START, NONE = "start", "none"
FORM = "NAME=CHECKPOINT[,weight=W][,dtype=D][,embeddings=D][,place=P]"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compute:
    """How a model is read and run."""

    tokenizer: str | None = None
    """Tokenizer, a folder or hub id; None takes the one in --model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations; trained parameters stay float32."""
    remat: Remat = "none"
    """Activations of a layer that the backward pass rematerialises, to save memory."""
    attention: Attention = "auto"
    """Implementation of attention over whole sequences; auto takes the flash attention
    of the backend for long rows, and prints it at the start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained(Compute):
    """How a model is trained and written."""

    lora: Adapters = None
    """Rank of LoRA adapters over a frozen base, as 16 or
    16,alpha=32,modules=attention/*+mlp/*. None trains every parameter."""
    save_dtype: SaveDtype | None = None
    """Dtype of OUT/model and OUT/adapter; None is that of most weights of --model, and
    float32 for a fresh model. Weights are trained in float32: 16 bits lose what is
    smaller than a 256th (bfloat16) or a 2048th (float16) of a weight."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start(Trained):
    """The model that is trained."""

    model: str
    """Model to start from, a checkpoint folder or hub id."""


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


@dataclasses.dataclass(frozen=True)
class FurtherReference:
    """One reference beside the first: a checkpoint, and the weight of its KL.

    --references code=runs/code/model,weight=0.5 chat=runs/chat/model,dtype=int8
    """

    name: str
    """Name in objective/kl_NAME."""
    path: str
    """Checkpoint folder or hub id."""
    weight: float = 1.0
    """Its KL coefficient over that of the first; at 0 its KL is only measured."""
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    embeddings: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtypes in which it is stored, as `Storage` has them."""
    place: Place = WITH_POLICY
    """Where it is, in the forms of --placement.reference."""

    def __post_init__(self) -> None:
        frozen.check_further(self.name, weight=self.weight)
        refuse_auto(self.place, option=f"place= of --references {self.name}")
        _ = self.storage  # or raises

    @classmethod
    def parse(cls, text: str) -> Self:
        """The reference of a text such as "code=runs/code/model,weight=0.5".

        Raises:
          InputError: the text has another form, or a value cannot be had.
        """
        name, _, rest = text.strip().partition("=")
        options = [field.name for field in dataclasses.fields(cls)[2:]]
        path, *words = choices.split(rest, options)
        if not name or not path:
            raise InputError(f"--references: expected {FORM}, got {text!r}")
        words = [f"name={name}", f"path={path}", *words]
        values = choices.fields(words, cls, written=text)
        return choices.build(cls, values, written=text)

    def __str__(self) -> str:
        words = [
            f"{field.name}={value}"
            for field in dataclasses.fields(self)[2:]
            if (value := getattr(self, field.name)) != field.default
            or field.name == "weight"
        ]
        return ",".join([f"{self.name}={self.path}", *words])

    @property
    def storage(self) -> Storage:
        """How it is stored."""
        return Storage(self.dtype, self.embeddings)

    @property
    def option(self) -> str:
        """It on the command line, for messages."""
        return f"--references {self.name}"


Further = tuple[FurtherReference, ...]


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
        refuse_twice("--references", [ref.name for ref in self.references])


@dataclasses.dataclass(frozen=True, kw_only=True)
class KL:
    """The KL coefficient β and its control; the penalty itself is in the method."""

    kl_coef: float | None = None
    """KL coefficient β, reward units per nat. At 0 the KL is still measured. None is
    0.05 with a reference (0.1 in online-dpo, 1 in distill), and 0 without."""
    kl_control: Control = Fixed()
    """How β changes during the run: fixed; linear,end=E; or adaptive, pi and
    lagrangian, which keep the KL at target=T nats per unit=response|token."""

    def __post_init__(self) -> None:
        checks.non_negative(kl_coef=self.kl_coef)
