"""The rules by which a run's metrics raise alarms, and the advice of each alarm.

    check(rows of metrics.jsonl so far) -> {name: message}

`check` is a pure function of one stage's rows, so a run that was killed and resumed
raises the same alarms at the same steps. Rows in which a metric was not measured are
skipped. `Limits` is an option group: the limits beyond which alarms are raised.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlhf_jax.functional import checks
from rlhf_jax.runs.alarms import history, trust
from rlhf_jax.runs.alarms.history import Row

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
Check = Callable[[Sequence[Row]], dict[str, str]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits of alarms; None is off. A "first value" is of the first step measured."""

    window: int = 10
    """Number of values in a mean, one per step (per judged step for hacking)."""
    drift: float | None = 0.5
    """Upper limit of the relative weight drift, or of its growth where the reference is
    another model than the start."""
    kl: float | None = None
    """Upper limit of the KL, nats per response."""
    kl_over_target: float | None = 1.5
    """Upper limit of the KL, in multiples of its target, if it has one."""
    hacking: float | None = 4.0
    """Number of standard errors by which the reward must rise and the judge fall within
    a window. In most runs of 40 noisy values some window of ten falls by 2."""
    distinct: float | None = 0.8
    """Lower limit of the share of distinct responses, in multiples of its first
    value."""
    entropy: float | None = 0.5
    """Lower limit of the entropy, in multiples of its first value."""
    reference_perplexity: float | None = 1.5
    """Upper limit of the perplexity of responses under the reference, in multiples of
    its first value."""
    text_perplexity: float | None = 1.2
    """Upper limit of the policy's perplexity on each of --texts, in multiples of its
    first value."""
    trust_distance: float | None = 0.15
    """Upper limit of the mean distance between sampler's and trainer's log-probs, nats
    per token; of a step, and over a window of each quarter of positions and prompts."""
    trust_growth: float | None = 4.0
    """Upper limit of that distance, in multiples of its first value (at least 1e-4)."""
    trust_outliers: float | None = 0.005
    """Upper limit of the share of tokens whose log-probs differ by more than 1 nat."""
    trust_z: float | None = 6.0
    """Number of standard deviations by which the sampler's probabilities, entropy or
    duplicates may deviate within a window."""
    trust_age: int | None = None
    """Upper limit of the age of the parameters that drew a token, iterations; None
    takes --max-staleness."""
    stop: tuple[str, ...] = ()
    """Names of alarms that stop the run; "trust" means every trust_* alarm."""

    def __post_init__(self) -> None:
        checks.within(least=4, advice="each half needs two values", window=self.window)
        checks.non_negative(trust_age=self.trust_age)
        for name, limit in vars(self).items():
            if limit is not None and name not in ("stop", "trust_age"):
                checks.positive(**{name: limit})
        for name in self.stop:
            checks.one_of(stop=name, among=("trust", *ADVICE))

    def allowing(self, *, staleness: int) -> Limits:
        """Returns these limits, with `trust_age` set to a run's staleness if None."""
        if self.trust_age is not None:
            return self
        return dataclasses.replace(self, trust_age=staleness)

    def stops(self, alarm: str) -> bool:
        """Returns whether the run stops when an alarm of this name begins."""
        of_sampler = alarm.startswith("trust_") and "trust" in self.stop
        return of_sampler or alarm in self.stop


LIMITS = Limits()


class Alarm(NamedTuple):
    """An alarm, from the step at which it began until its condition ends."""

    name: str
    step: int  # at which it began
    message: str  # the numbers at that step, and what to do


