"""Precision and recall of the verdict on recorded runs, and its false alarms.

    python tests/programs/rate_verdicts.py

Prints the tables of rlhf_jax/reports/README.md, those of other thresholds, and at last
how often the alarm reward_hacking is raised. A run's
gold score fell where, on held-out prompts at the end, it is MARGIN below its best: that
of the reference on the same prompts, or the best mean of three neighbouring values on
the way. The judge of these runs is the gold score of the responses that the policy is
trained on.
"""

import json
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from places import RECORDED

from rlhf_jax.runs import alarms
from rlhf_jax.runs.alarms import verdicts

MARGIN = 0.4  # gold units: half the deviation of the reference's responses
THRESHOLDS = (2.0, 2.5, 3.0, 3.5, 4.0, 5.0)
HELD_OUT = 5  # first seed of the language's runs that no choice was made on
NOISES = 1000  # judges made up for each share of false alarms


class Labelled(NamedTuple):
    """A recorded run and whether its gold score fell."""

    seed: int
    rows: list[dict[str, float]]
    drop: float  # gold units from the best to the end, on held-out prompts

    @property
    def errors(self) -> float:
        """The fall of its judge in standard errors."""
        fall = verdicts.fall_of(verdicts.series(self.rows, verdicts.JUDGE))
        return 0.0 if fall is None else fall.errors

    @property
    def kind(self) -> str:
        return verdicts.verdict(self.rows, alarms=[]).kind


def labelled(seed, *, steps, scores, judge, reference, end):
    """A run from its series; the judge's may contain None."""
    rows = [
        {"step": step, verdicts.SCORE: score, verdicts.JUDGE: value}
        for step, score, value in zip(steps, scores, judge, strict=True)
    ]
    values = [value for value in judge if value is not None]
    best = np.convolve(values, np.full(3, 1 / 3), "valid").max()
    return Labelled(seed, rows, float(max(reference, best) - end))


def frontier() -> list[Labelled]:
    """PPO at six β, with a judgement at every second of 40 steps."""
    folder = RECORDED / "kl_frontier"
    summary = json.loads((folder / "record.json").read_text())["summary"]
    rows_of: dict[tuple[str, int], list[dict]] = {}
    for line in (folder / "runs.jsonl").read_text().splitlines():
        row = json.loads(line)
        rows_of.setdefault((f"{row['kl_coef']:g}", row["seed"]), []).append(row)
    return [
        labelled(
            seed,
            steps=[row["step"] for row in rows],
            scores=[row["score"] for row in rows],
            judge=[row["gold"] for row in rows],
            reference=summary["reference"]["gold"],
            end=summary["kl_coefs"][kl_coef]["of_seeds"]["gold"][seed],
        )
        for (kl_coef, seed), rows in rows_of.items()
    ]


def language(*, every: int) -> list[Labelled]:
    """PPO and GRPO with six choices of the KL; a judgement every few of 30 steps."""
    lines = (RECORDED / "kl_in_practice/language/curves.jsonl").read_text().splitlines()
    return [
        labelled(
            run["seed"],
            steps=range(len(run["judge"])),
            scores=run["scores"],
            judge=[None if n % every else x for n, x in enumerate(run["judge"])],
            reference=run["gold_reference"],
            end=run["gold"],
        )
        for run in map(json.loads, lines)
    ]


def sets() -> dict[str, list[Labelled]]:
    """The recorded runs, by their use and by how often the judge scored them."""
    often, seldom = language(every=1), language(every=3)
    held_out = f"language, seeds from {HELD_OUT}"
    return {
        "β frontier, 20 values": frontier(),
        "language, other seeds, 30 values": [x for x in often if x.seed < HELD_OUT],
        f"{held_out}, 30 values": [x for x in often if x.seed >= HELD_OUT],
        f"{held_out}, 10 values": [x for x in seldom if x.seed >= HELD_OUT],
    }


def rates(runs: list[Labelled], *, errors: float, margin: float = MARGIN) -> str:
    """Precision and recall, as "19/20 | 19/21"."""
    fell = [run.drop >= margin for run in runs]
    called = [run.errors > errors for run in runs]
    right = sum(map(bool.__and__, fell, called))
    return f"{right}/{sum(called)} | {right}/{sum(fell)}"


def false_alarms(count: int, *, rho: float, errors: np.ndarray) -> np.ndarray:
    """The share of AR(1) noise judges that fall by more than these standard errors."""
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(NOISES, count + 100))
    for step in range(1, noise.shape[1]):
        noise[:, step] += rho * noise[:, step - 1]
    falls = [verdicts.fall_of(list(enumerate(judge))) for judge in noise[:, 100:]]
    return np.mean([[fall.errors > limit for limit in errors] for fall in falls], 0)


def raised(rows: list[dict[str, float]], *, errors: float) -> bool:
    """Whether any step raises the alarm reward_hacking."""
    limits = alarms.Limits(hacking=errors)
    return any(
        "reward_hacking" in alarms.check(rows[:end], limits=limits)
        for end in range(1, len(rows) + 1)
    )


def of_alarm() -> list[str]:
    """Rows: limit, simulated runs of 40 steps, recorded runs that fell and did not.

    The judge of a simulated run is noise, and its reward rises at every step.
    """
    noise = np.random.default_rng(0).normal(size=(NOISES, 40))
    made_up = [
        [{verdicts.SCORE: float(n), verdicts.JUDGE: x} for n, x in enumerate(judge)]
        for judge in noise
    ]
    recorded = [run for runs in [*sets().values()][:3] for run in runs]
    rows = []
    for errors in (2.0, 3.0, 4.0, 5.0):
        share = np.mean([raised(run, errors=errors) for run in made_up])
        fell, held = [], []
        for run in recorded:
            of_kind = fell if run.drop >= MARGIN else held
            of_kind.append(raised(run.rows, errors=errors))
        counts = f"{sum(fell)}/{len(fell)} | {sum(held)}/{len(held)}"
        rows.append(f"| {errors:g} | {share:.1%} | {counts} |")
    return rows


def of_recorded() -> list[str]:
    """The rows of recorded runs in the tables."""
    rows = []
    for name, runs in sets().items():
        fell = sum(run.drop >= MARGIN for run in runs)
        counts = f"{fell} | {len(runs) - fell}"
        rows.append(f"| {name} | {counts} | {rates(runs, errors=verdicts.ERRORS)} |")
    frontier_runs, others, held_out, _ = sets().values()
    seen = frontier_runs + others
    rows += [
        f"| {limit:g} | {rates(seen, errors=limit)} | {rates(held_out, errors=limit)} |"
        for limit in THRESHOLDS
    ]
    for margin in (0.2, 0.4, 0.6, 0.8):
        of_margin = [
            rates(runs, errors=verdicts.ERRORS, margin=margin)
            for runs in (seen, held_out)
        ]
        rows.append(f"| {margin:g} | {' | '.join(of_margin)} |")
    return rows


def main() -> None:
    print("\n".join(of_recorded()))
    for rho in (0.0, 0.5, 0.8):
        for count in (10, 20, 40, 100):
            shares = false_alarms(count, rho=rho, errors=np.array(THRESHOLDS))
            cells = " | ".join(f"{share:.1%}" for share in shares)
            print(f"| {rho:g} | {count} | {cells} |")
    print("\n".join(of_alarm()))


if __name__ == "__main__":
    main()
