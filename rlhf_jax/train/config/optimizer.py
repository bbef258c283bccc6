"""`optimizer`: one option group for every command, and for the critic.

--learning-rate 3e-6 --optimizer adamw,weight_decay=0.1 --schedule cosine,warmup=0.1
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal

import optax

from rlhf_jax.algorithms import optimizers
from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import InputError, located
from rlhf_jax.runs.command_line.options import load_function

POLICY, REWARD_MODEL = "policy", "reward_model"  # values of --critic.start
MomentDtype = Literal["float32", "bfloat16"]


@dataclasses.dataclass(frozen=True)
class Adam:
    """Adam (Kingma & Ba 2015)."""

    eps: float = 1e-8
    b1: float = 0.9
    b2: float = 0.999
    mu_dtype: MomentDtype = "float32"

    def __post_init__(self) -> None:
        self.make(1.0)  # or raises

    def make(self, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        """The transformation, learning rate included."""
        return optimizers.adam(rate, **vars(self))


@dataclasses.dataclass(frozen=True)
class TFAdam(Adam):
    """Adam as in TensorFlow: eps is outside the bias correction."""

    def make(self, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        """The transformation, learning rate included."""
        return optimizers.adam(rate, **vars(self), style="tf")


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay; decay=matrices leaves norms and biases out."""

    weight_decay: float = 0.01
    decay: Literal["all", "matrices"] = "all"
    eps: float = 1e-8
    b1: float = 0.9
    b2: float = 0.999
    mu_dtype: MomentDtype = "float32"

    def __post_init__(self) -> None:
        self.make(1.0)  # or raises

    def make(self, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        """The transformation, learning rate included."""
        return optimizers.adam(
            rate,
            weight_decay=self.weight_decay,
            decayed=None if self.decay == "all" else optimizers.are_matrices,
            eps=self.eps,
            b1=self.b1,
            b2=self.b2,
            mu_dtype=self.mu_dtype,
        )


@dataclasses.dataclass(frozen=True)
class Adafactor:
    """Adafactor (Shazeer & Stern 2018): factored second moments, little memory."""

    momentum: float | None = None
    weight_decay: float | None = None

    def __post_init__(self) -> None:
        advice = "choose another decay"
        checks.within(least=0, below=1, advice=advice, momentum=self.momentum)
        checks.non_negative(weight_decay=self.weight_decay)

    def make(self, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        """The transformation, learning rate included."""
        return optax.adafactor(
            rate,
            multiply_by_parameter_scale=False,
            momentum=self.momentum,
            weight_decay_rate=self.weight_decay,
        )


@dataclasses.dataclass(frozen=True)
class Muon:
    """Muon (Jordan et al. 2024) for matrices, Adam for everything else."""

    beta: float = 0.95
    weight_decay: float = 0.0
    ns_steps: int = 5

    def __post_init__(self) -> None:
        self.make(1.0)  # or raises

    def make(self, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        """The transformation, learning rate included."""
        return optimizers.muon(rate, **vars(self))


@dataclasses.dataclass(frozen=True)
class Custom:
    """A user's function, module:function, of the learning rate or schedule."""

    OPEN = True
    function: str

    def make(self, rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
        """Calls the function; returns its `optax.GradientTransformation`."""
        made = load_function(self.function)(rate)
        if not isinstance(made, optax.GradientTransformation):
            raise InputError(
                f"{self.function}: expected a function of a learning rate that returns "
                f"an optax.GradientTransformation, got {made!r:.80}"
            )
        return made


Rule = Adam | AdamW | TFAdam | Adafactor | Muon | Custom


@dataclasses.dataclass(frozen=True)
class Constant:
    """The learning rate is constant after the warm-up."""

    warmup: float = 0.0

    def __post_init__(self) -> None:
        advice = "it is a share of the updates; choose 0.1"
        checks.within(least=0, below=1, advice=advice, warmup=self.warmup)

    def make(self, peak: float, steps: int) -> optax.Schedule:
        """Update (from 0) -> learning rate."""
        return self._warmed(optax.constant_schedule(peak), peak, steps)

    def _warmed(
        self, schedule: optax.Schedule, peak: float, steps: int
    ) -> optax.Schedule:
        warmup = int(self.warmup * steps)
        if not warmup:
            return schedule
        rise = optax.linear_schedule(0.0, peak, warmup)
        return optax.join_schedules([rise, schedule], [warmup])


@dataclasses.dataclass(frozen=True)
class Linear(Constant):
    """The learning rate falls linearly to `end` times its peak."""

    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(end=self.end)

    def make(self, peak: float, steps: int) -> optax.Schedule:
        """Update (from 0) -> learning rate."""
        rest = steps - int(self.warmup * steps)
        fall = optax.linear_schedule(peak, self.end * peak, rest)
        return self._warmed(fall, peak, steps)


@dataclasses.dataclass(frozen=True)
class Cosine(Constant):
    """The learning rate falls to `end` times its peak along half a cosine."""

    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(end=self.end)

    def make(self, peak: float, steps: int) -> optax.Schedule:
        """Update (from 0) -> learning rate."""
        warmup = int(self.warmup * steps)
        if not warmup:
            return optax.cosine_decay_schedule(peak, steps, alpha=self.end)
        return optax.warmup_cosine_decay_schedule(
            0.0, peak, warmup, steps, end_value=self.end * peak
        )


@dataclasses.dataclass(frozen=True)
class WSD(Constant):
    """Warm-up, stable, decay: a linear fall over the last share of the updates."""

    decay: float = 0.2
    end: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.fraction(end=self.end, decay=self.decay)
        checks.within(
            most=round(1 - self.decay, 9),
            advice="the learning rate rises before it falls: lower warmup or decay",
            warmup=self.warmup,
        )

    def make(self, peak: float, steps: int) -> optax.Schedule:
        """Update (from 0) -> learning rate."""
        falling = int(self.decay * steps)
        stable = steps - falling - int(self.warmup * steps)
        fall = optax.linear_schedule(peak, self.end * peak, max(1, falling), stable)
        return self._warmed(fall, peak, steps)


ScheduleKind = Constant | Linear | Cosine | WSD


@dataclasses.dataclass(frozen=True, kw_only=True)
class Optimizer:
    """How parameters are updated from their gradients."""

    learning_rate: float = 3e-6
    """Peak learning rate, after the warm-up."""
    optimizer: Rule = Adam()
    """Update rule: adam, adamw, tf_adam, adafactor, muon, or module:function. Options
    follow, as eps=, b1=, b2=, mu_dtype= and weight_decay=."""
    schedule: ScheduleKind = Linear()
    """Learning-rate schedule: constant, linear, cosine or wsd. warmup= is the share of
    the updates over which the learning rate rises from 0."""
    max_grad_norm: float | None = 1.0
    """Global norm to which larger gradients are scaled down; None disables clipping."""

    PREFIX: ClassVar[str] = "--"
    """Prefix of the options, for messages."""

    def __post_init__(self) -> None:
        checks.positive(learning_rate=self.learning_rate)
        checks.positive(max_grad_norm=self.max_grad_norm)

    def make(self, updates: int) -> optax.GradientTransformation:
        """Returns clipping, update rule and schedule of a run of `updates` updates."""
        schedule = self.schedule.make(self.learning_rate, updates)
        with located(f"{self.PREFIX}optimizer"):
            rule = self.optimizer.make(schedule)
        clip = []
        if self.max_grad_norm is not None:
            clip = [optax.clip_by_global_norm(self.max_grad_norm)]
        return optax.chain(*clip, rule, optimizers.keep_buffers())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Critic(Optimizer):
    """Optimizer and initial model of PPO's critic; the options' prefix is `critic.`."""

    learning_rate: float = 1e-5
    """Peak learning rate of the critic."""
    start: str = POLICY
    """Model whose trunk the critic starts from: policy, reward_model, or a checkpoint
    of any shape. Values start at 0, from a reward model as its scores."""

    PREFIX: ClassVar[str] = "--critic."

    def __post_init__(self) -> None:
        with located("critic"):
            super().__post_init__()
