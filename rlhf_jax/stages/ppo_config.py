"""The options of PPO: all that is fixed while a run compiles once."""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any, Literal, get_args

from rlhf_jax.functional import checks, kl_penalty, losses
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl_penalty import Penalty
from rlhf_jax.models import lora as lora_
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles.lifecycle import FROZEN, Lifecycle
from rlhf_jax.stages import experience, score_shaping
from rlhf_jax.stages.score_shaping import ScoreShaping
from rlhf_jax.stages.state import Optimizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """The coefficients and choices of PPO; an option group of a command line."""

    temperature: float = 0.7
    """Divides the logits in every role."""
    fixed_length: bool = False
    """Sample every response to its full length, then truncate it at a stop token."""
    truncate_after: int = 0
    """With fixed_length: tokens of a response among which none ends it; 16 in OAI."""
    truncate_reward_only: bool = False
    """With fixed_length: only the reward sees the truncated response; the policy is
    trained on all of it, and its score lands on the last token (OAI)."""
    penalty: Penalty = kl_penalty.IN_REWARD
    """How the KL acts."""
    scores: ScoreShaping = score_shaping.AS_THEY_ARE
    """What becomes of the reward's scores."""
    reprice: bool = False
    """Log-probs of the responses from the trainer, not the sampler (for bfloat16)."""
    gamma: float = 1.0
    """Discount a token."""
    lam: float = 0.95
    """Of GAE: 1 trusts the returns, 0 the critic."""
    whiten_rewards: experience.Whiten = None
    """Over which rows token rewards get variance 1 and keep their mean (OAI)."""
    whiten_advantages: experience.Whiten = "rollout"
    """Over which rows advantages get mean 0 and variance 1."""
    whiten_ddof: Literal[0, 1] = 0
    """Of that variance: 0 is biased (OAI, N+), 1 unbiased (TRL)."""
    value_after_stop: bool = False
    """The finished response has a value, and its score lands there (N+)."""
    clip_range: float = 0.2
    """Of the probability ratio around 1."""
    clip_range_high: float | None = None
    """Of the ratio above 1; None is clip_range (clip-higher: 0.28)."""
    dual_clip: float | None = None
    """Bound of the ratio where the advantage is negative, above 1; None is none."""
    value_clip_range: float | None = 0.2
    """Of the values around the old ones, reward units; None is off."""
    vf_coef: float = 0.1
    """Weight of the value loss."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus."""
    ptx_coef: float = 0.0
    """Weight of a language-model loss on texts mixed in (InstructGPT: 27.8)."""
    aggregation: losses.Aggregation = "token_mean"
    """Of token losses: the mean of all tokens, or of responses' means."""
    num_epochs: int = 4
    """Passes over each batch."""
    num_minibatches: int = 1
    """Optimizer steps a pass."""
    micro_batch_size: int | None = None
    """Responses held at once in an update; None is a minibatch."""
    critic_warmup: int = 0
    """Iterations at the start in which the critic alone is trained."""
    shared_trunk: bool = False
    """The critic is a head on the policy's trunk (OAI), not a model of its own (N+)."""
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
            vf_coef=self.vf_coef,
            entropy_coef=self.entropy_coef,
            ptx_coef=self.ptx_coef,
            truncate_after=self.truncate_after,
            critic_warmup=self.critic_warmup,
        )
        checks.fraction(gamma=self.gamma, lam=self.lam)
        for name, number in {
            "value_clip_range": self.value_clip_range,
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
        _choice(
            whiten_rewards=self.whiten_rewards, among=("rollout", "minibatch", None)
        )
        _choice(
            whiten_advantages=self.whiten_advantages,
            among=("rollout", "minibatch", None),
        )
        _choice(whiten_ddof=self.whiten_ddof, among=(0, 1))
        _choice(aggregation=self.aggregation, among=get_args(losses.Aggregation))
        if self.whiten_rewards == "minibatch" and self.whiten_advantages == "rollout":
            raise InputError(
                "whiten_rewards: expected 'rollout' or None where advantages are "
                "whitened over the rollout, got 'minibatch': they do not exist before "
                "the minibatch then; set whiten_advantages='minibatch'"
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
class PPO(Recipe):
    """A recipe with its shapes and optimizers; hashable, so static under `jax.jit`.

    `PPO(**vars(recipe), model=...)` makes one of a `Recipe`.
    """

    model: ModelConfig  # of the policy and the reference
    critic_model: ModelConfig
    policy_optimizer: Optimizer
    critic_optimizer: Optimizer
    max_new_tokens: int  # R, response columns
    stop_ids: tuple[int, ...]  # tokens that end a response; () never stops
    lifecycle: Lifecycle = FROZEN  # of the reference; the caller's loop moves it
    # Policy and critic are adapters made by this one, and a score, over one base; None
    # trains every parameter of both.
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
        if self.shared_trunk and self.critic_model != self.model:
            raise InputError(
                f"expected one shape of policy and critic with shared_trunk, got "
                f"{self.model} and {self.critic_model}; pass the policy's as "
                f"critic_model, or leave shared_trunk out"
            )
        if self.lora is not None:
            lora_.targets(model=self.model, lora=self.lora)  # raises for a bad pattern
            if self.critic_model != self.model:
                raise InputError(
                    f"expected one shape of policy and critic with lora, as they share "
                    f"a base, got {self.model} and {self.critic_model}; pass the "
                    f"policy's as critic_model, or leave lora out"
                )
        said = self.penalty.warning
        if said is not None:
            warnings.warn(said, stacklevel=3)

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


def _choice(*, among: tuple[Any, ...], **given: Any) -> None:
    for name, choice in given.items():
        if choice not in among:
            raise InputError(
                f"{name}: expected one of {', '.join(map(repr, among))}, got "
                f"{choice!r}; choose one"
            )


OPENAI_2019 = Recipe(
    temperature=0.7,
    fixed_length=True,
    truncate_after=16,
    truncate_reward_only=True,
    scores=ScoreShaping(missing_stop_score=-1.0),
    gamma=1.0,
    lam=0.95,
    whiten_rewards="minibatch",
    whiten_advantages="minibatch",
    clip_range=0.2,
    value_clip_range=0.2,
    vf_coef=0.1,
    num_epochs=4,
    shared_trunk=True,
)
"""Ziegler et al. 2019, arXiv:1909.08593, as openai/lm-human-preferences runs it; with
`kl_control.adaptive(0.15, target=6, unit="response", horizon=10_000)` and TF's Adam."""

N_PLUS = Recipe(
    temperature=0.7,
    fixed_length=True,
    scores=ScoreShaping(missing_stop_score=-1.0),
    gamma=1.0,
    lam=0.95,
    whiten_advantages="minibatch",
    value_after_stop=True,
    clip_range=0.2,
    value_clip_range=0.2,
    vf_coef=0.1,
    num_epochs=4,
)
"""Huang et al. 2024, arXiv:2403.17031 (summarize from feedback); with
`kl_control.fixed(0.05)`, Adam of eps 1e-5, and a critic that starts as the reward
model."""
