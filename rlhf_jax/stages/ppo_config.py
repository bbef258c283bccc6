"""The options of PPO: all that is fixed while a run compiles once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import jax

from rlhf_jax.functional import checks, kl
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import lora as lora_
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles.lifecycle import FROZEN, Lifecycle
from rlhf_jax.stages import experience
from rlhf_jax.stages.state import Optimizer

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class PPO:
    """Shapes, optimizers and coefficients; hashable, so static under `jax.jit`."""

    model: ModelConfig  # of the policy and the reference
    critic_model: ModelConfig
    policy_optimizer: Optimizer
    critic_optimizer: Optimizer
    max_new_tokens: int  # R, response columns
    stop_ids: tuple[int, ...]  # tokens that end a response; () never stops
    temperature: float = 0.7  # in every role
    kl_estimator: Callable[[Array, Array], Array] = kl.k1  # in the reward
    lifecycle: Lifecycle = FROZEN  # of the reference; the caller's loop moves it
    missing_stop_score: float | None = None  # of responses that never stopped
    normalise_scores: bool = False  # by the moments of every score so far
    reprice: bool = False  # old_logprobs from the trainer, not the sampler
    gamma: float = 1.0
    lam: float = 0.95
    whiten_advantages: experience.Whiten = "rollout"
    clip_range: float = 0.2
    value_clip_range: float | None = 0.2  # reward units
    vf_coef: float = 0.1
    num_epochs: int = 4
    num_minibatches: int = 1  # an epoch
    micro_batch_size: int | None = None  # rows held at once; None a whole minibatch
    # Policy and critic are adapters made by this one, and a score, over one base; None
    # trains every parameter of both.
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        checks.positive(
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            clip_range=self.clip_range,
        )
        checks.non_negative(vf_coef=self.vf_coef)
        checks.fraction(gamma=self.gamma, lam=self.lam)
        if self.value_clip_range is not None:
            checks.positive(value_clip_range=self.value_clip_range)
        if self.whiten_advantages not in ("rollout", "minibatch", None):
            raise InputError(
                f"whiten_advantages: expected 'rollout', 'minibatch' or None, got "
                f"{self.whiten_advantages!r}; choose one"
            )
        if self.lora is not None:
            lora_.targets(model=self.model, lora=self.lora)  # raises for a bad pattern
            if self.critic_model != self.model:
                raise InputError(
                    f"expected one shape of policy and critic with lora, as they share "
                    f"a base, got {self.model} and {self.critic_model}; pass the "
                    f"policy's as critic_model, or leave lora out"
                )
        if self.missing_stop_score is not None and not self.stop_ids:
            raise InputError(
                "missing_stop_score: expected stop_ids to look for, got none, so that "
                "it would replace every score; name stop_ids or leave it out"
            )

    def minibatch_size(self, rows: int) -> int:
        """Rows of a minibatch when a batch has `rows`.

        Raises:
          InputError: the sizes do not divide.
        """
        size, rest = divmod(rows, self.num_minibatches)
        if rest or not size:
            raise InputError(
                f"expected num_minibatches to divide the {rows} rows of a batch, got "
                f"{self.num_minibatches}; change either"
            )
        held = size if self.micro_batch_size is None else self.micro_batch_size
        if held < 1 or size % held:
            raise InputError(
                f"expected micro_batch_size to divide the {size} rows of a minibatch "
                f"({rows} rows / {self.num_minibatches} minibatches), got {held}; "
                "change either, or leave it out to hold a minibatch at once"
            )
        return size
