"""`sampler`: what draws responses, in which dtype, and how old its policy may be."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal, TypeVar

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.policy_gradient.corrections import Truncate
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.extensions import entry_points
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import PAGE_SIZE, Cache, ModelConfig
from rlhf_jax.samplers import TIMEOUT, TRIES

Recipe = TypeVar("Recipe", bound=PolicyRecipe)


@dataclasses.dataclass(frozen=True)
class Here:
    """The library's decoder, on the trainer's devices or on --placement.sampler."""

    dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    embeddings: Literal["float32", "bfloat16"] | None = None
    cache: Cache = "same"
    cache_pages: int | None = None
    page_size: int = PAGE_SIZE
    prefill_chunk: int | None = None

    def __post_init__(self) -> None:
        checks.positive(page_size=self.page_size, cache_pages=self.cache_pages)
        checks.positive(prefill_chunk=self.prefill_chunk)
        Storage(self.dtype, self.embeddings)  # or raises

    def sampled(self, model: ModelConfig) -> ModelConfig:
        """Returns the model with the KV cache that sampling uses."""
        return dataclasses.replace(
            model,
            cache=self.cache,
            cache_pages=self.cache_pages,
            page_size=self.page_size,
            prefill_chunk=self.prefill_chunk,
        )

    def tolerance(self, compute: str) -> float:
        """Tolerance added for rounded weights and cache, nats per token."""
        tolerance = 0.0
        if self.dtype == "int8" or (self.dtype, compute) == ("bfloat16", "float32"):
            tolerance += self_check.TOLERANCE[self.dtype]
        if self.cache == "int8":
            tolerance += self_check.TOLERANCE["int8"]
        return tolerance


@dataclasses.dataclass(frozen=True)
class Process:
    """The library's decoder in a separate process, which gets weights by a folder."""

    weights: Path | None = None
    timeout: float = TIMEOUT
    tries: int = TRIES

    def __post_init__(self) -> None:
        checks.positive(timeout=self.timeout, tries=self.tries)

    def tolerance(self, compute: str) -> float:
        """0: the process samples with the trainer's dtypes."""
        del compute
        return 0.0


@dataclasses.dataclass(frozen=True)
class Server:
    """A server with OpenAI's completions API, such as vLLM."""

    OPEN = True
    address: str
    model: str | None = None
    weights: Path | None = None
    timeout: float = TIMEOUT
    tries: int = TRIES
    check_tolerance: float | None = None

    def __post_init__(self) -> None:
        from rlhf_jax.samplers import connection

        if not connection.is_address(self.address):
            raise InputError(
                f"--sampler: expected here, process or http://HOST:PORT, got "
                f"{self.address!r}; choose one"
            )
        checks.positive(timeout=self.timeout, tries=self.tries)
        checks.positive(check_tolerance=self.check_tolerance)

    def tolerance(self, compute: str) -> float:
        """Tolerance that check_tolerance adds to the default, nats per token."""
        if self.check_tolerance is None:
            return 0.0
        return max(0.0, self.check_tolerance - self_check.TOLERANCE[compute])


Sampler = Here | Process | Server


ENVIRONMENTS = ("calculator", "guessing", "programming", "rooms")  # in the library


@dataclasses.dataclass(frozen=True)
class Episodes:
    """Episodes of one or several turns in an environment."""

    name: str
    max_turns: int = 8
    max_turn_tokens: int | None = None
    observation_chunk: int = 32
    seconds: float | None = None

    def __post_init__(self) -> None:
        if self.name not in ENVIRONMENTS and ":" not in self.name:
            others = entry_points.names("environments")
            known = (*ENVIRONMENTS, *others, "module:name")
            checks.one_of(among=known, **{"--environment": self.name})
        checks.positive(max_turns=self.max_turns, seconds=self.seconds)
        checks.positive(
            max_turn_tokens=self.max_turn_tokens,
            observation_chunk=self.observation_chunk,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a batch of responses is drawn."""

    sampler: Sampler = Here()
    """What samples responses: here, process or http://HOST:PORT. here is the library's
    decoder beside the trainer: dtype=bfloat16|int8 is the dtype of its parameters,
    cache=int8 that of keys and values, cache_pages=N shares pages of page_size= columns
    among the rows of --continuous-batching, and prefill_chunk=N is the columns of a
    prompt that are read at a time. process is the same decoder in a separate process.
    http://HOST:PORT is a server with OpenAI's completions API, such as vLLM, with
    model= and check_tolerance= (nats per token). The last two take weights= (the folder
    by which they get weights), timeout= (seconds) and tries=5 (a failed call is
    repeated, each pause twice as long)."""
    environment: Episodes | None = None
    """Environment that answers turn by turn: calculator, guessing, programming, rooms,
    or module:name. Installed packages add names (`rlhf-jax new environment`). Options:
    max_turns=8; max_turn_tokens=; observation_chunk=32, tokens of an observation that
    the model reads at a time; seconds=, after which unfinished episodes of an iteration
    are cut. None has no environment."""
    max_staleness: int | None = None
    """Iterations k by which the sampler may be behind the trainer: the policy of step
    max(0, s - k) draws the responses of step s, while the trainer learns from earlier
    ones. 0 is on-policy; None is 1 with --placement.sampler last or hosts, otherwise
    0. On the policy's devices each batch that is not drawn yet holds a copy of the
    parameters."""
    max_redraws: int = 0
    """Most batches drawn again per iteration, until no group of responses has equal
    rewards (dynamic sampling); 0 draws none."""

    def __post_init__(self) -> None:
        checks.non_negative(max_redraws=self.max_redraws)
        checks.non_negative(max_staleness=self.max_staleness)

    @property
    def is_outside(self) -> bool:
        """Whether a separate process or a server samples."""
        return not isinstance(self.sampler, Here)

    def corrected(self, recipe: Recipe) -> Recipe:
        """Adds the default correction for a stale sampler to a recipe.

        Args:
          recipe: as the command line has it; its own --sampler-correction is kept.
        """
        chosen = recipe.sampler_correction is not None
        if chosen or not self.max_staleness or not recipe.has_ratio:
            return recipe
        return dataclasses.replace(recipe, sampler_correction=Truncate())
