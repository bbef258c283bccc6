"""Alarms: what in a run's metrics asks for a look, and one line of advice on it.

    check(rows of metrics.jsonl so far) -> {name: message}

A pure decision over one stage's rows, so that a run which was killed and resumed raises
the same alarms at the same steps. A metric that was not measured, at a step or at all,
raises none: values are counted where they stand.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rlhf_jax.runs.alarms import history, trust
from rlhf_jax.runs.alarms.history import Row
from rlhf_jax.runs.alarms.limits import ADVICE, Limits

Check = Callable[[Sequence[Row]], dict[str, str]]


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
      kl_target: nats per response that kl_coef is adapted to; None where it is fixed.
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
        "forgetting": _forgetting(rows, limits),
        **trust.messages(rows, limits=limits),
    }
    return {
        name: f"{what}; {ADVICE[name]}" for name, what in messages.items() if what != ""
    }


def _forgetting(rows: Sequence[Row], limits: Limits) -> str:
    """Every text of --texts that the policy finds harder to read, in one line."""
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
            window=1,  # always the same text: no sampling, so nothing to average
        )
        for text in texts
    ]
    return ", ".join(filter(None, harder))


def _weight_drift(rows: Sequence[Row], limits: Limits) -> str:
    latest = history.last(rows, "drift/relative", 1)
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
    # All scores of the steps in between, whether or not a judge looked at them.
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
    """Perplexity is exp of a mean in nats per token, so its factor is a difference."""
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
