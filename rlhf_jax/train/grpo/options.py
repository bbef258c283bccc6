"""The options of `rlhf-jax grpo`, and what others with a verifier share."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal

import tyro
from jax.sharding import Mesh

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.grpo import GRPO, GroupRecipe
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyRecipe
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.devices.placement import SamplerPlacement
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.train.environment.options import EnvironmentConfig
from rlhf_jax.train.outside import samplers
from rlhf_jax.train.outside.options import OutsideConfig
from rlhf_jax.train.packed_rollouts import PackedConfig
from rlhf_jax.train.references import ReferencesConfig, refuse_unused
from rlhf_jax.train.rollouts.options import StalenessConfig
from rlhf_jax.train.sampling.options import OF_DECODER
from rlhf_jax.train.sampling.sampler import Sampler

RECIPE = GroupRecipe(temperature=1.0)
KL_COEF = 0.01  # with a reference, unless another is asked for


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifiedConfig(
    ReferencesConfig,
    PackedConfig,
    StalenessConfig,
    OutsideConfig,
    EnvironmentConfig,
    abc.ABC,
):
    """What the trainers with a verifier share; each adds its recipe."""

    model: str
    """Policy to start from, a checkpoint folder or hub id."""
    data: str
    """Rows to train on: JSONL, or hf:NAME:SPLIT."""
    held_out: str
    """Rows to measure the accuracy on."""
    question_field: str = "question"
    """Field of the rows with the questions."""
    verifier: str = "gsm8k"
    """Verifier of responses: gsm8k, integer, exact, or a Python function
    module:function."""
    answer_field: str = "answer"
    """Field of the rows with the right answers; for gsm8k they end in #### and a
    number."""
    template: str = "{question}"
    """Prompt; {question} stands for the question."""
    chat: bool = False
    """Whether the text is put as a message of the user, by the tokenizer's chat
    template."""
    unmarked: Literal["wrong", "last_number"] = "wrong"
    """Treatment of a response without #### by gsm8k: it is wrong, or its last number
    counts."""
    overlong: Literal["error", "drop"] = "drop"
    """Treatment of questions that leave no room for a response: an error, or drop
    them."""
    reference: str = "start"
    """Reference of the KL: start, none, or a checkpoint."""
    reference_storage: Storage = frozen_models.COPY
    """Dtype in which the reference is stored."""
    kl_coef: float | None = None
    """KL coefficient β, reward units per nat; None: 0.01 with a reference."""
    num_steps: int = 500
    """Iterations, each a batch of responses and the updates on it."""
    batch_size: int = 128
    """Responses per iteration."""
    max_new_tokens: int = 256
    """Longest response, tokens."""
    learning_rate: float = 1e-6
    """Learning rate at the start; it falls to 0 linearly."""
    num_workers: int | None = None
    """Processes that verify; None is one per processor."""
    timeout: float = 10.0
    """Seconds to verify one response."""
    stop_timeout: float = 20.0
    """Seconds that sampling and verifiers may still take after SIGTERM or Ctrl-C. Then
    the state from before this step is saved, and the run ends."""
    on_failure: Literal["zero", "stop"] = "zero"
    """What happens where a response could not be verified: it scores 0, or the run
    stops."""
    eval_rows: int = 256
    """Held-out rows to evaluate on, from the beginning."""
    placement: SamplerPlacement = dataclasses.field(default_factory=SamplerPlacement)
    """Where each role is: devices, mesh and memory."""

    @property
    def trained_share(self) -> float:
        """Share of an iteration's responses that the update reads."""
        return 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.rows(batch_size=self.batch_size)
        checks.positive(
            num_steps=self.num_steps,
            max_new_tokens=self.max_new_tokens,
            learning_rate=self.learning_rate,
            eval_rows=self.eval_rows,
            stop_timeout=self.stop_timeout,
        )
        checks.non_negative(kl_coef=self.beta)
        self.check_packing(
            max_new_tokens=self.max_new_tokens, mesh=self.placement.policy
        )
        self.check_outside(
            self.recipe, placement=self.placement, environment=self.environment
        )
        self.check_sampler(
            self.recipe,
            max_new_tokens=self.max_new_tokens,
            placement=self.placement,
        )
        self.check_staleness(self.recipe, num_steps=self.num_steps)
        self.check_environment(
            max_new_tokens=self.max_new_tokens, replaced=self._replaced()
        )
        if self.reference == "none" and self.beta:
            raise InputError(
                f"--reference none: expected no --kl-coef, as there is nothing to take "
                f"a KL to, got {self.beta:g}; leave one of them out"
            )
        place, penalty = self.placement.reference, self.recipe.penalty
        if self.reference == "none":
            refuse_unused("reference", self.reference_storage, place)
        if penalty.needs_logits and place.apart:
            raise InputError(
                f"--placement.reference: expected policy for exact KL, which needs the "
                f"hidden states of both in one program, got {place}; leave it out, or "
                f"choose k1, k2 or k3"
            )
        left_out = "--reference none" if self.reference == "none" else None
        self.check_references(penalty, first=left_out)
        if "{question}" not in self.template:
            raise InputError(
                f"--template: expected {{question}} where the question is to stand, "
                f"got {self.template!r}; put it in"
            )

    @property
    @abc.abstractmethod
    def recipe(self) -> PolicyRecipe:
        """The coefficients and choices of the algorithm."""

    @abc.abstractmethod
    def algorithm(self, **shapes: Any) -> PolicyGradient:
        """The recipe with what a run knows: shapes, optimizer and stop tokens."""

    def _replaced(self) -> dict[str, Any]:
        """What an environment takes the place of, or cannot use, where it was set."""
        names = ("verifier", "question_field", "answer_field", "template", "unmarked")
        changed = self.changed(*names, *OF_DECODER)
        if self.redraws:
            changed["--max-redraws"] = self.redraws
        if self.recipe.fixed_length:
            changed["--fixed-length"] = True
        return changed

    def make_sampler(
        self, algorithm: PolicyGradient, *, mesh: Mesh, reference: Frozen | None
    ) -> Callable[..., Rollout]:
        """The compiled sampler of a run.

        Args:
          algorithm: of `algorithm`.
          mesh: the policy's, where responses are wanted.
          reference: for an algorithm whose samples it takes part in.
        """
        del reference
        if self.samples_outside:
            return samplers.make_sampler(self, algorithm, home=mesh)
        place = self.placement.sampler
        there = place.mesh_beside(mesh) if place.apart else mesh
        assert there is not None  # the host is for frozen models
        return Sampler(
            algorithm,
            mesh=there,
            home=mesh,
            storage=self.sampler_storage,
            cache=self.sampler_cache,
            cache_pages=self.sampler_cache_pages,
            page_size=self.sampler_page_size,
            prefill_chunk=self.prefill_chunk,
        )

    @property
    def redraws(self) -> int:
        """Batches drawn again per iteration, at most; 0 without groups."""
        return 0

    @property
    def reference_tolerance(self) -> float:
        """What storing the reference adds to its distance to the policy at the start.

        Nats per token.
        """
        dtype = self.reference_storage.dtype
        return 0.0 if dtype == "float32" else self_check.TOLERANCE[dtype]

    @property
    def beta(self) -> float:
        """The KL coefficient."""
        if self.kl_coef is not None:
            return self.kl_coef
        return 0.0 if self.reference == "none" else KL_COEF


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(VerifiedConfig):
    """The options of `rlhf-jax grpo`."""

    grpo: Annotated[GroupRecipe, tyro.conf.arg(name="")] = RECIPE
    """Coefficients and choices of GRPO, options without a prefix."""
    max_redraws: int = 0
    """Batches drawn again per iteration at most, until none of its groups has equal
    rewards (dynamic sampling); 0 draws none."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.groups(self.batch_size, group_size=self.grpo.group_size)
        checks.non_negative(max_redraws=self.max_redraws)
        if self.max_redraws and self.staleness:
            raise InputError(
                f"--max-redraws {self.max_redraws}: expected 0 with --max-staleness "
                f"{self.staleness}, as a batch that is drawn again would be of another "
                f"policy than the one it fills up; leave one of them out"
            )

    @property
    def redraws(self) -> int:
        """Batches drawn again per iteration, at most."""
        return self.max_redraws

    @property
    def recipe(self) -> GroupRecipe:
        """The coefficients and choices of GRPO."""
        return self.grpo

    def algorithm(self, **shapes: Any) -> GRPO:
        """The recipe with what a run knows: shapes, optimizer and stop tokens."""
        return GRPO(**vars(self.grpo), **shapes)


VERIFIED_SCREEN = {
    "Start": ("model", "reference"),
    "Data": ("data", "held_out", "question_field", "template", "max_new_tokens"),
    "Reward": ("verifier", "answer_field", "kl_coef"),
}
WITH_TURNS = VERIFIED_SCREEN | {
    "Reward": ("verifier", "answer_field", "environment", "kl_coef"),
}
SCREEN = {
    **WITH_TURNS,
    "Training": (
        *("num_steps", "batch_size", "grpo.group_size", "learning_rate"),
        *("grpo.micro_batch_size", "dtype"),
    ),
    "Run": ("out", "resume"),
}
"""The options of --help."""
