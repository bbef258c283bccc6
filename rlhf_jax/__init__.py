"""RLHF in JAX as pure functions: a frozen reference, a KL penalty, PPO.

`ORDER` is the house: a module imports only modules that stand before it. Every
module below is importable from here (`from rlhf_jax import kl, losses, ppo`) and is
loaded on first use, so that the arithmetic needs neither transformers nor orbax.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

ORDER: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "functional",
        (
            "checks",
            "masked",
            "ratios",
            "logprob_chunks",
            "logprobs",
            "kl_chunks",
            "kl",
            "best_of_n",
            "kl_gradients",
            "kl_penalty",
            "kl_controllers",
            "kl_control",
            "token_rewards",
            "advantages",
            "aggregation",
            "preference_losses",
            "losses",
        ),
    ),
    (
        "models",
        (
            "config",
            "axes",
            "layout",
            "leaves",
            "rotary",
            "blocks",
            "caches",
            "decoder",
            "heads",
            "lora",
            "keys",
            "option_types",
            "rope_options",
            "window_options",
            "gpt2",
            "gpt_neox",
            "llama",
            "mistral",
            "phi3",
            "qwen2",
            "qwen3",
            "gemma2",
            "gemma3",
            "known",
            "sampling",
            "slots",
            "decode",
        ),
    ),
    (
        "roles",
        (
            "storage",
            "fingerprint",
            "frozen",
            "lifecycle",
            "drift",
            "adapted",
            "policy",
            "critic",
            "text_rewards",
            "rewards",
            "verifiers",
        ),
    ),
    (
        "stages",
        (
            "batch",
            "state",
            "optimizers",
            "rollout",
            "score",
            "selection",
            "score_shaping",
            "experience",
            "sft",
            "group_experience",
            "policy_config",
            "policy_terms",
            "policy_update",
            "policy_gradient",
            "ppo_config",
            "ppo_loss",
            "ppo",
            "critic_apart",
            "grpo_config",
            "grpo",
            "dpo",
            "self_check",
            "evaluation",
            "train_reward",
        ),
    ),
    (
        "runtime",
        (
            "write_errors",
            "run_lock",
            "processes",
            "sharding",
            "row_sharding",
            "template_worker",
            "templates",
            "chat",
            "hub",
            "data",
            "encoding",
            "batches",
            "packing",
            "shards",
            "hf",
            "peft",
            "pretrained",
            "frozen_models",
            "critic_devices",
            "integrity",
            "snapshot_folder",
            "snapshot",
            "proof",
            "resume",
            "run_folder",
            "precomputed",
            "code_values",
            "code_guard",
            "code_runner",
            "code_sandbox",
            "code_remote",
            "code_link",
            "code_judge",
            "code_folder",
            "code_verifier",
            "verifier_worker",
            "verification",
            "deadline",
            "alarms",
            "metrics",
            "report",
            "drift_report",
            "token_prices",
            "token_kl",
            "chips",
            "hlo",
            "program_cost",
            "compiled",
            "workload",
            "memory",
            "memory_check",
            "measured",
            "plan_tables",
            "plan",
            "program_cache",
            "cli",
            "run",
            "main",
        ),
    ),
)

_FOLDER_OF = {module: folder for folder, modules in ORDER for module in modules}
__all__ = ["ORDER", "__version__", *_FOLDER_OF]


def __getattr__(name: str) -> Any:
    if name not in _FOLDER_OF:
        raise AttributeError(
            f"rlhf_jax has no module {name!r}; it has {', '.join(_FOLDER_OF)}"
        )
    return importlib.import_module(f"rlhf_jax.{_FOLDER_OF[name]}.{name}")


def __dir__() -> list[str]:
    return __all__
