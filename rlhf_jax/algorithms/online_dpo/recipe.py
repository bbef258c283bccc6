"""The options of online DPO: how samples make pairs, and the loss of a pair."""

# A ClassVar here removes the field of the parent.
# pyright: reportIncompatibleVariableOverride=false

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar, Literal

from rlhf_jax.algorithms.policy_gradient.recipe import CLIP, PolicyRecipe, Surrogate
from rlhf_jax.functional import checks, losses
from rlhf_jax.functional.checks import one_of
from rlhf_jax.functional.errors import refuse
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty

Labels = Literal["ranked", "bradley_terry"]
Pairing = Literal["best_worst", "neighbours"]
OnlineKind = Literal["sigmoid", "ipo", "hinge"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class OnlineDPORecipe(PolicyRecipe):
    """The coefficients and choices of online DPO; an option group of a command line."""

    group_size: int = 2
    """Responses per prompt, in neighbouring rows."""
    pairing: Pairing = "best_worst"
    """Pairs of a group: best_worst takes its best response against its worst,
    neighbours rows 2i against 2i + 1 (an even group_size)."""
    labels: Labels = "ranked"
    """Preference of a pair: ranked always prefers the higher score, whatever the
    difference; bradley_terry prefers it with probability σ of the difference."""
    kind: OnlineKind = "sigmoid"
    """Loss of the pair's margin: sigmoid is DPO's, ipo IPO's, hinge SLiC's."""
    temperature: float = 1.0
    """Temperature that divides the logits in every role."""
    num_epochs: int = 1
    """Number of passes over each batch."""
    micro_batch_size: int | None = None
    """Pairs per forward and backward pass; None is a minibatch."""

    # Options of a policy gradient's loss, which a loss of pairs does not have.
    penalty: ClassVar[Penalty] = IN_REWARD  # the KL is measured by k1
    sampler_correction: ClassVar[None] = None
    surrogate: ClassVar[Surrogate] = CLIP
    off_policy_mask: ClassVar[None] = None
    token_choice: ClassVar[None] = None
    routing_replay: ClassVar[None] = None
    balance_coef: ClassVar[float] = 0.0
    entropy_coef: ClassVar[float] = 0.0
    entropy_control: ClassVar[None] = None
    aggregation: ClassVar[losses.Aggregation] = "token_mean"
    loss_scale_factor: ClassVar[None] = None
    stop_approxkl: ClassVar[None] = None
    max_ratio_mean: ClassVar[None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(pairing=self.pairing, among=("best_worst", "neighbours"))
        one_of(labels=self.labels, among=("ranked", "bradley_terry"))
        one_of(kind=self.kind, among=("sigmoid", "ipo", "hinge"))
        checks.groups(self.group_size, group_size=self.group_size, least=2)
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if self.pairing == "neighbours" and self.group_size % 2:
            yield (
                f"group_size: expected an even number with pairing 'neighbours', got "
                f"{self.group_size}; choose another, or best_worst"
            )
        if self.labels == "bradley_terry" and self.kind != "sigmoid":
            yield (
                f"labels: expected 'ranked' with kind {self.kind!r}, which takes no "
                f"probabilities, got 'bradley_terry'; choose one of them"
            )

    @property
    def rows_per_prompt(self) -> int:
        """Samples of each prompt, in neighbouring rows."""
        return self.group_size

    @property
    def trained_share(self) -> float:
        """Share of the responses that are part of a pair."""
        return 2 / self.responses_per_pair

    @property
    def responses_per_pair(self) -> int:
        """Number of responses sampled for each pair."""
        return self.group_size if self.pairing == "best_worst" else 2

    @property
    def has_ratio(self) -> bool:
        """Whether the loss has a probability ratio that a stale sampler biases: no."""
        return False

    def check_batch(self, responses: int) -> None:
        """Checks that the pairs of a batch divide into mini- and micro-batches."""
        pairs = responses // self.responses_per_pair
        self.minibatch_size(pairs, unit=f"pairs, of {responses} responses,")
