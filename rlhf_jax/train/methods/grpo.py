"""GRPO and RLOO on your own model, prompts and reward: groups instead of a critic.

    rlhf-jax grpo --model runs/sft/model --prompts gsm8k/train.jsonl \\
        --prompt-field question --verifier gsm8k --out runs/gsm8k
    rlhf-jax grpo --model MODEL --prompts train.jsonl --reward-model runs/rm/model \\
        --out runs/grpo

Each prompt of a batch gets --group-size responses. A response that scores more than the
mean of its group becomes more likely, less a KL penalty (--kl-coef β) to the frozen
reference, the initial --model. Only the options of the method differ from those of
`rlhf-jax ppo`.

--verifier gsm8k compares the number after the last #### of a response with that of the
row's "answer", the format of GSM8K (github.com/openai/grade-school-math). --verifier
my_verifiers:check calls

    def check(prompt: str, response: str, row: dict) -> float

of my_verifiers.py in the working directory, in separate processes with a time limit
(--timeout); 1 is right. --held-out test.jsonl measures the mean score of greedy
responses before and after. --preset NAME starts from a published recipe: deepseekmath,
rloo, rloo-masked, gspo, luspo, gmpo, cispo, sapo, dapo, dar, dr-grpo, dppo, vespo,
topr, opo, remax, gdpo, skywork-or1, top-entropy, clip-cov, kl-cov, gradient-penalty,
ema-pg, score-centring or reinforce++-baseline.

A model that solves no prompt learns nothing, as all responses of a group score 0 and
group/equal_fraction is 1. --max-redraws N draws up to N more batches.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

from rlhf_jax.algorithms.grpo import GRPO, GroupRecipe, published
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.roles.reference.lifecycle import Lifecycle, Mix
from rlhf_jax.train import commands
from rlhf_jax.train.config.config import FLAT, PolicyGradientConfig
from rlhf_jax.train.config.models import KL, Reference
from rlhf_jax.train.config.optimizer import Optimizer
from rlhf_jax.train.config.prompts import Batch
from rlhf_jax.train.config.sampler import Sampling

RECIPE = GroupRecipe(temperature=1.0)
WITHOUT_KL = {"reference": Reference(reference="none")}

OF_DAPO: dict[str, Any] = {
    "batch": Batch(batch_size=8192, max_new_tokens=20_480),
    "sampler": Sampling(max_redraws=10),
    "optimizer": Optimizer(learning_rate=1e-6),
    **WITHOUT_KL,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PolicyGradientConfig):
    """The options of `rlhf-jax grpo`."""

    name: ClassVar[str] = "grpo"
    makes: ClassVar[type[PolicyGradient]] = GRPO
    method: Annotated[GroupRecipe, FLAT] = RECIPE
    """Coefficients and choices of GRPO."""


PRESETS: dict[str, dict[str, Any]] = {
    "deepseekmath": {
        "method": published.DEEPSEEK_MATH,
        "kl": KL(kl_coef=0.04),
        "batch": Batch(batch_size=1024, max_new_tokens=1024),
        "optimizer": Optimizer(learning_rate=1e-6),
    },
    "rloo": {"method": dataclasses.replace(published.RLOO, temperature=1.0)},
    "rloo-masked": {"method": published.RLOO_MASKED},
    "gspo": {"method": published.GSPO, **WITHOUT_KL},
    "cispo": {"method": published.CISPO, "batch": Batch(batch_size=8192), **WITHOUT_KL},
    "sapo": {"method": published.SAPO, **WITHOUT_KL},
    "luspo": {"method": published.LUSPO, **WITHOUT_KL},
    "gmpo": {"method": published.GMPO, **WITHOUT_KL},
    "dppo": {"method": published.DPPO, **WITHOUT_KL},
    "vespo": {"method": published.VESPO, **WITHOUT_KL},
    "topr": {"method": published.TOPR, **WITHOUT_KL},
    "opo": {"method": published.OPO, **WITHOUT_KL},
    "remax": {"method": published.REMAX},
    "skywork-or1": {"method": published.SKYWORK_OR1, **WITHOUT_KL},
    "gdpo": {"method": published.GDPO, **WITHOUT_KL},
    "clip-cov": {"method": published.CLIP_COV, **WITHOUT_KL},
    "kl-cov": {"method": published.KL_COV, **WITHOUT_KL},
    "dapo": {"method": published.DAPO, **OF_DAPO},
    "top-entropy": {"method": published.TOP_ENTROPY, **OF_DAPO},
    "gradient-penalty": {
        "method": published.GRADIENT_PENALTY,
        "optimizer": Optimizer(learning_rate=5e-6),
        **WITHOUT_KL,
    },
    "ema-pg": {
        "method": published.EMA_PG,
        "kl": KL(kl_coef=0.001),
        "reference": Reference(lifecycle=Lifecycle(move=Mix(every=10, rate=0.1))),
        "batch": Batch(batch_size=2560, max_new_tokens=500),
        "optimizer": Optimizer(learning_rate=1e-6),
    },
    "score-centring": {"method": published.CENTRED, **WITHOUT_KL},
    "dar": {"method": published.DAR, "kl": KL(kl_coef=0.0)},
    "dr-grpo": {
        "method": published.DR_GRPO,
        "batch": Batch(batch_size=1024, max_new_tokens=3000),
        "optimizer": Optimizer(learning_rate=1e-6),
        **WITHOUT_KL,
    },
    "reinforce++-baseline": {"method": published.REINFORCE_BASELINE},
}
"""--preset NAME: published settings that differ from the defaults."""


command = functools.partial(
    commands.run,
    Config,
    description=__doc__,
    first=("method.group_size",),
    presets=PRESETS,
)
"""`rlhf-jax grpo`: runs the command from a command line."""
