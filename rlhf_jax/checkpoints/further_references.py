"""References beside the first, each an option: which checkpoint, at which weight.

    --references code=runs/code/model,weight=0.5 chat=runs/chat/model,dtype=int8

Its KL coefficient is `weight` times that of --reference. Storage and place are those
of any frozen model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, Self

from jax.sharding import Mesh

from rlhf_jax.checkpoints import frozen_models, hf
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices.placement import WITH_POLICY, Place, refuse_auto
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import choices

FORM = "NAME=CHECKPOINT[,weight=W][,dtype=D][,embeddings=D][,place=P]"


@dataclasses.dataclass(frozen=True)
class FurtherReference:
    """One reference beside the first."""

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


def load(
    references: Sequence[FurtherReference],
    *,
    policy: Pretrained,
    mesh: Mesh | None = None,
    sharding: Any = None,
    load: frozen_models.Load = hf.load,
) -> dict[str, Frozen]:
    """Reads, checks and freezes them, by name; the arguments are `load_reference`'s.

    Raises:
      InputError: a checkpoint cannot be read, or reads other tokens than the policy.
    """
    return {
        reference.name: frozen_models.load_reference(
            reference.path,
            policy=policy,
            storage=reference.storage,
            place=reference.place,
            mesh=mesh,
            sharding=sharding,
            load=load,
            option=reference.option,
        )
        for reference in references
    }
