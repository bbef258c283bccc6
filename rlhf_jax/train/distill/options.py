"""The options of `rlhf-jax distill`."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

import tyro

from rlhf_jax.algorithms.distill.recipe import DistillRecipe
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.devices.placement import TeacherPlacement
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train.sampling.options import SamplerConfig

RECIPE = DistillRecipe()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(SamplerConfig):
    """The options of `rlhf-jax distill`."""

    model: str
    """Student to start from, a checkpoint folder or hub id."""
    teacher: str
    """Teacher, a checkpoint of any shape whose tokens are the student's."""
    prompts: str
    """Prompts: JSONL, .txt, or hf:NAME:SPLIT."""
    prompt_field: str = "prompt"
    """Field of --prompts with the prompts."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of prompts that leave no room for a response: an error, or drop
    them."""
    reward: str | None = None
    """Reward beside the teacher, a Python function of texts, module:function; None is
    the teacher alone."""
    kl_coef: float = 1.0
    """Coefficient β of the divergence, reward units per nat."""
    num_steps: int = 200
    """Iterations, each a batch of responses and the updates on it."""
    batch_size: int = 64
    """Responses per iteration."""
    max_new_tokens: int = 48
    """Longest response, tokens."""
    distill: Annotated[DistillRecipe, tyro.conf.arg(name="")] = RECIPE
    """Coefficients and choices of distillation, options without a prefix."""
    learning_rate: float = 1e-5
    """Learning rate at the start; it falls to 0 linearly."""
    max_grad_norm: float = 1.0
    """Norm to which larger gradients are scaled down."""
    teacher_storage: Storage = frozen_models.COPY
    """Dtype in which the teacher is stored."""
    placement: TeacherPlacement = dataclasses.field(default_factory=TeacherPlacement)
    """Where each role is: devices, mesh and memory."""
    sample_every: int = 10
    """Iterations between rows of samples.jsonl."""
    num_shown: int = 4
    """Responses in samples.jsonl each time."""
    stop_timeout: float = 20.0
    """Seconds that sampling and reward may still take after SIGTERM or Ctrl-C. Then the
    state from before this step is saved, and the run ends."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.rows(batch_size=self.batch_size)
        checks.positive(
            kl_coef=self.kl_coef,
            num_steps=self.num_steps,
            max_new_tokens=self.max_new_tokens,
            learning_rate=self.learning_rate,
            max_grad_norm=self.max_grad_norm,
            sample_every=self.sample_every,
            stop_timeout=self.stop_timeout,
        )
        checks.non_negative(num_shown=self.num_shown)
        self.distill.check_read(rewarded=self.reward is not None)
        self.check_sampler(
            self.distill,
            max_new_tokens=self.max_new_tokens,
            placement=self.placement,
        )
        if self.distill.ptx_coef:
            raise InputError(
                f"--ptx-coef: expected 0, as there are no texts to mix in here, got "
                f"{self.distill.ptx_coef:g}; leave it out"
            )


SCREEN = {
    "Start": ("model", "teacher"),
    "Data": ("prompts", "max_new_tokens"),
    "Teacher": ("distill.divergence", "distill.jsd_beta"),
    "Reward": ("reward", "kl_coef"),
    "Training": (
        *("num_steps", "batch_size", "learning_rate", "distill.micro_batch_size"),
        "dtype",
    ),
    "Run": ("out", "resume"),
}
"""The options of --help."""
