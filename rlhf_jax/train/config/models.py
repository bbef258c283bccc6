"""`start`, `reference` and `kl`: the trained model, frozen models, KL coefficient.

The options say how each model is read, stored, run and written.
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
    """Tokenizer, a folder or hub id; None takes that of --model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of activations; trained parameters stay float32."""
    remat: Remat = "none"
    """Activations of a layer that the backward pass rematerialises to save memory."""
    attention: Attention = "auto"
    """Implementation of attention over whole sequences. auto takes the backend's flash
    attention for long rows; the choice is printed at the start."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trained(Compute):
    """How a model is trained and written."""

    lora: Adapters = None
    """Rank of LoRA adapters over a frozen base, as 16 or
    16,alpha=32,modules=attention/*+mlp/*. None trains every parameter."""
    save_dtype: SaveDtype | None = None
    """Dtype of OUT/model and OUT/adapter; None takes that of most weights of --model,
    or float32 for a fresh model. Weights are trained in float32: saving rounds them by
    up to 1/256 (bfloat16) or 1/2048 (float16) of their value."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start(Trained):
    """The model that is trained."""

    model: str
    """Model to train, a checkpoint folder or hub id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stored:
    """How the reference is stored."""

    reference_storage: Storage = frozen_models.COPY
    """Dtype in which the reference, or the base under LoRA, is stored."""

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint of the reference; None for the start, or no reference."""
        return None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneReference(Stored):
    """The reference."""

    reference: str = START
    """Reference of the KL: start (--model before any update), a checkpoint of any
    shape, or none. With none no reference is loaded or run."""

    @property
    def has_reference(self) -> bool:
        """Whether the run has a reference."""
        return self.reference != NONE

    @property
    def checkpoint(self) -> str | None:
        """The checkpoint of the reference; None for --reference start or none."""
        return None if self.reference in (START, NONE) else self.reference


@dataclasses.dataclass(frozen=True)
class FurtherReference:
    """A reference in addition to --reference: a checkpoint and the weight of its KL.

    --references code=runs/code/model,weight=0.5 chat=runs/chat/model,dtype=int8
    """

    name: str
    """Name in objective/kl_NAME."""
    path: str
    """Checkpoint folder or hub id."""
    weight: float = 1.0
    """Its KL coefficient in multiples of --kl-coef; at 0 its KL is only measured."""
    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    embeddings: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtypes in which it is stored, as fields of `Storage`."""
    place: Place = WITH_POLICY
    """Its place, in the forms of --placement.reference."""

    def __post_init__(self) -> None:
        frozen.check_further(self.name, weight=self.weight)
        refuse_auto(self.place, option=f"place= of --references {self.name}")
        _ = self.storage  # or raises

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a text such as "code=runs/code/model,weight=0.5".

        Raises:
          InputError: the text has another form, or a value is invalid.
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
        """Both dtypes, as a `Storage`."""
        return Storage(self.dtype, self.embeddings)

    @property
    def option(self) -> str:
        """The option that chose it, for messages."""
        return f"--references {self.name}"


Further = tuple[FurtherReference, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reference(OneReference):
    """The reference, its lifecycle, and further references."""

    lifecycle: Annotated[Lifecycle, tyro.conf.arg(name="lifecycle")] = lifecycle.FROZEN
    """How the reference moves during the run."""
    references: Further = ()
    """Further references, each NAME=CHECKPOINT,weight=W. The KL to each is penalised
    with W times --kl-coef and logged as objective/kl_NAME. Other options are dtype=,
    embeddings= and place=."""

    def __post_init__(self) -> None:
        refuse_twice("--references", [ref.name for ref in self.references])


@dataclasses.dataclass(frozen=True, kw_only=True)
class KL:
    """The KL coefficient β and its control; options of the penalty are the method's."""

    kl_coef: float | None = None
    """KL coefficient β, reward units per nat. None is 0.05 with a reference (0.1 in
    online-dpo, 1 in distill), and 0 without one or with --penalty.placement None. At 0
    the KL is still measured."""
    kl_control: Control = Fixed()
    """How β changes during the run: fixed; linear,end=E; or adaptive, pi and
    lagrangian, which steer the KL to target=T nats per unit=response|token."""

    def __post_init__(self) -> None:
        checks.non_negative(kl_coef=self.kl_coef)
