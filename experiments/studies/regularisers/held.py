"""The regularisers of the sweeps' cells, and their authors' claims."""

from __future__ import annotations

from typing import Any, NamedTuple

NONE, KL = "none", "kl"
TO_GO, EMA, MIXTURE = "kl_to_go", "ema", "mixture"
FLAT, DIVERGENCE, COVARIANCE = "gradient_penalty", "dppo", "kl_cov"
# The default of a cell is k1 in the reward.
IN_REWARD = {"penalty.grad_estimator": None, "penalty.placement": "reward"}
HELD = (KL, TO_GO, EMA, MIXTURE, FLAT, DIVERGENCE, COVARIANCE)
NAMES = {
    NONE: "none, β = 0",
    KL: "k1 in the reward",
    TO_GO: "the same, credited to later tokens",
    EMA: "top-k KL to a moving average",
    MIXTURE: "k1 to a mixture of first and current policy",
    FLAT: "gradient regularisation",
    DIVERGENCE: "mask of tokens by total variation",
    COVARIANCE: "KL at the largest covariances",
}


def cells(
    *, kl_coef: float, strength: float, top_k: int, share: float
) -> list[dict[str, Any]]:
    """The axis of a sweep, one cell per name.

    Args:
      kl_coef: β of all KLs; the KL to the mixture has 2β, since half of the mixture is
        the first policy.
      strength: γ of gradient regularisation.
      top_k: number of tokens over which the KL to the moving average is exact.
      share: share of the tokens that KL-Cov penalises.
    """
    options: dict[str, dict[str, Any]] = {
        NONE: {"kl_coef": 0.0},
        KL: {"kl_coef": kl_coef},
        TO_GO: {"kl_coef": kl_coef, "regulariser.kl_to_go": True},
        EMA: {
            "kl_coef": kl_coef,
            "penalty.value_estimator": "exact",
            "penalty.placement": "loss",
            "penalty.top_k": top_k,
            "penalty.tail": "sampled",
            "penalty.importance_weights": "token",
            "regulariser.reference_rate": 0.05,
        },
        MIXTURE: {"kl_coef": 2 * kl_coef, "penalty.reference_share": 0.5},
        FLAT: {"kl_coef": 0.0, "regulariser.gradient_penalty": f"{strength:g}"},
        DIVERGENCE: {"kl_coef": 0.0, "regulariser.surrogate": "dppo"},
        COVARIANCE: {
            "kl_coef": 0.0,
            "regulariser.surrogate": "clip,clip_range=1.0,clip_range_high=1e6",
            "regulariser.token_choice": f"kl_cov,share={share:g}",
        },
    }
    return [{"label": name, **IN_REWARD, **of} for name, of in options.items()]


class Published(NamedTuple):
    """A claim, which holds if the measure of `greater` exceeds that of `less`.

    Measures are those of `figures` at the target, or with last_ at the end.
    """

    source: str
    says: str
    measure: str
    greater: str
    less: str

    @property
    def claim(self) -> str:
        """The claim as an expression for `sweeps.claims.answer`."""
        greater, less = (
            f"{self.measure}(held={name!r})" for name in (self.greater, self.less)
        )
        return f"{greater} > {less}"


FRPO = "Yao et al. 2026, arXiv:2601.10201"
EMA_PG = "Zhang and Ba 2026, arXiv:2602.04417"
DAR = "He et al. 2026, arXiv:2602.11523"
GR = "Ackermann et al. 2026, arXiv:2602.18037"
DPPO = "Qi et al. 2026, arXiv:2602.04879"
COV = "Cui et al. 2025, arXiv:2505.22617"
PUBLISHED = (
    Published(FRPO, "credit to later tokens: lower drift", "kl", KL, TO_GO),
    Published(FRPO, "and higher entropy", "entropy", TO_GO, KL),
    Published(EMA_PG, "a moving average: more is learned", "last_gold", EMA, KL),
    Published(DAR, "a mixed reference: more is learned", "last_gold", MIXTURE, KL),
    Published(DAR, "and no more is hacked", "gold", MIXTURE, KL),
    Published(GR, "flat optima: more gold than a KL", "last_gold", FLAT, KL),
    Published(GR, "and than no KL, at equal proxy", "gold", FLAT, NONE),
    Published(DPPO, "a divergence in place of the clip", "last_gold", DIVERGENCE, NONE),
    Published(COV, "KL-Cov: higher entropy", "entropy", COVARIANCE, NONE),
    Published(COV, "and more is learned", "last_gold", COVARIANCE, NONE),
)
