"""Alarms: what in a run's metrics asks for a look, and one line of advice on it.

    check(rows of metrics.jsonl so far) -> {name: message}

A pure decision over one stage's rows, so that a run which was killed and resumed raises
the same alarms at the same steps. A metric that was not measured, at a step or at all,
raises none: values are counted where they stand.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError

Row = Mapping[str, Any]  # of metrics.jsonl: a number, None, or "NaN" or "Infinity"
Check = Callable[[Sequence[Row]], dict[str, str]]


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
    held_out_perplexity: float | None = 1.2
    """Upper limit of the perplexity of held-out text, in multiples of what it was at
    first."""
    out_of_domain_perplexity: float | None = 1.2
    """Upper limit of the perplexity of out-of-domain text, in multiples of what it was
    at first."""

    def __post_init__(self) -> None:
        if self.window < 4:
            raise InputError(
                f"window: expected at least 4 values, two in each half, got "
                f"{self.window}; take more"
            )
        for field in dataclasses.fields(self):
            limit = vars(self)[field.name]
            if limit is not None:
                checks.positive(**{field.name: limit})


LIMITS = Limits()


class Alarm(NamedTuple):
    """One thing that asks for a look, from when it began until it is over."""

    name: str
    step: int  # at which it began
    message: str  # what was seen then, with numbers, and what to do


class Watch:
    """The alarms of one stage, from its rows in order, and so of a resumed one too."""

    def __init__(self, check: Check) -> None:
        self._check = check
        self._rows: list[Row] = []
        self._active: list[Alarm] = []
        self.raised: list[Alarm] = []  # every one, when it began

    def see(self, step: int, row: Row) -> list[Alarm]:
        """Takes the row of a step; those that are active now."""
        self._rows.append(row)
        before = {alarm.name: alarm for alarm in self._active}
        self._active = [
            before.get(name, Alarm(name, step, message))
            for name, message in self._check(self._rows).items()
        ]
        self.raised += [alarm for alarm in self._active if alarm.name not in before]
        return self._active


def begun(active: Sequence[Alarm], *, step: int) -> list[Alarm]:
    """Those that began at this step, to be told once."""
    return [alarm for alarm in active if alarm.step == step]


def check(
    rows: Sequence[Row], *, limits: Limits, kl_target: float | None = None
) -> dict[str, str]:
    """What is wrong after the last row: {name: what was seen; one line of advice}.

    Args:
      rows: a stage's rows so far, as metrics.jsonl holds them, at least one.
      limits: the thresholds.
      kl_target: nats per response that kl_coef is adapted to; None where it is fixed.

    Returns:
      In the order below; empty when all is well.
    """
    messages = {
        "weight_drift": _weight_drift(rows, limits),
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
        "forgetting_held_out": _harder(
            rows,
            "eval/held_out_nll",
            "the policy's perplexity on held-out text",
            factor=limits.held_out_perplexity,
            window=1,  # always the same text: no sampling, so nothing to average
        ),
        "forgetting_out_of_domain": _harder(
            rows,
            "eval/out_of_domain_nll",
            "the policy's perplexity on out-of-domain text",
            factor=limits.out_of_domain_perplexity,
            window=1,
        ),
    }
    return {
        name: f"{what}; {ADVICE[name]}" for name, what in messages.items() if what != ""
    }


ADVICE = {
    "weight_drift": "raise kl_coef or lower the policy's learning rate",
    "kl": "raise kl_coef, or shorten kl_horizon where it is adapted",
    "reward_hacking": "go back to a snapshot before the judge fell, and raise kl_coef "
    "or train the reward model on these responses",
    "mode_collapse_distinct": "read the samples; raise kl_coef, or take more prompts",
    "mode_collapse_entropy": "raise kl_coef or lower the policy's learning rate",
    "language_degradation": "read the samples: the reference finds them ever less "
    "likely; raise kl_coef",
    "forgetting_held_out": "raise kl_coef, or mix in a language-model loss on such "
    "text",
    "forgetting_out_of_domain": "the alignment tax: raise kl_coef, or mix in a "
    "language-model loss on such text",
}


def _weight_drift(rows: Sequence[Row], limits: Limits) -> str:
    latest = _last(rows, "drift/relative", 1)
    if limits.drift is None or not latest or not latest[0] > limits.drift:
        return ""
    return f"relative weight drift {latest[0]:.4g} is over {limits.drift:g}"


def _kl(rows: Sequence[Row], limits: Limits, kl_target: float | None) -> str:
    bounds = []
    if limits.kl is not None:
        bounds.append((limits.kl, f"{limits.kl:g}"))
    if limits.kl_over_target is not None and kl_target is not None:
        bound = limits.kl_over_target * kl_target
        text = f"{bound:.4g}, {limits.kl_over_target:g} times the target {kl_target:g}"
        bounds.append((bound, text))
    latest = _last(rows, "objective/kl", limits.window)
    if not bounds or len(latest) < limits.window:
        return ""
    (bound, text), now = min(bounds), _mean(latest)
    if not now > bound:
        return ""
    return (
        f"KL {now:.4g} nats per response (mean of {limits.window} steps) is over {text}"
    )


def _reward_hacking(rows: Sequence[Row], limits: Limits) -> str:
    judged = itertools.islice(_places(rows, "judge/score"), limits.window)
    places = [place for place, _ in judged]
    if limits.hacking is None or len(places) < limits.window:
        return ""
    # All scores of the steps in between, whether or not a judge looked at them.
    span = rows[places[-1] : places[0] + 1]
    scores = _first(span, "objective/scores", len(span))
    if len(scores) < limits.window:
        return ""
    score, score_error = _change(scores)
    judge, judge_error = _change(_first(span, "judge/score", len(span)))
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
    latest = _last(rows, name, window)
    if share is None or len(latest) < window:
        return ""
    now, (then,) = _mean(latest), _first(rows, name, 1)
    if not now < share * then:
        return ""
    return (
        f"{what} {now:.4g} (mean of {window} steps) is below {share:g} of the "
        f"{then:.4g} at first"
    )


def _harder(
    rows: Sequence[Row], name: str, what: str, *, factor: float | None, window: int
) -> str:
    """Perplexity is exp of a mean in nats per token, so its factor is a difference."""
    latest = _last(rows, name, window)
    if factor is None or len(latest) < window:
        return ""
    now, (then,) = _mean(latest), _first(rows, name, 1)
    if not now - then > math.log(factor):
        return ""
    mean = f" (mean of {window} steps)" if window > 1 else ""
    return (
        f"{what} {_exp(now):.4g}{mean} is over {factor:g} times the {_exp(then):.4g} "
        "at first"
    )


def _places(rows: Sequence[Row], name: str) -> Iterator[tuple[int, float]]:
    """(index, value) where it was measured, the newest first."""
    newest_first = range(len(rows) - 1, -1, -1)
    return _measured(((place, rows[place]) for place in newest_first), name)


def _first(rows: Sequence[Row], name: str, count: int) -> list[float]:
    return _take(_measured(enumerate(rows), name), count)


def _last(rows: Sequence[Row], name: str, count: int) -> list[float]:
    return _take(_places(rows, name), count)


def _take(places: Iterator[tuple[int, float]], count: int) -> list[float]:
    return [value for _, value in itertools.islice(places, count)]


def _measured(
    rows: Iterable[tuple[int, Row]], name: str
) -> Iterator[tuple[int, float]]:
    for place, row in rows:
        value = row.get(name)
        if value is not None and not math.isnan(float(value)):
            yield place, float(value)


def _change(values: Sequence[float]) -> tuple[float, float]:
    """Mean of the second half less that of the first, and its standard error."""
    half = len(values) // 2
    before, after = values[:half], values[-half:]
    error = math.sqrt((_variance(before) + _variance(after)) / half)
    return _mean(after) - _mean(before), error


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _variance(values: Sequence[float]) -> float:
    mean = _mean(values)
    deviations = [value - mean for value in values]
    return sum(x * x for x in deviations) / (len(values) - 1)


def _exp(x: float) -> float:
    return math.exp(x) if x < 700 else math.inf
