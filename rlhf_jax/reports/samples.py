"""Selects the rows of samples.jsonl that the page shows."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rlhf_jax.reports import document
from rlhf_jax.reports.curves import thinned
from rlhf_jax.reports.reading import Run
from rlhf_jax.runs import parsing
from rlhf_jax.runs.metrics import finite

LONGEST = 1000  # tokens of a response that are shown
READ = {"tokens", "logprobs", "ref_logprobs"}
COMMON = 8  # tokens listed for a run

Row = Mapping[str, Any]
Json = Any


def rows_of(run: Run) -> list[dict[str, Json]]:
    """Returns the rows with a prompt and a response, or a question and an answer.

    A row has "stage", "step", "prompt", "response", "score" and, if recorded, "judge",
    "reference" (the reference's response to the prompt), "tokens", "logprobs",
    "ref_logprobs" and "alternatives". Only the first LONGEST tokens of a response are
    kept. "length" counts sampled tokens, and "read" the tokens that the policy observed
    between its turns; "observed" marks those, which have no log-probs and no KL. A
    log-prob that is not finite, as from a run that diverged, is None.
    """
    rows = []
    for row in run.samples:
        prompt = row.get("prompt", row.get("question"))
        response = row.get("response", row.get("answer"))
        if parsing.misfit(prompt, [{}]) is None:  # the messages of a conversation
            prompt = "\n".join(
                f"{message.get('role')}: {message.get('content') or ''}"
                for message in prompt
            )
        if not isinstance(prompt, str) or not isinstance(response, str):
            continue
        judge = finite(row.get("judge", row.get("gold")))
        record: dict[str, Json] = {
            "stage": row["stage"],
            "step": row["step"],
            "prompt": prompt,
            "response": response,
            "score": finite(row.get("score")),
            "judge": None if judge is None else round(judge, 4),
        }
        if isinstance(row.get("reference"), str):
            record["reference"] = row["reference"]
        tokens = row.get("tokens")
        if parsing.misfit(tokens, [str]) is not None:
            tokens = None
        numbers = {
            name: [finite(number) for number in row[name]]
            for name in ("logprobs", "ref_logprobs")
            if isinstance(row.get(name), list)
            and (tokens is None or len(row[name]) == len(tokens))
        }
        if tokens is not None:
            record["tokens"] = tokens[:LONGEST]
        record |= {name: values[:LONGEST] for name, values in numbers.items()}
        if parsing.misfit(row.get("alternatives"), [[[object]]]) is None:
            record["alternatives"] = [  # lists of [text, log π, log π_ref], by place
                [[one[0], *map(finite, one[1:])] for one in place if one]
                for place in row["alternatives"][:LONGEST]
            ]
        record["length"] = len(tokens or ())
        if isinstance(row.get("observed"), list):
            record["observed"] = [bool(read) for read in row["observed"][:LONGEST]]
            record["read"] = sum(map(bool, row["observed"]))
            record["length"] -= record["read"]
        record["kl"] = _kl(numbers)
        rows.append({k: v for k, v in record.items() if v is not None})
    return rows


def common_tokens(rows: Sequence[Row]) -> list[dict[str, Json]]:
    """Returns the tokens with the largest sums of KL in the last quarter of the steps.

    Returns:
      {"text", "count", "kl": Σ k1 over the `count` occurrences, nats}, over the places
      where both log-probs are numbers.
    """
    rows = [row for row in rows if row.keys() >= READ]
    steps = sorted({row["step"] for row in rows})
    newest = set(steps[-max(1, len(steps) // 4) :])
    sums: dict[str, list[float]] = {}
    for row in rows:
        if row["step"] not in newest:
            continue
        for text, own, ref in zip(
            row["tokens"], row["logprobs"], row["ref_logprobs"], strict=True
        ):
            if own is not None and ref is not None:
                sums.setdefault(text.strip() or text, []).append(own - ref)
    most = sorted(sums.items(), key=lambda item: -sum(item[1]))[:COMMON]
    return [
        {"text": text, "count": len(differences), "kl": round(sum(differences), 3)}
        for text, differences in most
        if 0 < sum(differences) < math.inf
    ]


def within(rows: Sequence[dict[str, Json]], *, size: int) -> list[dict[str, Json]]:
    """Returns rows that fit in `size` bytes of JSON, in their order.

    Rows with the largest and smallest score, KL and length are chosen first, then whole
    steps: the last, the first, and others evenly between them.
    """
    costs = [document.written(row) + 2 for row in rows]
    if sum(costs) <= size:
        return list(rows)
    chosen, left = set(), size
    for number in _in_order(rows):
        if number not in chosen and costs[number] <= left:
            chosen.add(number)
            left -= costs[number]
    return [row for number, row in enumerate(rows) if number in chosen]


def _in_order(rows: Sequence[Row]) -> list[int]:
    """Numbers of rows, in the order in which they are chosen."""
    numbers = range(len(rows))
    extremes = []
    for name in ("kl", "score", "length"):
        of_name = [number for number in numbers if name in rows[number]]
        if of_name:
            ordered = sorted(of_name, key=lambda number: rows[number][name])
            extremes += [ordered[-1], ordered[0]]
    steps = sorted({row["step"] for row in rows})
    order: dict[int, None] = {}
    points = 2
    while len(order) < len(steps):
        chosen = thinned(len(steps), points=points)
        order |= dict.fromkeys(steps[k] for k in reversed(chosen))
        points = 2 * points - 1
    by_step: dict[int, list[int]] = {}
    for number in numbers:
        by_step.setdefault(rows[number]["step"], []).append(number)
    return [*extremes, *(number for step in order for number in by_step[step])]


def _kl(numbers: Mapping[str, Sequence[float | None]]) -> float | None:
    """Σ_t log π - log π_ref of a response, nats; None without recorded log-probs.

    Places where one of the two is None are left out.
    """
    if "ref_logprobs" not in numbers or "logprobs" not in numbers:
        return None
    k1 = [
        own - ref
        for own, ref in zip(numbers["logprobs"], numbers["ref_logprobs"], strict=True)
        if own is not None and ref is not None
    ]
    return finite(round(sum(k1), 3)) if k1 else None
