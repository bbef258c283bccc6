"""The figures of the study: a row for each policy and seed, and means over seeds.

A row describes one policy, or the reference's best of k by the proxy: "policy", "seed",
MEASURED and GAINS, None where a measure is missing. It comes from the two evaluations
of `evaluation.py`, which have the same responses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlhf_jax.functional import best_of_n
from rlhf_jax.functional.checks import InputError
from rlhf_jax.sweeps import statistics
from studies.preferences import results
from studies.preferences.evaluation import REFERENCE, TEXTS

Row = dict[str, Any]
PROXY, JUDGE = TEXTS  # the scorers
GAINS = tuple(f"{scorer}_gain" for scorer in TEXTS)  # over the reference, reward units
SAMPLES = 2  # samples per prompt for the distinct share
MEASURED = {
    "kl": "KL [nats per response]",
    "proxy": "proxy [reward units]",
    "judge": "judge [reward units]",
    "perplexity": "perplexity under the reference",
    "distinct": "distinct share, 2 per prompt",
    "length": "length [tokens]",
    "shakespeare": "forgetting, Shakespeare [nats per token]",
    "gsm8k": "forgetting, GSM8K [nats per token]",
}


def rows_of(evaluated: Sequence[Row]) -> list[Row]:
    """The rows of each policy and seed, and of best-of-n.

    Args:
      evaluated: the result of `results.read`.
    """
    references = {one["seed"]: one for one in evaluated if one["policy"] == REFERENCE}
    rows = [of_policy(one, references[one["seed"]]) for one in evaluated]
    for reference in references.values():
        rows += of_best(reference)
    return rows


def of_policy(evaluated: Row, reference: Row) -> Row:
    """The row of one policy; both arguments are of `results.read`, with one seed."""
    proxy, judge = (
        evaluated[scorer]["results"]["policy"]["sampled"] for scorer in TEXTS
    )
    itself = evaluated["policy"] == REFERENCE
    forgotten = {
        texts: evaluated[scorer]["results"]["texts"]["policy_loss"]
        - reference[scorer]["results"]["texts"]["policy_loss"]
        for scorer, texts in TEXTS.items()
    }
    # Both were drawn with the same keys, so the first samples are comparable.
    count = evaluated[PROXY]["results"]["num_samples"]
    return {
        "policy": evaluated["policy"],
        "seed": evaluated["seed"],
        **{
            f"{scorer}_gain": _score(evaluated[scorer], below=count)
            - _score(reference[scorer], below=count)
            for scorer in TEXTS
        },
        "kl": 0.0 if itself else proxy["kl"]["mean"],
        "proxy": proxy["score"]["mean"],
        "judge": judge["score"]["mean"],
        "perplexity": math.exp(
            _mean(_own_nll(row) for row in results.sampled(evaluated[PROXY]))
            if itself
            else proxy["log_perplexity"]["mean"]
        ),
        "distinct": _distinct(results.sampled(evaluated[PROXY])),
        "length": proxy["length"]["mean"],
        **forgotten,
    }


def of_best(reference: Row) -> list[Row]:
    """The rows of the reference's best of k by the proxy, k = 2, 4, ... up to n.

    The KL is log k - (k - 1)/k. Means are over all C(n, k) subsets of a prompt's n
    samples, as in `evaluation.success.best_at_k`: the i-th worst sample by the proxy is
    the best of C(i - 1, k - 1) subsets, which is its weight in every measure.

    Raises:
      InputError: the scorers did not score the same responses.
    """
    by_prompt: dict[int, list[tuple[Row, Row]]] = {}
    both = (results.sampled(reference[scorer]) for scorer in (PROXY, JUDGE))
    for ours, theirs in zip(*both, strict=True):
        if ours["response"] != theirs["response"]:
            raise InputError(
                f"prompt {ours['row']}: expected equal samples in both evaluations of "
                f"the reference, got different ones; give both one seed and batch size"
            )
        by_prompt.setdefault(ours["row"], []).append((ours, theirs))
    for samples in by_prompt.values():
        samples.sort(key=lambda pair: pair[0]["score"])
    count, k, rows = min(map(len, by_prompt.values())), 2, []
    while k <= count:

        def best(number: Callable[[Row, Row], float], k: int = k) -> float:
            return _mean(
                sum(
                    number(*pair) * math.comb(rank, k - 1)
                    for rank, pair in enumerate(samples)
                )
                / math.comb(len(samples), k)
                for samples in by_prompt.values()
            )

        proxy = best(lambda ours, theirs: ours["score"])
        judge = best(lambda ours, theirs: theirs["score"])
        rows.append(
            dict.fromkeys(MEASURED)
            | {
                "policy": f"best of {k}",
                "seed": reference["seed"],
                "kl": best_of_n.kl_bound(k),
                "proxy": proxy,
                "judge": judge,
                "proxy_gain": proxy - _score(reference[PROXY], below=count),
                "judge_gain": judge - _score(reference[JUDGE], below=count),
                "perplexity": math.exp(best(lambda ours, theirs: _own_nll(ours))),
                "length": best(lambda ours, theirs: ours["length"]),
                "shakespeare": 0.0,  # nothing is trained
                "gsm8k": 0.0,
            }
        )
        k *= 2
    return rows


def agreement(evaluated: Sequence[Row]) -> dict[str, Row]:
    """The correlation of proxy and judge on the reference's samples of all seeds.

    Returns:
      For "ended" responses and for "cut" ones, which lack a stop token: "responses",
      their number, and "correlation" of both scores, None if undefined. Scores are
      centred per prompt, because a reward model learns no mean.
    """
    pairs: dict[str, list[Any]] = {"ended": [], "cut": []}
    for one in evaluated:
        if one["policy"] != REFERENCE:
            continue
        both = [results.sampled(one[scorer]) for scorer in (PROXY, JUDGE)]
        prompts = np.array([row["row"] for row in both[0]])
        scores = np.array([[row["score"] for row in rows] for rows in both]).T
        for prompt in {*prompts.tolist()}:
            scores[prompts == prompt] -= scores[prompts == prompt].mean(axis=0)
        for row, of_both in zip(both[0], scores, strict=True):
            pairs["ended" if row["ended"] else "cut"].append(of_both)
    agreed = {}
    for kind, scores in pairs.items():
        columns = np.array(scores, float).reshape(-1, 2).T
        varied = columns.shape[1] > 1 and (np.ptp(columns, axis=1) > 0).all()
        correlation = float(np.corrcoef(columns)[0, 1]) if varied else None
        agreed[kind] = {"responses": len(scores), "correlation": correlation}
    return agreed


def summarise(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Means over seeds with 95% intervals, by policy, in the order of the rows.

    Returns:
      For each policy its "seeds" and, for each of MEASURED and GAINS, {"mean",
      "interval", "of_seeds"}, None if a seed lacks the measure.
    """
    summary = {}
    for name in dict.fromkeys(row["policy"] for row in rows):
        own = [row for row in rows if row["policy"] == name]
        values = {key: [row[key] for row in own] for key in (*MEASURED, *GAINS)}
        summary[name] = {
            key: None if None in of_seeds else estimate(of_seeds)
            for key, of_seeds in values.items()
        } | {"seeds": [row["seed"] for row in own]}
    return summary


def estimate(of_seeds: Sequence[float]) -> Row:
    """A mean over seeds with its interval, None for one seed."""
    interval = statistics.of_mean(np.asarray(of_seeds, float))
    return {
        "mean": float(np.mean(of_seeds)),
        "interval": interval and list(interval),
        "of_seeds": [*of_seeds],
    }


def _score(scored: Row, *, below: int) -> float:
    """The mean score of the first samples of each prompt."""
    rows = results.sampled(scored)
    return _mean(row["score"] for row in rows if row["sample"] < below)


def _distinct(samples: Sequence[Row]) -> float:
    """Share of distinct texts among the first SAMPLES samples of each prompt."""
    responses = [row["response"] for row in samples if row["sample"] < SAMPLES]
    return len(set(responses)) / len(responses)


def _own_nll(row: Row) -> float:
    """Mean −log π of a response under its own model, nats per token."""
    return -row["logprob"] / row["length"]


def _mean(values: Any) -> float:
    return float(np.mean([*values]))
