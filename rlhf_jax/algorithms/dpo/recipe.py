"""The options of DPO, and which of them may be combined."""

from __future__ import annotations

import dataclasses
from typing import Literal, cast, get_args

from rlhf_jax.algorithms.state import Optimizer
from rlhf_jax.functional import checks, preference_losses
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import expect_none
from rlhf_jax.functional.preference_losses import DPOKind
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA

PreferenceKind = Literal["sigmoid", "robust", "ipo", "hinge", "simpo", "orpo", "kto"]
"""Loss of preferences: one of `DPOKind`, or SimPO, ORPO or KTO."""
REFERENCE_FREE = ("simpo", "orpo")  # without a reference, and with mean log-probs


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPORecipe:
    """The coefficients and choices of DPO; an option group of a command line."""

    beta: float = 0.1
    """KL coefficient β, reward units per nat. For simpo it is the scale of the reward,
    for orpo the weight λ of the odds-ratio term."""
    kind: PreferenceKind = "sigmoid"
    """Loss: sigmoid is DPO's, hinge SLiC's. simpo and orpo have no reference."""
    label_smoothing: float = 0.0
    """Probability that a preference is reversed: sigmoid then becomes cDPO, and robust
    corrects for it."""
    target_margin: float = 0.0
    """With simpo: margin γ by which the chosen response should lead, reward units."""
    desirable_weight: float = 1.0
    """With kto: weight λ_D of desirable responses."""
    undesirable_weight: float = 1.0
    """With kto: weight λ_U of undesirable responses."""
    token_mean: bool = False
    """Whether IPO takes the mean log-prob of a response's tokens instead of their sum;
    beta is then reward units per nat per token."""
    temperature: float = 1.0
    """Temperature that divides the logits of policy and reference."""
    micro_batch_size: int | None = None
    """Rows per forward and backward pass; None is the whole batch."""

    def __post_init__(self) -> None:
        checks.one_of(kind=self.kind, among=get_args(PreferenceKind))
        if self.kind in get_args(DPOKind):
            preference_losses.check_dpo(
                beta=self.beta,
                kind=self.dpo_kind,
                label_smoothing=self.label_smoothing,
            )
        checks.positive(
            beta=self.beta,
            temperature=self.temperature,
            desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight,
        )
        checks.non_negative(target_margin=self.target_margin)
        if self.token_mean and self.kind != "ipo":
            raise InputError(
                f"token_mean: expected False with kind {self.kind!r}, whose implicit "
                f"reward is β log π/π_ref of whole responses, got True; leave it out, "
                f"or choose ipo"
                if self.kind not in REFERENCE_FREE
                else f"token_mean: expected False with kind {self.kind!r}, which "
                f"always takes the mean over tokens, got True; leave it out"
            )
        self._check_read()

    def _check_read(self) -> None:
        """Raises InputError for an option that the kind does not read."""
        unread = {"label_smoothing": self.label_smoothing != 0.0}
        if self.kind in get_args(DPOKind):
            unread = {}
        unread["target_margin"] = self.target_margin != 0.0 and self.kind != "simpo"
        for name in ("desirable_weight", "undesirable_weight"):
            unread[name] = getattr(self, name) != 1.0 and self.kind != "kto"
        expect_none(
            f"with kind {self.kind!r}, which does not read it",
            advice="leave it out, or choose another kind",
            **{name: getattr(self, name) for name, is_set in unread.items() if is_set},
        )

    def check_reference_free(self) -> None:
        """Raises InputError for a kind that needs its reference, or never has one."""
        if self.kind in get_args(DPOKind):
            preference_losses.check_dpo(
                beta=self.beta,
                kind=self.dpo_kind,
                label_smoothing=self.label_smoothing,
                reference_free=True,
            )
            return
        raise InputError(
            "reference_free: expected False with kind 'kto', whose rewards are "
            "log-ratios to the reference, got True; leave it out"
            if self.kind == "kto"
            else f"reference_free: expected False with kind {self.kind!r}, which "
            f"has no reference anyway, got True; leave it out"
        )

    @property
    def mean_logprobs(self) -> bool:
        """Whether the loss reads means over tokens instead of sums."""
        return self.token_mean or self.kind in REFERENCE_FREE

    @property
    def dpo_kind(self) -> DPOKind:
        """The kind as `dpo_loss` takes it; InputError for simpo, orpo and kto."""
        checks.one_of(kind=self.kind, among=get_args(DPOKind))
        return cast("DPOKind", self.kind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPO(DPORecipe):
    """A recipe with its shape and optimizer; hashable, so static under `jax.jit`.

    `DPO(**vars(recipe), model=...)` makes one of a `DPORecipe`.
    """

    model: ModelConfig  # of the policy, and of a reference without its own shape
    optimizer: Optimizer
    lora: LoRA | None = None  # adapters over a base; None trains every parameter
    reference_free: bool = False  # leave the reference out, for comparison

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference_free:
            self.check_reference_free()

    @property
    def has_reference(self) -> bool:
        """Whether the loss reads a reference."""
        return not self.reference_free and self.kind not in REFERENCE_FREE


SIMPO = DPORecipe(kind="simpo", beta=2.0, target_margin=1.0)
"""Meng et al. 2024, arXiv:2405.14734, for Llama 3 8B after SFT: β 2, γ/β 0.5.

Source: the table of the authors' repository, princeton-nlp/SimPO.
"""

ORPO = DPORecipe(kind="orpo", beta=0.1)
"""Hong et al. 2024, arXiv:2403.07691, for Mistral 7B; it starts from the base model.

Source: `scripts/run_mistral_orpo_beta.sh` of the authors' repository, xfactlab/orpo.
"""
