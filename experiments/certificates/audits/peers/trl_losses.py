"""TRL's penalty: the unchanged `GRPOTrainer._compute_loss`, on a stand-in trainer.

    PYTHON trl_losses.py OUT.json

The stand-in has the defaults of `GRPOConfig`, returns the batch's log-probs as the
model's, and sets β = 1. Advantages are 0, so that the loss is the KL term.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import collections
import dataclasses
import sys
from types import SimpleNamespace
from typing import Any

import torch
from trl import GRPOConfig, GRPOTrainer

from certificates.audits.peers import cases
from certificates.audits.peers.cases import Case
from rlhf_jax import audit

CONFIG, TRAINER = "trl/trainer/grpo_config.py", "trl/trainer/grpo_trainer.py"
DEFAULTS = {field.name: field.default for field in dataclasses.fields(GRPOConfig)}


def in_loss(**options: Any) -> audit.Loss:
    """TRL's loss with these options of `GRPOConfig`."""
    settings = SimpleNamespace(**DEFAULTS | options)
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x
    )

    def loss(batch: audit.Batch) -> torch.Tensor:
        logprobs: Any = batch.logprobs
        mask: Any = batch.mask
        tokens = torch.zeros_like(logprobs, dtype=torch.long)
        trainer = SimpleNamespace(
            args=settings,
            accelerator=accelerator,
            model=SimpleNamespace(training=False),  # no gradient accumulation
            beta=1.0,
            loss_type=settings.loss_type,
            importance_sampling_level=settings.importance_sampling_level,
            epsilon_low=settings.epsilon,
            epsilon_high=settings.epsilon,
            top_entropy_quantile=settings.top_entropy_quantile,
            off_policy_mask_threshold=settings.off_policy_mask_threshold,
            use_vllm=False,
            aux_loss_enabled=False,
            use_adaptive_entropy=False,
            _entropy_bonus_enabled=False,
            _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
            _get_per_token_logps_and_entropies=lambda *_, **__: (
                *(logprobs, torch.zeros_like(logprobs), None),
            ),
        )
        inputs = {
            "prompt_ids": tokens[:, :0],
            "prompt_mask": tokens[:, :0],
            "completion_ids": tokens,
            "completion_mask": mask.int(),
            "advantages": torch.zeros(len(tokens)),
            "old_per_token_logps": batch.old_logprobs,
            "ref_per_token_logps": batch.ref_logprobs,
            "num_items_in_batch": torch.tensor(float(cases.NUM_TOKENS)),
        }
        return GRPOTrainer._compute_loss(trainer, None, inputs)

    return audit.from_torch(loss)


def main() -> None:
    torch.set_num_threads(1)
    assert DEFAULTS["beta"] == 0.0
    assert DEFAULTS["use_bias_correction_kl"] is True
    assert DEFAULTS["loss_type"] == "dapo"
    weighted = (TRAINER, "per_token_kl = per_token_kl * coef_1")
    formula = (TRAINER, "torch.exp(ref_per_token_logps - per_token_logps) - (ref_per")
    default = (CONFIG, "use_bias_correction_kl: bool = field(")
    shared = ("TRL", cases.version("trl"))
    listed = [
        Case(
            *shared,
            "GRPO, default `use_bias_correction_kl=True`",
            "0",
            cases.lines(default, weighted),
            in_loss(),
        ),
        Case(
            *shared,
            "GRPO, `use_bias_correction_kl=False`",
            "0",
            cases.lines(formula),
            in_loss(use_bias_correction_kl=False),
        ),
        Case(
            *shared,
            "GRPO, `loss_type=grpo`",
            "0",
            cases.lines((TRAINER, "loss = ((per_token_loss * mask).sum(-1) / mask")),
            in_loss(loss_type="grpo"),
        ),
    ]
    cases.write(listed, sys.argv[1:])


if __name__ == "__main__":
    main()
