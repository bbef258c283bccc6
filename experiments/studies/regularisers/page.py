"""Writes the page of `regularisers`: tables of both recorded sweeps, and the claims.

    python experiments studies.regularisers.page experiments/recorded/regularisers

Writes page.md into the folder, from its language/figures.json and
arithmetic/figures.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from studies.regularisers.figures import AT_END, MEASURED, table
from studies.regularisers.held import NAMES, PUBLISHED

WORLDS = {
    "language": "On the language, against a reward model",
    "arithmetic": "On sums, with a verifier",
}
UNITS = {
    "score": "proxy",
    "gold": "gold",
    "kl": "KL [nats per response]",
    "entropy": "entropy [nats per token]",
    "distinct": "distinct",
    "step": "iterations",
}

NOTES = (
    "One strength of each is tried, that of its authors where they give one (KL-Cov: "
    "ten times their share, as batches are small), and none is tuned; their models are "
    "larger. Answers are not corrected for their number.",
    "",
    "- What a strength does depends on the scale of the loss, which is a sum over a "
    "response divided by the longest length here.",
    "- The future KL of Yao et al. is compared with k1 in the reward here, which has "
    "its expected gradient; they compare it with a KL of tokens in the loss.",
    "- The mixture has a half of the first policy and twice the coefficient, so that "
    "the pull to the first policy is that of k1 in the reward.",
    "- The masks of Qi et al. and KL-Cov hold a policy to the one that sampled. They "
    "are made for verifiers, and nothing in them keeps a policy near the first.",
    "",
)


def lines(figures: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The page, line by line.

    Args:
      figures: {world: the result of `figures.summarise`}.
    """
    page = [
        "# Six regularisers at equal proxy score",
        "",
        "Means over five seeds ± half of the 95% interval; definitions are in "
        "[`figures.py`](../../studies/regularisers/figures.py), options in "
        "[`held.py`](../../studies/regularisers/held.py). Seeds are those whose "
        "run comes to the proxy score.",
    ]
    for world, title in WORLDS.items():
        of_world = figures[world]
        page += ["", f"## {title}", ""]
        for place, names in (("target", MEASURED), ("end", AT_END)):
            where = "At the end:"
            if place == "target":
                where = (
                    f"Where the proxy score is first {of_world['target']:.2f}, half "
                    f"of the way from {of_world['reference']:.2f} to the end of the "
                    f"run without a KL:"
                )
            header = ("", "seeds", *(UNITS[name] for name in names))
            page += [where, "", *_table(header, table(of_world, place=place)), ""]
        page += [f"![gold against the proxy score]({world}/frontier.png)"]
    page += ["", "## What the authors claim, and what is seen here", ""]
    header = ("claim", "measured as", "source", *WORLDS)
    rows = []
    for number, one in enumerate(PUBLISHED):
        answers = [figures[world]["claims"][number] for world in WORLDS]
        measure = one.measure.removeprefix("last_")
        where = "at the end" if one.measure != measure else "at equal proxy"
        measured = f"{measure} {where}: {NAMES[one.greater]} > {NAMES[one.less]}"
        rows.append((one.says, measured, one.source, *map(_answer, answers)))
    return [*page, *_table(header, rows), "", *NOTES]


def _answer(row: Mapping[str, Any]) -> str:
    """The answer with the paired difference and its interval."""
    if row["interval"] is None:
        return f"– ({row['seeds']} seeds)"
    answer = {"yes": "yes", "no": "no"}.get(row["answer"], "–")
    low, high = row["interval"]
    text = f"{answer}: {row['difference']:.2f} ({low:.2f} to {high:.2f})"
    return text.replace("-", "−")


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [
        f"| {' | '.join(row)} |"
        for row in (header, ["---"] * len(header), *map(list, rows))
    ]


def main(folder: Path) -> None:
    figures = {
        world: json.loads((folder / world / "figures.json").read_text(encoding="utf-8"))
        for world in WORLDS
    }
    (folder / "page.md").write_text("\n".join(lines(figures)), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
