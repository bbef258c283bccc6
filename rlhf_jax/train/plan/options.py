"""What is asked of a plan beside the run's own options."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The chips that a run is to use, and the lengths of its texts."""

    topology: str | None = None
    """Chips to compile for, as v5e:2x2, or h100:8x8 for nodes x GPUs; None is this
    machine's device."""
    chip: str | None = None
    """The chip of a topology that names none, as h100 with --topology 8x8; without a
    topology, the one that this machine's compiler stands in for."""
    prompt_length: int = 64
    """Columns of prompts, tokens."""
    lengths: Path | None = None
    """File of response lengths, an integer or an object with "length" per line; None
    is responses of all columns."""
    find_batch: bool = False
    """Also look for the largest batch that fits, with some more compiles."""
    find_sampler_mesh: bool = False
    """Compare the meshes that the chips allow for sampling, and plan with the fastest
    that fits; some more compiles."""
    json: Path | None = None
    """Where to write the plan."""

    def __post_init__(self) -> None:
        checks.positive(prompt_length=self.prompt_length)
        if ":" in (self.topology or "") and self.chip is not None:
            raise InputError(
                f"expected --topology or --chip, got {self.topology} and {self.chip}; "
                f"a topology names its chip"
            )

    @property
    def slice(self) -> str | None:
        """The topology with its chip, as h100:8x8."""
        if self.topology is None or self.chip is None:
            return self.topology
        return f"{self.chip}:{self.topology}"
