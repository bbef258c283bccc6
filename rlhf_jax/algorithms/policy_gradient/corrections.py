"""What corrects for a sampler that is not the trainer: one choice, with its options.

Ratio       old_logprobs are the sampler's, and the ratio to them is the weight
Recompute   old_logprobs are the trainer's, and nothing is weighted
Truncate, Mask, Reject
            old_logprobs are the trainer's, and tokens have the importance weights
            of `functional.off_policy.importance`
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from rlhf_jax.functional import checks

if TYPE_CHECKING:
    from rlhf_jax.functional.off_policy.importance import Correction

TokenLevel = Literal["token", "sequence"]
ResponseLevel = Literal["sequence", "geometric"]


@dataclasses.dataclass(frozen=True)
class Ratio:
    """The ratio of the loss is to the sampler's log-probs, and the clip bounds it."""

    recomputes: ClassVar[bool] = False


@dataclasses.dataclass(frozen=True)
class Recompute:
    """The trainer computes old_logprobs again, for training in bfloat16."""

    recomputes: ClassVar[bool] = True


@dataclasses.dataclass(frozen=True)
class Truncate:
    """Weights are bounded from above."""

    cap: float = 2.0
    """Largest weight, dimensionless."""
    level: TokenLevel = "token"
    """Whose ratio is the weight: that of a token, or of its response."""

    recomputes: ClassVar[bool] = True
    floor: ClassVar[None] = None

    def __post_init__(self) -> None:
        checks.one_of(level=self.level, among=get_args(TokenLevel))
        _check_bounds(self.correction, cap=self.cap)

    @property
    def correction(self) -> Correction:
        """Its formula."""
        return "token_truncate" if self.level == "token" else "sequence_truncate"


@dataclasses.dataclass(frozen=True)
class Mask:
    """Weights are 0 where the ratio is beyond its bounds."""

    cap: float
    """Upper bound of the ratio."""
    floor: float | None = None
    """Lower bound of the ratio; None is none."""
    level: TokenLevel = "token"
    """Whose ratio is the weight: that of a token, or of its response."""

    recomputes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.one_of(level=self.level, among=get_args(TokenLevel))
        _check_bounds(self.correction, cap=self.cap, floor=self.floor)

    @property
    def correction(self) -> Correction:
        """Its formula."""
        return "token_mask" if self.level == "token" else "sequence_mask"


@dataclasses.dataclass(frozen=True)
class Reject:
    """Responses whose ratio is beyond its bounds are left out; others have weight 1."""

    cap: float
    """Upper bound of the ratio."""
    floor: float | None = None
    """Lower bound of the ratio; None is none."""
    level: ResponseLevel = "sequence"
    """Which ratio: that of the response, or its geometric mean over tokens."""

    recomputes: ClassVar[bool] = True

    def __post_init__(self) -> None:
        checks.one_of(level=self.level, among=get_args(ResponseLevel))
        _check_bounds(self.correction, cap=self.cap, floor=self.floor)

    @property
    def correction(self) -> Correction:
        """Its formula."""
        return "sequence_reject" if self.level == "sequence" else "geometric_reject"


def _check_bounds(
    correction: Correction, *, cap: float, floor: float | None = None
) -> None:
    # Imported here, as most samplers are the trainer and have no weights.
    from rlhf_jax.functional.off_policy import importance

    importance.check_bounds(correction, cap=cap, floor=floor)


Weighted = Truncate | Mask | Reject
SamplerCorrection = Ratio | Recompute | Truncate | Mask | Reject
