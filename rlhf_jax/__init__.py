"""RLHF in JAX as pure functions: a frozen reference, a KL penalty, PPO.

The names below are the public modules: `from rlhf_jax import kl, losses, ppo`. Each is
imported on first use, so that the array functions need neither transformers nor orbax.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlhf_jax.algorithms import (
        batch,
        distill,
        dpo,
        grpo,
        nash_md,
        online_dpo,
        ppo,
        reinforce,
        sft,
        state,
    )
    from rlhf_jax.checkpoints import hf
    from rlhf_jax.functional import (
        advantages,
        aggregation,
        best_of_n,
        kl,
        logprobs,
        losses,
        masked,
        token_rewards,
    )
    from rlhf_jax.functional.kl import control as kl_control
    from rlhf_jax.functional.kl import penalty as kl_penalty
    from rlhf_jax.models import config, decoder, lora
    from rlhf_jax.models.generation import decode
    from rlhf_jax.roles import critic, policy, rewards
    from rlhf_jax.roles.reference import drift, fingerprint, frozen
    from rlhf_jax.roles.rewards import verifiers

__version__ = "0.2.0"

# Each package imports only from itself and from packages before it.
PACKAGES = (
    "functional",
    "audit",
    "models",
    "roles",
    "algorithms",
    "devices",
    "extensions",
    "runs",
    "data",
    "checkpoints",
    "verification",
    "environments",
    "samplers",
    "planning",
    "inspection",
    "sweeps",
    "evaluation",
    "reports",
    "train",
)

_MODULES = {
    "masked": "functional.masked",
    "logprobs": "functional.logprobs",
    "kl": "functional.kl",
    "kl_penalty": "functional.kl.penalty",
    "kl_control": "functional.kl.control",
    "token_rewards": "functional.token_rewards",
    "advantages": "functional.advantages",
    "aggregation": "functional.aggregation",
    "losses": "functional.losses",
    "best_of_n": "functional.best_of_n",
    "config": "models.config",
    "decoder": "models.decoder",
    "lora": "models.lora",
    "decode": "models.generation.decode",
    "policy": "roles.policy",
    "critic": "roles.critic",
    "frozen": "roles.reference.frozen",
    "fingerprint": "roles.reference.fingerprint",
    "drift": "roles.reference.drift",
    "rewards": "roles.rewards",
    "verifiers": "roles.rewards.verifiers",
    "batch": "algorithms.batch",
    "state": "algorithms.state",
    "ppo": "algorithms.ppo",
    "grpo": "algorithms.grpo",
    "reinforce": "algorithms.reinforce",
    "dpo": "algorithms.dpo",
    "online_dpo": "algorithms.online_dpo",
    "nash_md": "algorithms.nash_md",
    "distill": "algorithms.distill",
    "sft": "algorithms.sft",
    "hf": "checkpoints.hf",
}
__all__ = [
    "advantages",
    "aggregation",
    "batch",
    "best_of_n",
    "config",
    "critic",
    "decode",
    "decoder",
    "distill",
    "dpo",
    "drift",
    "fingerprint",
    "frozen",
    "grpo",
    "hf",
    "kl",
    "kl_control",
    "kl_penalty",
    "logprobs",
    "lora",
    "losses",
    "masked",
    "nash_md",
    "online_dpo",
    "policy",
    "ppo",
    "reinforce",
    "rewards",
    "sft",
    "state",
    "token_rewards",
    "verifiers",
]


def __getattr__(name: str) -> ModuleType:
    if name not in _MODULES:
        raise AttributeError(
            f"rlhf_jax has no name {name!r}; it has {', '.join(_MODULES)}"
        )
    return importlib.import_module(f"rlhf_jax.{_MODULES[name]}")


def __dir__() -> list[str]:
    return [*__all__, "PACKAGES", "__version__"]
