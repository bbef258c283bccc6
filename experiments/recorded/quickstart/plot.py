"""Draws curves.png from the recorded rows beside it.

    python experiments/recorded/quickstart/plot.py

Left the score of the reward model, right the KL to the reference, both along PPO, with
the penalty (three seeds) and without it.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).resolve().parent
PANELS = {
    "objective/scores": "reward-model score",
    "objective/kl": "KL to the reference [nats]",
}


def read(name: str) -> list[dict]:
    """The rows of a recorded run, one per step."""
    lines = (HERE / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


figure, axes = plt.subplots(1, 2, figsize=(8, 2.8), layout="constrained")
for axis, (metric, label) in zip(axes, PANELS.items(), strict=True):
    for name, color, text in [
        ("seed_0", "C0", "β = 0.2, seeds 0 to 2"),
        ("seed_1", "C0", None),
        ("seed_2", "C0", None),
        ("seed_0_kl_coef_0", "C3", "β = 0, seed 0"),
    ]:
        axis.plot([row[metric] for row in read(name)], color=color, label=text)
    axis.set(xlabel="PPO step", ylabel=label)
axes[0].legend(frameon=False)
figure.savefig(HERE / "curves.png", dpi=120)
