"""`--reward-model`: one reward model, or several that are combined."""

from __future__ import annotations

import dataclasses

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.rewards.ensembles import Combine
from rlhf_jax.train.start import StartConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardModelConfig(StartConfig):
    """Which reward models score the responses, and what is made of several."""

    reward_model: str | None = None
    """Reward model, or several as A,B,C; or give --reward."""
    reward_combine: Combine = "mean"
    """Score of several reward models: their mean, their minimum, or mean_minus_std,
    their mean less --reward-std-coef times their standard deviation."""
    reward_std_coef: float | None = None
    """With --reward-combine mean_minus_std: what the standard deviation of the reward
    models is multiplied by; None is 1."""

    def check_reward_models(self) -> None:
        """Raises InputError for an ensemble that is none, or options of none."""
        names = self.reward_models
        if "" in names or len(set(names)) < len(names):
            raise InputError(
                f"--reward-model: expected different checkpoints between commas, got "
                f"{self.reward_model!r}; name each once"
            )
        if len(names) < 2 and self.reward_combine != "mean":
            raise InputError(
                f"--reward-combine {self.reward_combine}: expected several models in "
                f"--reward-model, with commas between them, got {len(names)}; name "
                f"more, or leave it out"
            )
        if self.reward_std_coef is not None:
            if self.reward_combine != "mean_minus_std":
                raise InputError(
                    f"--reward-std-coef: expected --reward-combine mean_minus_std with "
                    f"it, got {self.reward_combine}; leave one of them out"
                )
            checks.non_negative(reward_std_coef=self.reward_std_coef)

    @property
    def reward_models(self) -> tuple[str, ...]:
        """Checkpoints of --reward-model; none with a Python reward."""
        names = self.reward_model
        return () if names is None else tuple(map(str.strip, names.split(",")))

    @property
    def std_coef(self) -> float:
        """What the standard deviation of an ensemble is multiplied by."""
        return 1.0 if self.reward_std_coef is None else self.reward_std_coef
