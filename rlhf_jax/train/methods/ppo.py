"""PPO on your own model, prompts and reward.

    rlhf-jax ppo --model runs/sft/model \\
        --prompts prompts.jsonl --reward-model runs/reward/model --out runs/ppo
    rlhf-jax ppo --model gpt2 \\
        --prompts prompts.txt --reward my_rewards:score --out runs/ppo

A line of --prompts is {"prompt": ..., with any fields that the reward reads}, or a
prompt in a .txt file. Messages go through the tokenizer's chat template. The reward is
a checkpoint of `rlhf-jax reward-model`, a --verifier, a weighted list (--rewards), or a
function

    def score(prompts: list[str], responses: list[str], rows: list[dict]) -> list[float]

of my_rewards.py in the working directory, where rows are those of --prompts. The policy
maximises score - kl_coef * KL(policy || reference). OUT/model is a Hugging Face
checkpoint with its tokenizer. --environment plays episodes of several turns instead.

--lora 16 trains adapters of policy and critic over one frozen base, which is also the
reference; OUT/adapter is then a PEFT adapter, and OUT/model has it merged.
--reference-storage.dtype int8 makes the reference cheaper, --placement.reference
pinned_host or cpu takes it off the device, --lifecycle.* moves it, and --reference none
omits it. --references NAME=CHECKPOINT,weight=W also penalises the KL to another
reference, with W times the coefficient of the first.
--preset openai-2019 or n-plus starts from a published recipe.
Every --eval-every steps the run evaluates --texts and a --judge; --alarms.* are limits
beyond which it prints a warning.

Memory: policy and critic in float32 four times each, reference and reward model once;
for GPT-2 small 4.7 GiB. Expect the score to rise and the KL to stay in single digits
[nats per response]. If KL and score both rise sharply, the policy exploits an error of
the reward: raise --kl-coef, or control the KL with --kl-control
adaptive,target=6,unit=response.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import optax

from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.ppo.recipe import N_PLUS, OPENAI_2019, PPO, Recipe
from rlhf_jax.devices.placement import Place, Placement
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.control import Adaptive
from rlhf_jax.train import commands
from rlhf_jax.train.config import capabilities
from rlhf_jax.train.config.config import FLAT, PolicyGradientConfig
from rlhf_jax.train.config.models import KL
from rlhf_jax.train.config.optimizer import (
    REWARD_MODEL,
    Adam,
    Critic,
    Optimizer,
    TFAdam,
)
from rlhf_jax.train.config.prompts import Batch

RECIPE = Recipe(num_minibatches=4, temperature=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(PolicyGradientConfig):
    """The options of `rlhf-jax ppo`."""

    name: ClassVar[str] = "ppo"
    makes: ClassVar[type[PolicyGradient]] = PPO
    method: Annotated[Recipe, FLAT] = RECIPE
    """Coefficients and choices of PPO."""
    critic: Critic = Critic()  # pyright: ignore[reportIncompatibleMethodOverride]
    """Optimizer and initial model of the critic."""
    placement: Placement = Placement()
    """Devices, mesh and memory of each role."""

    def __post_init__(self) -> None:
        method, sampler = self.method, self.sampler
        # First: a later check would name the default correction, which nobody chose.
        stale = bool(sampler.max_staleness) and method.sampler_correction is None
        capabilities.exclude(
            {
                "--whiten-rewards minibatch": method.whiten_rewards == "minibatch",
                "--whiten-advantages minibatch": method.whiten_advantages
                == "minibatch",
            },
            {"--max-staleness": stale},
            reason="the weights that correct for it need whitening over the rollout "
            "(--sampler-correction ratio has none)",
        )
        super().__post_init__()
        checks.within(
            below=self.num_steps,
            advice="the policy would never learn; lower it, or raise --num-steps",
            **{"--critic-warmup": self.method.critic_warmup},
        )

    @property
    def critic_place(self) -> Place:
        """The place of the critic."""
        return self.placement.critic

    def optimizers(self) -> dict[str, optax.GradientTransformation]:
        """The optimizers; the policy's has no updates during the critic's warm-up."""
        learning = self.num_steps - self.method.critic_warmup
        return {
            "policy_optimizer": self.optimizer.make(learning * self.updates),
            "critic_optimizer": self.critic.make(self.num_steps * self.updates),
        }


PRESETS: dict[str, dict[str, Any]] = {
    "openai-2019": {
        "method": OPENAI_2019,
        "kl": KL(
            kl_coef=0.15,
            kl_control=Adaptive(target=6.0, unit="response", horizon=10_000),
        ),
        "batch": Batch(batch_size=512, max_new_tokens=24),
        "num_steps": 1954,
        "optimizer": Optimizer(
            learning_rate=1e-5, optimizer=TFAdam(eps=1e-5), max_grad_norm=None
        ),
        "critic": Critic(
            learning_rate=1e-5, optimizer=TFAdam(eps=1e-5), max_grad_norm=None
        ),
    },
    "n-plus": {
        "method": N_PLUS,
        "kl": KL(kl_coef=0.05),
        "batch": Batch(batch_size=512, max_new_tokens=53),
        "num_steps": 1953,
        "optimizer": Optimizer(
            learning_rate=3e-6, optimizer=Adam(eps=1e-5), max_grad_norm=None
        ),
        "critic": Critic(
            start=REWARD_MODEL,
            learning_rate=3e-6,
            optimizer=Adam(eps=1e-5),
            max_grad_norm=None,
        ),
    },
}
"""--preset NAME: published settings that differ from the defaults."""


command = functools.partial(
    commands.run,
    Config,
    description=__doc__,
    first=("method.num_minibatches",),
    presets=PRESETS,
)
"""`rlhf-jax ppo`: runs the command from a command line."""
