"""Online DPO on your own model and questions, with a verifier or judge of responses.

    rlhf-jax online-dpo --model MODEL --data train.jsonl --held-out test.jsonl --out OUT

It is `rlhf-jax grpo` with another recipe: the samples of a prompt are ranked by their
scores, and DPO's loss of the best against the worst takes the place of the policy
gradient. The reference is --model as it starts, and --kl-coef is DPO's β. --verifier
module:function is any judge of one response. Data, verifier and run folder are the
same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from rlhf_jax.algorithms.online_dpo import OnlineDPO, OnlineDPORecipe
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.train.grpo.options import VERIFIED_SCREEN, VerifiedConfig
from rlhf_jax.train.grpo.trainer import main

RECIPE = OnlineDPORecipe()
BETA = 0.1  # unless another is asked for
SCREEN = {
    **VERIFIED_SCREEN,
    "Training": (
        *("num_steps", "batch_size", "online_dpo.group_size", "online_dpo.labels"),
        *("learning_rate", "online_dpo.micro_batch_size", "dtype"),
    ),
    "Run": ("out", "resume"),
}
"""The options of --help."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(VerifiedConfig):
    """The options of `rlhf-jax online-dpo`."""

    kl_coef: float | None = None
    """KL coefficient β of DPO's loss, reward units per nat; None is 0.1."""
    online_dpo: Annotated[OnlineDPORecipe, tyro.conf.arg(name="")] = RECIPE
    """Coefficients and choices of online DPO, options without a prefix."""

    def __post_init__(self) -> None:
        if self.reference == "none":
            raise InputError(
                "--reference none: expected start, as DPO is a loss of log-ratios to "
                "its reference; leave it out"
            )
        if self.references:
            raise InputError(
                f"--references: expected none, as DPO's loss has one reference, got "
                f"{', '.join(self.references)}; leave it out"
            )
        if self.staleness:
            raise InputError(
                f"--max-staleness: expected 0 for online DPO, whose loss has no "
                f"ratio to the policy that sampled, got {self.staleness}; leave it out"
            )
        if self.environment is not None:
            raise InputError(
                f"--environment: expected none for online DPO, whose pairs are "
                f"of single responses, got {self.environment}; leave it out, or use "
                f"rlhf-jax grpo"
            )
        if self.samples_outside:
            raise InputError(
                f"--sampler: expected here for online DPO, whose loss has no ratio to "
                f"the log-probs of another sampler, got {self.sampler}; leave it out"
            )
        super().__post_init__()
        checks.positive(kl_coef=self.beta)
        checks.groups(self.batch_size, group_size=self.online_dpo.group_size)
        self.online_dpo.check_batch(self.batch_size)
        if self.packing != "off":
            raise InputError(
                f"--packing {self.packing}: expected off, as a pair is read padded; "
                f"leave it out"
            )

    @property
    def beta(self) -> float:
        """DPO's β."""
        return BETA if self.kl_coef is None else self.kl_coef

    @property
    def trained_share(self) -> float:
        """Share of the responses that are in a pair."""
        return 2 / self.online_dpo.responses_per_pair

    @property
    def recipe(self) -> OnlineDPORecipe:
        """The coefficients and choices of online DPO."""
        return self.online_dpo

    def algorithm(self, **shapes: Any) -> OnlineDPO:
        """The recipe with what a run knows: shapes, optimizer, β and stop tokens."""
        return OnlineDPO(**vars(self.online_dpo), beta=self.beta, **shapes)


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax online-dpo`: from a command line to a run."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        screen=SCREEN,
        prog="rlhf-jax online-dpo",
        argv=argv,
    )
