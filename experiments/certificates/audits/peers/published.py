"""Penalties by their published formula: NeMo-RL's, and MaxText's experimental GRPO.

    PYTHON published.py OUT.json

NeMo-RL's package on PyPI is empty (0.0.0), and MaxText's loss requires a whole model.
Files and lines refer to the release or package that `version` names.
"""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp

from certificates.audits.peers import cases
from certificates.audits.peers.cases import FORMULA, Case
from rlhf_jax import audit


def nemo_rl(batch: audit.Batch, *, by_sampler: bool = False) -> jax.Array:
    """Mean over tokens of ratio·k3, clipped to ±10, with the log ratio clipped to ±20.

    The ratio is π over the sampler, or π over itself: 1, with a gradient. It has no
    gradient where the log ratio is clipped.
    """
    now = batch.logprobs
    ratio = jnp.exp(now - (batch.old_logprobs if by_sampler else _held(now)))
    log_ratio = batch.ref_logprobs - now
    x = jnp.clip(log_ratio, -20.0, 20.0)
    ratio = jnp.where(x == log_ratio, ratio, _held(ratio))
    kl = jnp.clip(ratio * (jnp.exp(x) - 1 - x), -10.0, 10.0)
    return jnp.sum(jnp.where(batch.mask, kl, 0.0)) / cases.NUM_TOKENS


def maxtext_experimental(batch: audit.Batch) -> jax.Array:
    """Mean over responses of the mean of k3 over each response's tokens."""
    x = batch.ref_logprobs - batch.logprobs
    k3 = jnp.where(batch.mask, jnp.exp(x) - x - 1, 0.0)
    return jnp.mean(k3.sum(axis=1) / batch.mask.sum(axis=1))


def _held(array: jax.Array) -> jax.Array:
    return jax.lax.stop_gradient(array)


NEMO_RL = ("NeMo-RL", "0.7.0 (81aa43d)")
LOSS, KL = "nemo_rl/algorithms/loss/loss_functions.py", "nemo_rl/algorithms/utils.py"
CASES = (
    Case(
        *NEMO_RL,
        "GRPO, default `reference_policy_kl_type: k3`",
        "0.01; DAPO recipes: 0",
        f"{LOSS}:122, {LOSS}:425, {KL}:89",
        nemo_rl,
        FORMULA,
    ),
    Case(
        *NEMO_RL,
        "GRPO, `use_on_policy_kl_approximation`",
        "",
        f"{LOSS}:144, {LOSS}:421",
        lambda batch: nemo_rl(batch, by_sampler=True),
        FORMULA,
    ),
    Case(
        "MaxText",
        "0.2.5",
        "`experimental.rl` GRPO",
        "0.04",
        "maxtext/experimental/rl/grpo.yml:18, "
        "maxtext/experimental/rl/grpo_trainer.py:219",
        maxtext_experimental,
        FORMULA,
    ),
)


def main() -> None:
    cases.write(CASES, sys.argv[1:])


if __name__ == "__main__":
    main()
