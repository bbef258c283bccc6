"""What every policy-gradient algorithm fixes while a run compiles once.

`PolicyRecipe` holds what a paper would state, and is an option group of a command line;
`PolicyGradient` what a run adds: shapes, optimizer and stop tokens. PPO (`ppo.recipe`)
and the algorithms without a critic (`grpo`) add their own options to both.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, get_args

from rlhf_jax.algorithms.flow import shaping
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.state import Optimizer
from rlhf_jax.functional import aggregation, checks, losses
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA, targets
from rlhf_jax.roles.reference.lifecycle import FROZEN, Lifecycle


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyRecipe:
    """How responses are sampled, what becomes of their scores, how the policy moves."""

    temperature: float = 0.7
    """Divides the logits in every role."""
    fixed_length: bool = False
    """Sample every response to its full length, then truncate it at a stop token."""
    truncate_after: int = 0
    """With fixed_length: tokens of a response among which none ends it; 16 in OAI."""
    truncate_reward_only: bool = False
    """With fixed_length: only the reward sees the truncated response; the policy is
    trained on all of it, and its score lands on the last token (OAI)."""
    slots: int | None = None
    """Responses sampled at a time, a finished one's place going to the next prompt;
    None is a place for every row of a batch. Samples are the same up to rounding, which
    may decide a draw that falls between two tokens."""
    penalty: Penalty = IN_REWARD
    """How the KL acts."""
    scores: ScoreShaping = shaping.AS_THEY_ARE
    """What becomes of the reward's scores."""
    reprice: bool = False
    """Log-probs of the responses from the trainer, not the sampler (for bfloat16)."""
    clip_range: float = 0.2
    """Of the probability ratio around 1."""
    clip_range_high: float | None = None
    """Of the ratio above 1; None is clip_range (clip-higher: 0.28)."""
    dual_clip: float | None = None
    """Bound of the ratio where the advantage is negative, above 1; None is none."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    ptx_coef: float = 0.0
    """Weight of a language-model loss on texts mixed in (InstructGPT: 27.8)."""
    aggregation: losses.Aggregation = "token_mean"
    """Of token losses: the mean of all tokens; of responses' means; or responses' sums
    over a constant, alone without bias where responses differ in length."""
    loss_scale_factor: float | None = None
    """With aggregation constant: tokens that it divides a response's sum by; None is
    max_new_tokens, and 1 gives gradients the size of the objective's."""
    num_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 1
    """Optimizer steps a pass."""
    micro_batch_size: int | None = None
    """Responses held at once in an update; None is a minibatch."""
    stop_approxkl: float | None = None
    """Nats per token from the sampler that end a batch's updates; None is off."""
    max_ratio_mean: float | None = None
    """A minibatch of a larger mean ratio is left out (TRL: 10); None is off."""

    def __post_init__(self) -> None:
        checks.positive(
            temperature=self.temperature,
            num_epochs=self.num_epochs,
            num_minibatches=self.num_minibatches,
            clip_range=self.clip_range,
        )
        checks.non_negative(
            entropy_coef=self.entropy_coef,
            ptx_coef=self.ptx_coef,
            truncate_after=self.truncate_after,
        )
        for name, number in {
            "clip_range_high": self.clip_range_high,
            "stop_approxkl": self.stop_approxkl,
        }.items():
            if number is not None:
                checks.positive(**{name: number})
        for name, number in {
            "dual_clip": self.dual_clip,
            "max_ratio_mean": self.max_ratio_mean,
        }.items():
            if number is not None and not 1 < number < math.inf:
                raise InputError(
                    f"{name}: expected a finite number above 1, as it bounds a ratio "
                    f"that starts at 1, got {number}; choose another, or leave it out"
                )
        if self.slots is not None:
            checks.positive(slots=self.slots)
        one_of(aggregation=self.aggregation, among=get_args(losses.Aggregation))
        if self.loss_scale_factor is not None:
            aggregation.check_scale(
                self.aggregation, loss_scale_factor=self.loss_scale_factor
            )
        for name, given in {
            "truncate_after": self.truncate_after,
            "truncate_reward_only": self.truncate_reward_only,
        }.items():
            if given and not self.fixed_length:
                raise InputError(
                    f"{name}: expected fixed_length with it, got {given} without, "
                    f"where the sampler ends a response at its first stop token; set "
                    f"fixed_length, or leave it out"
                )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyGradient(PolicyRecipe):
    """A recipe with its shapes and its optimizer; hashable, so static under `jit`."""

    model: ModelConfig  # of the policy and the reference
    policy_optimizer: Optimizer
    max_new_tokens: int  # R, response columns
    stop_ids: tuple[int, ...]  # tokens that end a response; () never stops
    lifecycle: Lifecycle = FROZEN  # of the reference; the caller's loop moves it
    # What is trained are adapters made by this one over one base; None trains every
    # parameter.
    lora: LoRA | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(max_new_tokens=self.max_new_tokens)
        for name, needs in {
            "scores.missing_stop_score or missing_stop_penalty": (
                self.scores.reads_stops
            ),
            "fixed_length": self.fixed_length,
        }.items():
            if needs and not self.stop_ids:
                raise InputError(
                    f"{name}: expected stop_ids to look for, got none, so that no "
                    f"response would ever have stopped; name stop_ids or leave it out"
                )
        if self.truncate_after >= self.max_new_tokens:
            raise InputError(
                f"truncate_after: expected less than the {self.max_new_tokens} tokens "
                f"of max_new_tokens, got {self.truncate_after}, after which no token "
                f"is left that could end a response; lower it, or sample longer"
            )
        if self.lora is not None:
            targets(model=self.model, lora=self.lora)  # raises for a bad pattern
        said = self.penalty.warning
        if said is not None:
            also = self.length_bias
            warnings.warn(said if also is None else f"{said}; {also}", stacklevel=5)

    @property
    def loss_scale(self) -> float | None:
        """What aggregation constant divides by, tokens; None with the means."""
        if self.aggregation != "constant" or self.loss_scale_factor is not None:
            return self.loss_scale_factor
        return float(self.max_new_tokens)

    @property
    def length_bias(self) -> str | None:
        """What the aggregation does to the expected gradient, None where it is nothing.

        Nothing too where all responses are trained to the same length.
        """
        if not self.stop_ids or self.truncate_reward_only:
            return None
        return aggregation.bias(self.aggregation)

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


def one_of(*, among: tuple[Any, ...], **given: Any) -> None:
    """Raises InputError by name for a choice that is none of `among`."""
    for name, choice in given.items():
        if choice not in among:
            raise InputError(
                f"{name}: expected one of {', '.join(map(repr, among))}, got "
                f"{choice!r}; choose one"
            )
