"""References beside the first, each an option: which checkpoint, at which weight.

    --references code=runs/code/model,weight=0.5 chat=runs/chat/model,dtype=int8

Its KL coefficient is `weight` times that of --reference. Storage and place are those
of any frozen model.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any, Self

from jax.sharding import Mesh

from rlhf_jax.checkpoints import frozen_models, hf
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.devices.placement import WITH_POLICY, Place
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference import further
from rlhf_jax.roles.reference.frozen import Frozen

FORM = "NAME=CHECKPOINT[,weight=W][,dtype=D][,embeddings=D][,place=P]"
KEYS = ("weight", "dtype", "embeddings", "place")


@dataclasses.dataclass(frozen=True)
class FurtherReference:
    """One reference beside the first."""

    name: str
    """Name in objective/kl_NAME."""
    path: str
    """Checkpoint folder or hub id."""
    weight: float = 1.0
    """Its KL coefficient over that of the first; at 0 its KL is only measured."""
    storage: Storage = frozen_models.COPY
    """Dtype in which it is stored."""
    place: Place = WITH_POLICY
    """Where it is, in the forms of --placement.reference."""

    def __post_init__(self) -> None:
        further.check(self.name, weight=self.weight)

    @classmethod
    def parse(cls, text: str) -> Self:
        """The reference of a text such as "code=runs/code/model,weight=0.5".

        Raises:
          InputError: the text has another form, or a value cannot be had.
        """
        # A mesh has commas and equals signs of its own.
        first, *rest = re.split(rf",(?=(?:{'|'.join(KEYS)})=)", text.strip())
        name, _, path = first.partition("=")
        fields = dict(field.split("=", 1) for field in rest)
        if not name or not path or len(fields) != len(rest):
            raise InputError(f"--references: expected {FORM}, got {text!r}")
        unknown = re.search(r",(\w+)=", path)
        if unknown:
            raise InputError(
                f"--references {name}: expected {', '.join(KEYS)} after the "
                f"checkpoint, got {unknown[1]}"
            )
        kinds: dict[str, Any] = {
            key: fields[key] for key in ("dtype", "embeddings") if key in fields
        }
        try:
            return cls(
                name,
                path,
                _number(fields.get("weight", "1")),
                Storage(**kinds),
                Place.parse(fields["place"]) if "place" in fields else WITH_POLICY,
            )
        except InputError as error:
            raise InputError(f"--references {name}: {error}") from None

    def __str__(self) -> str:
        words = [f"{self.name}={self.path}", f"weight={self.weight}"]
        if self.storage.dtype != "float32":
            words.append(f"dtype={self.storage.dtype}")
        if self.storage.embeddings is not None:
            words.append(f"embeddings={self.storage.embeddings}")
        if self.place != WITH_POLICY:
            words.append(f"place={self.place}")
        return ",".join(words)

    @property
    def option(self) -> str:
        """It on the command line, for messages."""
        return f"--references {self.name}"


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError(f"expected a number as its weight, got {text!r}") from None


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
        )
        for reference in references
    }
