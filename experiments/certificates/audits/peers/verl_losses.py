"""verl's penalties, by its `kl_penalty` and `agg_loss`.

PYTHON verl_losses.py OUT.json
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import sys
from typing import Any

import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import agg_loss, kl_penalty
from verl.workers.config import ActorConfig

from certificates.audits.peers import cases
from certificates.audits.peers.cases import Case
from rlhf_jax import audit

CORE, ACTOR = "verl/trainer/ppo/core_algos.py", "verl/workers/config/actor.py"


def in_loss(kind: str, *, mean: str = "token-mean") -> audit.Loss:
    """The KL term of `verl.workers.utils.losses.ppo_loss`."""

    def loss(batch: audit.Batch) -> torch.Tensor:
        logprobs: Any = batch.logprobs
        return agg_loss(
            loss_mat=kl_penalty(logprobs, batch.ref_logprobs, kind),
            loss_mask=batch.mask,
            loss_agg_mode=mean,
            batch_num_tokens=cases.NUM_TOKENS,
        )

    return audit.from_torch(loss)


def in_reward(kind: str) -> audit.Loss:
    """The KL of `apply_kl_penalty`, as a policy gradient without a critic."""

    def loss(batch: audit.Batch) -> torch.Tensor:
        logprobs: Any = batch.logprobs
        mask: Any = batch.mask
        kl = kl_penalty(logprobs, batch.ref_logprobs, kind).detach() * mask
        to_go = kl.flip(1).cumsum(1).flip(1)
        return (mask * logprobs * to_go).sum() / cases.NUM_TOKENS

    return audit.from_torch(loss)


def main() -> None:
    torch.set_num_threads(1)
    fields = ActorConfig.__dataclass_fields__
    default, mean = fields["kl_loss_type"].default, fields["loss_agg_mode"].default
    assert (default, mean) == ("low_var_kl", "token-mean")
    assert AlgoConfig.__dataclass_fields__["kl_penalty"].default == "kl"
    shared = ("verl", cases.version("verl"))
    clamped = (CORE, "return torch.clamp(kld, min=-10, max=10)")
    through = (CORE, "return backward_score - backward_score.detach() + forward_sc")

    def of_type(option: str, kind: str, beta: str, *places: tuple[str, str]) -> Case:
        return Case(*shared, option, beta, cases.lines(*places), in_loss(kind))

    listed = [
        of_type(
            "default `kl_loss_type=low_var_kl`",
            "low_var_kl",
            "off, 0.001; GRPO examples: on, mostly 0.001",
            (ACTOR, "kl_loss_type: str = "),
            clamped,
        ),
        of_type("`kl_loss_type=low_var_kl+`", "low_var_kl+", "", through),
        of_type("`kl_loss_type=kl`", "kl", "", (CORE, "return logprob - ref_logprob")),
        of_type(
            "`kl_loss_type=mse`",
            "mse",
            "",
            (CORE, "return 0.5 * (logprob - ref_logprob).square()"),
        ),
        of_type(
            "`kl_loss_type=abs`", "abs", "", (CORE, "return (logprob - ref_logprob).ab")
        ),
        Case(
            *shared,
            "default `algorithm.kl_penalty=kl`, in the reward",
            "off, 0.001",
            cases.lines(
                ("verl/trainer/config/algorithm.py", 'kl_penalty: str = "kl"'),
                (CORE, "return logprob - ref_logprob"),
            ),
            in_reward("kl"),
        ),
    ]
    cases.write(listed, sys.argv[1:])


if __name__ == "__main__":
    main()