class Watch:
    """Tracks the alarms of one stage; takes its rows in order, from the first step."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._rows: list[Row] = []
        self._active: list[Alarm] = []
        self.raised: list[Alarm] = []  # all, in the order in which they began

    def see(self, step: int, row: Row) -> list[Alarm]:
        """Takes the row of a step, and returns the alarms that are active."""
        self._rows.append(row)
        before = {alarm.name: alarm for alarm in self._active}
        self._active = [
            before.get(name, Alarm(name, step, message))
            for name, message in self._check(self._rows).items()
        ]
        self.raised += [alarm for alarm in self._active if alarm.name not in before]
        return self._active


def begun(active: Sequence[Alarm], *, step: int) -> list[Alarm]:
    """Returns the alarms that began at this step."""
    return [alarm for alarm in active if alarm.step == step]


def check(
    rows: Sequence[Row],
    *,
    limits: Limits,
    kl_target: float | None = None,
    from_start: bool = True,
) -> dict[str, str]:
    """Returns {alarm: its numbers and advice} of the alarms active after the last row.

    Args:
      rows: a stage's rows so far, as metrics.jsonl holds them, at least one.
      kl_target: nats per response that an adaptive kl_coef aims at; None if fixed.
      from_start: whether the weight drift is that from the initial policy; that from
        another model, which begins above 0, is limited in its growth.
    """
    messages = {
        "weight_drift": _weight_drift(rows, limits, from_start=from_start),
        "kl": _kl(rows, limits, kl_target),
        "reward_hacking": _reward_hacking(rows, limits),
        "mode_collapse_distinct": _fallen(
            rows,
            "response/distinct_fraction",
            "distinct share of responses",
            share=limits.distinct,
            window=limits.window,
        ),
        "mode_collapse_entropy": _fallen(
            rows,
            "objective/entropy",
            "entropy [nats per token]",
            share=limits.entropy,
            window=limits.window,
        ),
        "language_degradation": _harder(
            rows,
            "objective/ref_nll",
            "perplexity of the responses under the reference",
            factor=limits.reference_perplexity,
            window=limits.window,
        ),
        "forgetting": _forgetting(rows, limits),
        **trust.messages(rows, limits=limits),
    }
    return {
        name: f"{what}; {ADVICE[name]}" for name, what in messages.items() if what != ""
    }


def _forgetting(rows: Sequence[Row], limits: Limits) -> str:
    """Every text of --texts whose perplexity rose beyond the limit, in one line."""
    texts = dict.fromkeys(
        name.removeprefix("eval/").removesuffix("_nll")
        for row in rows
        for name in row
        if name.startswith("eval/") and name.endswith("_nll")
    )
    harder = [
        _harder(
            rows,
            f"eval/{text}_nll",
            f"the policy's perplexity on {text}",
            factor=limits.text_perplexity,
            window=1,  # the text is fixed, so there is no sampling noise to average
        )
        for text in texts
    ]
    return ", ".join(filter(None, harder))


def _weight_drift(rows: Sequence[Row], limits: Limits, *, from_start: bool) -> str:
    latest = history.last(rows, "drift/relative", 1)
    if limits.drift is None or not latest:
        return ""
    then = 0.0 if from_start else history.first(rows, "drift/relative", 1)[0]
    if not latest[0] - then > limits.drift:
        return ""
    above = "" if from_start else f" above the {then:.4g} at first"
    return f"relative weight drift {latest[0]:.4g} is over {limits.drift:g}{above}"


def _kl(rows: Sequence[Row], limits: Limits, kl_target: float | None) -> str:
    bounds = []
    if limits.kl is not None:
        bounds.append((limits.kl, f"{limits.kl:g}"))
    if limits.kl_over_target is not None and kl_target is not None:
        bound = limits.kl_over_target * kl_target
        text = f"{bound:.4g}, {limits.kl_over_target:g} times the target {kl_target:g}"
        bounds.append((bound, text))
    now = history.windowed(rows, "objective/kl", limits.window)
    if not bounds or now is None or not now > min(bounds)[0]:
        return ""
    return (
        f"KL {now:.4g} nats per response (mean of {limits.window} steps) is over "
        f"{min(bounds)[1]}"
    )


def _reward_hacking(rows: Sequence[Row], limits: Limits) -> str:
    judged = history.places(rows, "judge/score", newest_first=True)
    places = list(itertools.islice(judged, limits.window))
    if limits.hacking is None or len(places) < limits.window:
        return ""
    # Includes the scores of steps in between that were not judged.
    span = rows[places[-1] : places[0] + 1]
    scores = history.first(span, "objective/scores", len(span))
    if len(scores) < limits.window:
        return ""
    score, score_error = history.change(scores)
    judge, judge_error = history.change(history.first(span, "judge/score", len(span)))
    rising = score > limits.hacking * score_error
    falling = -judge > limits.hacking * judge_error
    if not (rising and falling):
        return ""
    return (
        f"over {len(span)} steps the reward rose by {score:.4g} (standard error "
        f"{score_error:.2g}) while the judge fell by {-judge:.4g} ({judge_error:.2g})"
    )


def _fallen(
    rows: Sequence[Row], name: str, what: str, *, share: float | None, window: int
) -> str:
    now = history.windowed(rows, name, window)
    if share is None or now is None:
        return ""
    (then,) = history.first(rows, name, 1)
    if not now < share * then:
        return ""
    return (
        f"{what} {now:.4g} (mean of {window} steps) is below {share:g} of the "
        f"{then:.4g} at first"
    )


def _harder(
    rows: Sequence[Row], name: str, what: str, *, factor: float | None, window: int
) -> str:
    """A ratio of perplexities is a difference of their logs, in nats per token."""
    now = history.windowed(rows, name, window)
    if factor is None or now is None:
        return ""
    (then,) = history.first(rows, name, 1)
    if not now - then > math.log(factor):
        return ""
    mean = f" (mean of {window} steps)" if window > 1 else ""
    return (
        f"{what} {_exp(now):.4g}{mean} is over {factor:g} times the {_exp(then):.4g} "
        "at first"
    )


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
