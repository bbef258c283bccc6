"""Online DPO: DPO's loss on pairs of the policy's own samples, ranked by a reward.

    rlhf-jax online-dpo --model MODEL --prompts train.jsonl \\
        --reward-model runs/rm/model --out OUT

The samples of a prompt are ranked by their scores, and DPO's loss of the best against
the worst replaces the policy gradient. --kl-coef is DPO's β. The loss has no ratio to
the policy that sampled: a stale sampler (--max-staleness) makes older pairs, without a
correction. Only the options of the method differ from `rlhf-jax grpo`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, ClassVar

from rlhf_jax.algorithms.online_dpo import OnlineDPO, OnlineDPORecipe
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import located
from rlhf_jax.functional.kl.control import Lagrangian, Linear
from rlhf_jax.train import commands
from rlhf_jax.train.config.config import FLAT, PolicyGradientConfig

RECIPE = OnlineDPORecipe()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PolicyGradientConfig):
    """The options of `rlhf-jax online-dpo`."""

    name: ClassVar[str] = "online-dpo"
    makes: ClassVar[type[PolicyGradient]] = OnlineDPO
    default_kl_coef: ClassVar[float] = 0.1
    method: Annotated[OnlineDPORecipe, FLAT] = RECIPE
    """Coefficients and choices of online DPO."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(kl_coef=self.kl_coef)
        # At β = 0 the loss of a pair has no gradient, and IPO divides by β.
        match self.kl.kl_control:
            case Linear(end=end):
                with located("--kl-control linear"):
                    checks.positive(end=end)
            case Lagrangian(min_kl_coef=least):
                with located("--kl-control lagrangian"):
                    checks.positive(min_kl_coef=0.0 if least is None else least)
        self.method.check_batch(self.batch.batch_size)


command = functools.partial(
    commands.run,
    Config,
    description=__doc__,
    first=("method.group_size", "method.labels"),
)
"""`rlhf-jax online-dpo`: runs the command from a command line."""
