"""Whether a run hacked its reward: its score rose while the judge fell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from rlhf_jax.reports.reading import Run
from rlhf_jax.runs.alarms import ADVICE

SCORE, JUDGE, KL = "objective/scores", "judge/score", "objective/kl"
PARTS = 5  # a series is compared part by part
LATE = 10  # one in as many rows, the last ones, tells what an alarm is at the end
MOST = 0.95  # autocorrelation that the judge is taken to have
ERRORS = 3.0  # standard errors of a difference that count, as the best part is picked
LOST = ("language_degradation", "mode_collapse_distinct", "mode_collapse_entropy")

Series = Sequence[tuple[int, float]]
Kind = Literal["hacked", "degraded", "alarm", "unjudged", "clean", "none"]


class Verdict(NamedTuple):
    """What to think of a run, and why."""

    kind: Kind
    why: str  # one line with the numbers
    step: int | None  # from when


class Raised(NamedTuple):
    """An alarm of a run, of any stage."""

    stage: str
    name: str
    step: int  # at which it began
    message: str


def alarms_of(run: Run) -> list[Raised]:
    """The alarms that were raised, each time they began, with what was seen if told."""
    if run.summary is not None and isinstance(run.summary.get("alarms"), list):
        return [
            Raised(alarm["stage"], alarm["name"], alarm["step"], alarm["message"])
            for alarm in run.summary["alarms"]
        ]
    raised, active = [], set()
    for row in run.metrics:  # of a run under way
        names = set(row.get("alarms", ()))
        raised += [
            Raised(row["stage"], name, row["step"], ADVICE.get(name, ""))
            for name in sorted(names - active)
        ]
        active = names
    return raised


def verdict(run: Run) -> Verdict:
    """What a run's score, its judge and its alarms say together.

    *hacked*    the alarm `reward_hacking` in the last of LATE parts of the rows; or
                from the part of the run in which the judge was best to the last part,
                the score rose and the judge fell, each by ERRORS standard errors
    *degraded*  the language or its variety was lost while the score rose
    *alarm*     another alarm, or that one earlier: it compares a few steps with those
                before, which noise of a long run may bring about
    *unjudged*  no sign of it, but no judge looked either
    """
    score, judge = run.series(SCORE), run.series(JUDGE)
    if len(score) < 2:
        why = "its first step" if score else "no reward"
        return Verdict("none", why, None)
    raised = {alarm.name: alarm for alarm in reversed(alarms_of(run))}
    since = fallen_since(score, judge)
    rise = f"reward {_number(score[0][1])} → {_number(score[-1][1])}"
    if judge:
        best = max(judge, key=lambda pair: pair[1])
        rise += f", judge {_number(best[1])} at best → {_number(judge[-1][1])}"
    began = _still_raised(run, "reward_hacking")
    if began is not None or since is not None:
        return Verdict("hacked", rise, since if began is None else began)
    lost = [raised[name] for name in LOST if name in raised]
    if lost and score[-1][1] > score[0][1]:
        first = min(lost, key=lambda alarm: alarm.step)
        names = " and ".join(alarm.name.replace("_", " ") for alarm in lost)
        return Verdict("degraded", f"{rise}; {names}", first.step)
    if raised:
        first = min(raised.values(), key=lambda alarm: alarm.step)
        return Verdict("alarm", ", ".join(raised).replace("_", " "), first.step)
    if not judge:
        return Verdict("unjudged", f"{rise}; no held-out judge looked", None)
    return Verdict("clean", rise, None)


def fallen_since(score: Series, judge: Series) -> int | None:
    """The step from which the score rose and the judge fell; None where they did not.

    Both are cut into PARTS at the same steps, or into two where the judge has fewer
    than ten values. d = mean of the last part - mean of the judge's best part, with
    error s √(1/n + 1/m), s the standard deviation within parts. The judge's error is
    √((1 + ρ) / (1 - ρ)) times that, as of an AR(1) process with the autocorrelation ρ
    that it has within parts.
    """
    if len(judge) < 4:
        return None
    parts = PARTS if len(judge) >= 2 * PARTS else 2
    cut = np.array_split(np.array([step for step, _ in judge]), parts)
    judged = [_within(judge, steps) for steps in cut]
    scored = [_within(score, steps) for steps in cut]
    if any(len(part) < 1 for part in scored):
        return None
    best = int(np.argmax([part.mean() for part in judged]))
    if best == parts - 1:
        return None
    rho = _autocorrelation(judged)
    fell = _errors(judged, best) < -ERRORS * math.sqrt((1 + rho) / (1 - rho))
    rose = _errors(scored, best) > ERRORS
    return int(cut[best][-1]) if fell and rose else None


def _still_raised(run: Run, name: str) -> int | None:
    """The step at which an alarm last began that the run's last rows still have."""
    last = run.metrics[-max(1, len(run.metrics) // LATE) :]
    began = [alarm for alarm in alarms_of(run) if alarm.name == name]
    if not began:
        return None
    newest = began[-1]
    of_last = any(name in row.get("alarms", ()) for row in last)
    of_last |= newest.stage == run.stage and newest.step >= last[0]["step"]
    return newest.step if of_last else None


def _number(value: float) -> str:
    return f"{value:.3g}".replace("-", "−")


def _within(series: Series, steps: np.ndarray) -> np.ndarray:
    return np.array([value for step, value in series if steps[0] <= step <= steps[-1]])


def _autocorrelation(parts: Sequence[np.ndarray]) -> float:
    """ρ of neighbouring values' deviations from a line through their part, 0 to MOST.

    A line, as a steady fall is no noise. The estimate r of parts of L values is about
    (2 + 4 r) / L too small, which is added.
    """
    deviations = [_from_line(part) for part in parts]
    variance = sum((deviation**2).sum() for deviation in deviations)
    pairs = sum(len(deviation) - 1 for deviation in deviations)
    count = sum(map(len, deviations))
    whole = sum(((part - part.mean()) ** 2).sum() for part in parts)
    if pairs < 1 or variance <= 1e-12 * whole:  # lines but for rounding
        return 0.0
    covariance = sum((deviation[1:] * deviation[:-1]).sum() for deviation in deviations)
    r = (covariance / pairs) / (variance / count)
    return float(np.clip(r + (2 + 4 * r) / (count / len(parts)), 0.0, MOST))


def _from_line(part: np.ndarray) -> np.ndarray:
    """Deviations from the line of least squares; from the mean of two values or one."""
    apart = part - part.mean()
    if len(part) < 3:
        return apart
    at = np.arange(len(part)) - (len(part) - 1) / 2
    return apart - at * (at @ apart) / (at @ at)


def _errors(parts: Sequence[np.ndarray], best: int) -> float:
    """(last - best) in standard errors of that difference."""
    difference = parts[-1].mean() - parts[best].mean()
    freedom = sum(len(part) - 1 for part in parts)
    if freedom < 1:
        return 0.0
    variance = sum(((part - part.mean()) ** 2).sum() for part in parts) / freedom
    error = math.sqrt(variance * (1 / len(parts[-1]) + 1 / len(parts[best])))
    if error == 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / error
