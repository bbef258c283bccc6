"""Tunix's penalties by its own functions, and MaxText's, whose RL trainer is Tunix's.

    PYTHON tunix_losses.py OUT.json

MaxText needs Python 3.12; its settings are quoted from its package 0.2.5.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
from tunix.rl import common
from tunix.rl.grpo.grpo_learner import GRPOConfig
from tunix.rl.ppo.ppo_learner import PPOConfig

from certificates.audits.peers import cases
from certificates.audits.peers.cases import Case
from rlhf_jax import audit

LEARNER, COMMON = "tunix/rl/grpo/grpo_learner.py", "tunix/rl/common.py"
FORMULAS = {
    "kl": "kl = per_token_logps - ref_per_token_logps",
    "mse_kl": "kl = 0.5 * jnp.square(per_token_logps - ref_per_token_logps)",
    "low_var_kl": "kl = jnp.exp(diff) - diff - 1",
}


def in_loss(config: GRPOConfig) -> audit.Loss:
    """The KL term of `grpo_loss_fn`, with the config's mode, clamp and mean."""

    def loss(batch: audit.Batch) -> jax.Array:
        kl = common.compute_kl_divergence(
            batch.logprobs,
            batch.ref_logprobs,
            config.kl_loss_mode,
            clamp_value=config.kl_clamp_value,
        )
        return common.aggregate_loss(kl, batch.mask, config.loss_agg_mode)

    return loss


def in_reward(config: PPOConfig) -> audit.Loss:
    """The KL of the PPO learner's rewards, as a policy gradient without a critic."""

    def loss(batch: audit.Batch) -> jax.Array:
        kl = common.compute_kl_divergence(
            batch.logprobs,
            batch.ref_logprobs,
            method=config.kl_method,
            clamp_value=config.kl_clamp_value,
        )
        kl = jax.lax.stop_gradient(kl * batch.mask)
        to_go = jnp.cumsum(kl[:, ::-1], axis=1)[:, ::-1]
        return jnp.sum(batch.mask * batch.logprobs * to_go) / cases.NUM_TOKENS

    return loss


def main() -> None:
    version = cases.version("google-tunix")

    def of_mode(option: str, mode: str, coefficient: str) -> Case:
        where = cases.lines(
            (LEARNER, 'kl_loss_mode: str = "kl"'), (COMMON, FORMULAS[mode])
        )
        loss = in_loss(GRPOConfig(kl_loss_mode=mode))
        return Case("Tunix", version, option, coefficient, where, loss)

    assert GRPOConfig().kl_loss_mode == "kl"
    assert PPOConfig().kl_method == "low_var_kl"
    listed = [
        of_mode(
            "GRPO, default `kl_loss_mode=kl`",
            "kl",
            f"{GRPOConfig().beta:g}; GSM8K recipes: 0.08",
        ),
        of_mode(
            "GRPO, `kl_loss_mode=low_var_kl`",
            "low_var_kl",
            "DeepScaleR, FrozenLake, DeepSWE recipes: 0, 0, 0.001",
        ),
        of_mode("GRPO, `kl_loss_mode=mse_kl`", "mse_kl", "Qwen3 demo: 0.04"),
        Case(
            "Tunix",
            version,
            "PPO, default `kl_method=low_var_kl`, in the reward",
            f"{PPOConfig().beta:g}",
            cases.lines(
                ("tunix/rl/ppo/ppo_learner.py", 'kl_method: str = "low_var_kl"'),
                (COMMON, FORMULAS["low_var_kl"]),
            ),
            in_reward(PPOConfig()),
        ),
        Case(
            "MaxText",
            "0.2.5",
            "GRPO recipe `rl.yml`, Tunix's default mode",
            "0.08",
            "maxtext/configs/post_train/rl.yml:48, "
            "maxtext/trainers/post_train/rl/train_rl.py:591",
            in_loss(GRPOConfig(loss_agg_mode="sequence-mean-token-mean")),
        ),
    ]
    cases.write(listed, sys.argv[1:])


if __name__ == "__main__":
    main()
