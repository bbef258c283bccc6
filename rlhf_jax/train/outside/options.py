"""The options of `--sampler`: our decoder here, in a process, or a server."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.devices.placement import SamplerPlacement
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.samplers import connection
from rlhf_jax.train.sampling.options import OF_DECODER, SamplerConfig

TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class OutsideConfig(SamplerConfig):
    """Options of who samples."""

    sampler: str = "here"
    """What samples: here is our decoder on the trainer's devices; process is our
    decoder in a process of its own; http://HOST:PORT is a server with the completions
    of OpenAI, as vLLM."""
    sampler_model: str | None = None
    """With a server: name of the model there; None is the only one that it has."""
    sampler_weights: Path | None = None
    """With a process or a server: folder that weights are handed over in, which a
    server must be able to read; None is the system's temporary folder."""
    sampler_timeout: float = TIMEOUT
    """With a process or a server: seconds for a hand-over, or a response."""
    sampler_check_tolerance: float | None = None
    """With a server: largest distance of its log-probs to the trainer's after each
    hand-over, mean of a response, nats per token; None is that of --dtype."""

    @property
    def samples_outside(self) -> bool:
        """Whether a process or a server samples."""
        return self.sampler != "here"

    @property
    def sampler_tolerance(self) -> float:
        """What sampling adds to the distance to the trainer, nats per token."""
        further = 0.0
        if self.sampler_check_tolerance is not None:
            own = self_check.TOLERANCE[self.dtype]
            further = max(0.0, self.sampler_check_tolerance - own)
        return super().sampler_tolerance + further

    @property
    def served(self) -> bool:
        """Whether a server samples."""
        return self.sampler.startswith(("http://", "https://"))

    def check_outside(
        self,
        recipe: PolicyRecipe,
        *,
        placement: SamplerPlacement,
        environment: str | None,
    ) -> None:
        """Raises InputError for options that do not belong together."""
        address = self.served and connection.is_address(self.sampler)
        if not (address or self.sampler in ("here", "process")):
            raise InputError(
                f"--sampler: expected here, process or http://HOST:PORT, got "
                f"{self.sampler!r}; choose one"
            )
        checks.positive(sampler_timeout=self.sampler_timeout)
        if self.sampler_check_tolerance is not None:
            checks.positive(sampler_check_tolerance=self.sampler_check_tolerance)
        unread = ["sampler_model", "sampler_check_tolerance"] * (not self.served)
        unread += ["sampler_weights", "sampler_timeout"] * (not self.samples_outside)
        needed = "a server" if self.samples_outside else "process or a server"
        for flag in self.changed(*unread):
            raise InputError(
                f"{flag}: expected --sampler with {needed}, got --sampler "
                f"{self.sampler}, which does not read it; leave it out"
            )
        if not self.samples_outside:
            return
        self._refuse(self.changed(*OF_DECODER))
        self._refuse(
            {
                "--environment": environment,
                "--placement.sampler": placement.sampler.apart or None,
                "--continuous-batching": recipe.continuous_batching
                if self.served
                else None,
                "--fixed-length": (recipe.fixed_length or None)
                if self.served
                else None,
            }
        )
        corrects = recipe.sampler_weight_cap is not None
        if self.served and recipe.recompute_logprobs and not corrects:
            raise InputError(
                "--recompute-logprobs: expected --sampler-weight-cap with it where a "
                "server samples, else nothing corrects for the distance of its "
                "log-probs; give the cap (2 is usual), or leave it out"
            )

    def _refuse(self, others: dict[str, Any]) -> None:
        for flag, value in others.items():
            if value is not None:
                raise InputError(
                    f"{flag}: expected none with --sampler {self.sampler}, which does "
                    f"not read it, got {value}; leave one of them out"
                )


def refuse_devices(sampler: str, *, devices: int) -> None:
    """Raises InputError where several devices or processes train.

    Args:
      sampler: of --sampler.
      devices: of the policy's mesh.
    """
    got = f"a mesh of {devices} devices"
    if jax.process_count() > 1:
        got = f"{jax.process_count()} processes"
    elif devices == 1:
        return
    raise InputError(
        f"--sampler {sampler}: expected a trainer of one process and one device, got "
        f"{got}; leave out --coordinator and --placement.policy, or --sampler"
    )
