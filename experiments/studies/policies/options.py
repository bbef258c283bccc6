"""Options of one policy on the language of the quickstart."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import quickstart

from rlhf_jax import kl_control, rewards
from rlhf_jax.algorithms.ppo.loss import Whiten
from rlhf_jax.functional import checks, losses
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty
from studies.policies import programs
from studies.policies.regularisers import NO_REGULARISER, Regulariser

Algorithm = Literal["ppo", "grpo", "rloo", "dpo", "best_of_n"]
GROUPS = ("grpo", "rloo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(quickstart.Config):
    algorithm: Algorithm = "ppo"
    """Algorithm that trains the policy. best_of_n trains none: it chooses among samples
    of the reference."""
    penalty: Penalty = IN_REWARD
    """Estimator and placement of the KL penalty, for PPO, GRPO and RLOO."""
    regulariser: Regulariser = NO_REGULARISER
    """Regulariser in addition to the penalty, for GRPO and RLOO."""
    aggregation: losses.Aggregation = "token_mean"
    """Mean of the token losses, for PPO, GRPO and RLOO."""
    whiten_advantages: Whiten = "rollout"
    """Rows over which PPO's advantages are whitened; None disables it."""
    lam: float = 0.95
    """λ of PPO's GAE."""
    group_size: int = 8
    """Responses per prompt of GRPO and RLOO."""
    dpo_learning_rate: float = 1e-4
    """Learning rate of DPO; falls to 0 linearly."""
    best_of: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    """The n of best-of-n; each divides the last."""
    responses_per_prompt: int = 1
    """Responses to each held-out prompt among the --num-evaluated at the end."""
    look: Literal["held_out", "training"] = "held_out"
    """Responses that are evaluated during training: --batch-size responses to held-out
    prompts, or those that the policy was trained on."""
    staleness: int = 0
    """Iterations k that the sampler is behind: step s learns from responses of the
    policy of step max(0, s - k); for PPO, GRPO and RLOO."""
    correction: Literal["truncate", "ratio", "none"] = "truncate"
    """Correction for an older sampler: truncated importance weights; only the clipped
    ratio to its log-probs; or none, which treats the responses as on-policy."""
    sample_every: int = 5
    """Iterations between evaluations, which are rows of samples.jsonl."""
    snapshot_every: int = 20
    """Steps between snapshots."""
    num_members: int = 1
    """Reward models per seed; they differ in their heads and the order of pairs."""
    combine: rewards.Combine = "mean"
    """How the scores of several reward models are combined."""
    std_coef: float = 1.0
    """c of --combine mean_minus_std, the penalty on the members' disagreement."""
    prepared: Path | None = None
    """Folder of the reference and reward models of each seed, which are trained once
    for all runs with the same training options; None is OUT/prepared."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            dpo_learning_rate=self.dpo_learning_rate,
            num_members=self.num_members,
            responses_per_prompt=self.responses_per_prompt,
        )
        checks.non_negative(std_coef=self.std_coef)
        checks.fraction(lam=self.lam)
        if self.num_members == 1 and self.combine != "mean":
            raise checks.InputError(
                f"--combine {self.combine}: expected several reward models, got one; "
                f"add --num-members 3"
            )
        if self.num_evaluated % self.responses_per_prompt:
            raise checks.InputError(
                f"--num-evaluated: expected a multiple of the "
                f"{self.responses_per_prompt} of --responses-per-prompt, got "
                f"{self.num_evaluated}; change either"
            )
        if self.regulariser != NO_REGULARISER and self.algorithm not in GROUPS:
            raise checks.InputError(
                f"--regulariser: expected none with --algorithm {self.algorithm}, got "
                f"{self.regulariser}; leave it out, or choose grpo or rloo"
            )
        checks.non_negative(staleness=self.staleness)
        if not self.staleness and self.correction != "truncate":
            raise checks.InputError(
                f"--correction {self.correction}: expected --staleness above 0 with "
                f"it, got 0, where there is nothing to correct for; leave it out"
            )
        match self.algorithm:
            case "ppo":
                pass
            case "grpo" | "rloo":
                checks.groups(self.batch_size, group_size=self.group_size, least=2)
            case "dpo" | "best_of_n":
                self._check_offline()

    def _check_offline(self) -> None:
        if self.staleness:
            raise checks.InputError(
                f"--staleness {self.staleness}: expected 0 with --algorithm "
                f"{self.algorithm}, which samples with no policy that it trains; leave "
                f"it out"
            )
        if self.kl_control != kl_control.CONSTANT:
            raise checks.InputError(
                f"--kl-control: expected none with --algorithm {self.algorithm}, which "
                f"has one β at most, got {self.kl_control}; leave it out"
            )
        if self.penalty != IN_REWARD or self.look == "training":
            raise checks.InputError(
                f"--penalty, --look training: expected neither with --algorithm "
                f"{self.algorithm}, which trains on no samples of its own; leave it out"
            )
        if self.algorithm == "best_of_n":
            rising = sorted(set(self.best_of))
            if not rising or rising[0] < 2 or any(rising[-1] % n for n in rising):
                raise checks.InputError(
                    f"--best-of: expected numbers above 1 that divide the largest of "
                    f"them, got {self.best_of}; choose powers of 2"
                )
            return
        checks.positive(kl_coef=self.kl_coef)  # DPO divides by it
        if self.batch_size % (2 * self.num_minibatches):
            raise checks.InputError(
                f"--batch-size: expected pairs of responses in each of the "
                f"{self.num_minibatches} minibatches of DPO, got {self.batch_size} "
                f"responses; change either"
            )

    def of_programs(self) -> Config:
        """The options on which compiled programs depend; the others have defaults.

        Runs with equal values share their programs; they may differ in seed, β and
        files. β stays if it is part of DPO's loss or of a controller's bounds.
        """
        bound = self.algorithm == "dpo" or self.kl_control != kl_control.CONSTANT
        kl_coef = self.kl_coef if bound else 1.0
        return dataclasses.replace(
            programs.without_place(self),
            prepared=None,
            kl_coef=kl_coef,
            staleness=min(self.staleness, 1),  # whether there is a queue
        )

    def of_measuring(self) -> Config:
        """The options on which sampling and measuring responses depend."""
        return dataclasses.replace(
            self.of_programs(),
            algorithm="best_of_n",
            kl_control=kl_control.CONSTANT,
            kl_coef=1.0,
            penalty=IN_REWARD,
            regulariser=NO_REGULARISER,
            aggregation="token_mean",
            whiten_advantages="rollout",
            lam=0.95,
            staleness=0,
            correction="truncate",
            look="held_out",
        )

    def of_preparation(self, folder: Path) -> quickstart.Config:
        """The quickstart whose first two stages prepare the runs of this seed.

        Options of later stages have their defaults, so that runs that differ only in
        them share the preparation.
        """
        return quickstart.Config(
            out=folder,
            seed=self.seed,
            resume=True,  # or start
            progress=self.progress,
            sft_steps=self.sft_steps,
            sft_batch_size=self.sft_batch_size,
            sft_learning_rate=self.sft_learning_rate,
            reward_steps=self.reward_steps,
            reward_learning_rate=self.reward_learning_rate,
            num_pairs=self.num_pairs,
            label_noise=self.label_noise,
            temperature=self.temperature,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_evaluated=self.num_evaluated,
        )
