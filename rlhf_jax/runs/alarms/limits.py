"""The limits beyond which alarms are raised: an option group."""

from __future__ import annotations

import dataclasses

from rlhf_jax.functional import checks

ADVICE = {
    "weight_drift": "raise kl_coef or lower the policy's learning rate",
    "kl": "raise kl_coef, or shorten kl_horizon where it is adapted",
    "reward_hacking": "go back to a snapshot before the judge fell, and raise kl_coef "
    "or train the reward model on these responses",
    "mode_collapse_distinct": "read the samples; raise kl_coef, or take more prompts",
    "mode_collapse_entropy": "raise kl_coef or lower the policy's learning rate",
    "language_degradation": "read the samples: the reference finds them ever less "
    "likely; raise kl_coef",
    "forgetting": "raise kl_coef, or mix in a language-model loss on such text",
    "trust_distance": "see whether the sampler has these weights, this temperature and "
    "these tokens",
    "trust_outliers": "see whether it reports the tokens that it drew, in their order",
    "trust_weight": "its log-probs are not those that the tokens were drawn with: see "
    "its temperature, and that it reports processed log-probs",
    "trust_entropy": "it prefers likely tokens: see that it samples neither greedily "
    "nor by top-p, top-k or min-p",
    "trust_duplicates": "see that it takes a seed for each row",
    "trust_age": "it kept old weights: see that it loads every version",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """When to raise alarms; None is off. "At first" is at the first step measured."""

    window: int = 10
    """Number of values in a mean: of steps, or of steps with a judge."""
    drift: float | None = 0.5
    """Upper limit of the relative weight drift."""
    kl: float | None = None
    """Upper limit of the KL, nats per response."""
    kl_over_target: float | None = 1.5
    """Upper limit of the KL, in multiples of its target where it has one."""
    hacking: float | None = 2.0
    """Number of standard errors by which the reward must rise, and the judge fall,
    within a window."""
    distinct: float | None = 0.8
    """Lower limit of the share of distinct responses, in multiples of what it was at
    first."""
    entropy: float | None = 0.5
    """Lower limit of the entropy, in multiples of what it was at first."""
    reference_perplexity: float | None = 1.5
    """Upper limit of the perplexity of responses under the reference, in multiples of
    what it was at first."""
    text_perplexity: float | None = 1.2
    """Upper limit of the policy's perplexity on each of --texts, in multiples of what
    it was at first."""
    trust_distance: float | None = 0.15
    """Upper limit of the distance of the sampler's log-probs to the trainer's, mean of
    a step, or of a window at some position or length of the prompt, nats per token."""
    trust_growth: float | None = 4.0
    """Upper limit of that distance in multiples of what it was at first, or of 1e-4."""
    trust_outliers: float | None = 0.005
    """Upper limit of the share of tokens whose log-probs differ by more than 1 nat."""
    trust_z: float | None = 6.0
    """Number of standard deviations by which the sampler's probabilities, entropy or
    duplicates may be off within a window."""
    trust_age: int | None = None
    """Upper limit of the age of the parameters that drew a token, iterations; None is
    --max-staleness."""
    stop: tuple[str, ...] = ()
    """Names of alarms that stop the run; trust is all of trust_*."""

    def __post_init__(self) -> None:
        checks.within(least=4, advice="each half needs two values", window=self.window)
        checks.non_negative(trust_age=self.trust_age)
        for name, limit in vars(self).items():
            if limit is not None and name not in ("stop", "trust_age"):
                checks.positive(**{name: limit})
        for name in self.stop:
            checks.one_of(stop=name, among=("trust", *ADVICE))

    def allowing(self, *, staleness: int) -> Limits:
        """These limits, with the age of a run's staleness where none is chosen."""
        if self.trust_age is not None:
            return self
        return dataclasses.replace(self, trust_age=staleness)

    def stops(self, alarm: str) -> bool:
        """Whether the run stops where an alarm of this name begins."""
        of_sampler = alarm.startswith("trust_") and "trust" in self.stop
        return of_sampler or alarm in self.stop


LIMITS = Limits()
