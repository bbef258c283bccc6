"""OpenRLHF's penalties, by its `compute_approx_kl` and `aggregate_loss`.

    PYTHON openrlhf_losses.py OUT.json

`openrlhf.models` imports DeepSpeed and FlashAttention, which these two functions do not
use. Empty modules replace DeepSpeed and the package's `__init__`.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import openrlhf
import torch

from certificates.audits.peers import cases
from certificates.audits.peers.cases import Case
from rlhf_jax import audit

sys.modules["deepspeed"] = ModuleType("deepspeed")
sys.modules["openrlhf.models"] = package = ModuleType("openrlhf.models")
package.__path__ = [str(Path(str(openrlhf.__file__)).parent / "models")]
compute_approx_kl = importlib.import_module("openrlhf.models.utils").compute_approx_kl
aggregate_loss = importlib.import_module("openrlhf.models.loss").aggregate_loss

MODELS, OPTIONS = "openrlhf/models/utils.py", "openrlhf/cli/train_ppo_ray.py"


def in_loss(estimator: str, *, unbiased: bool = False) -> audit.Loss:
    """The KL term of the actor's training step."""

    def loss(batch: audit.Batch) -> torch.Tensor:
        logprobs: Any = batch.logprobs
        kl = compute_approx_kl(
            logprobs,
            batch.ref_logprobs,
            log_probs_old=batch.old_logprobs,
            kl_estimator=estimator,
            unbiased_gradient=unbiased,
        )
        return aggregate_loss(kl, batch.mask, batch_num_tokens=cases.NUM_TOKENS)

    return audit.from_torch(loss)


def in_reward(estimator: str) -> audit.Loss:
    """The KL of the experience maker, as a policy gradient without a critic."""

    def loss(batch: audit.Batch) -> torch.Tensor:
        logprobs: Any = batch.logprobs
        mask: Any = batch.mask
        kl = compute_approx_kl(logprobs, batch.ref_logprobs, kl_estimator=estimator)
        to_go = (kl.detach() * mask).flip(1).cumsum(1).flip(1)
        return (mask * logprobs * to_go).sum() / cases.NUM_TOKENS

    return audit.from_torch(loss)


def main() -> None:
    torch.set_num_threads(1)
    shared = ("OpenRLHF", cases.version("openrlhf"))
    estimator = (OPTIONS, '"--algo.kl.estimator",')
    k1 = (MODELS, "value = log_ratio  # log_ratio")
    k2 = (MODELS, "value = log_ratio**2 / 2.0")
    k3 = (MODELS, "value = (-k3_log_ratio).exp() - 1 + k3_log_ratio")
    listed = [
        Case(
            *shared,
            "default `estimator k1`, in the reward",
            "0.01; PPO scripts: 0.01",
            cases.lines(estimator, k1),
            in_reward("k1"),
        ),
        Case(
            *shared,
            "`use_loss`, default `estimator k1`",
            "warns, advising k2 or k3",
            cases.lines((OPTIONS, "to 'k2' or 'k3' when using KL as a loss"), k1),
            in_loss("k1"),
        ),
        Case(
            *shared,
            "`use_loss`, `estimator k2`",
            "REINFORCE and ProRL scripts: 1e-5, 1e-4",
            cases.lines(k2),
            in_loss("k2"),
        ),
        Case(
            *shared,
            "`use_loss`, `estimator k3`",
            "DAPO script: 0.001",
            cases.lines(k3),
            in_loss("k3"),
        ),
        Case(
            *shared,
            "`use_loss`, `unbiased_gradient`",
            "",
            cases.lines((MODELS, "grad_surrogate = w * (log_ratio**2 / 2.0)")),
            in_loss("k1", unbiased=True),
        ),
    ]
    cases.write(listed, sys.argv[1:])


if __name__ == "__main__":
    main()
