"""Computes figures over prompts from scored responses, with intervals.

A figure is computed for each prompt from all of its samples, and then averaged over
prompts, which are the independent draws. Its interval is Student's t over prompts
(`sweeps.statistics`), or Wilson's if each prompt is one trial, right or wrong.

Source: Wilson 1927; Brown, Cai and DasGupta 2001.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np
from scipy import stats

from rlhf_jax.evaluation import comparison, success
from rlhf_jax.evaluation.comparison import Verdict
from rlhf_jax.sweeps import statistics

Kind = Literal["verifier", "reward", "environment", "none"]  # source of the scores
CHECKED = ("verifier", "environment")  # a score of 1 is a success
GRADED = ("reward", "environment")  # scores may be any number
RIGHT = 1.0  # a verifier's score of a right response
# Values of `Response.end`: how episodes of several turns end.
ENDS = ("by_environment", "truncated", "out_of_turns", "out_of_room")


class Figure(NamedTuple):
    """A mean over prompts."""

    mean: float
    # 95% interval of the mean; None if that is Student's t and all values are equal.
    low: float | None
    high: float | None
    prompts: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Response:
    """A response with its numbers; a row of samples.jsonl."""

    model: Literal["policy", "reference"]
    decoding: Literal["sampled", "greedy"]
    row: int  # in the file of prompts, from 0
    sample: int  # number among the prompt's samples, from 0
    prompt: str | list[dict[str, Any]]  # plain text, or the messages of a conversation
    response: str
    length: int  # tokens, the stop token included
    ended: bool  # by a stop token
    score: float | None  # reward units; None if nothing scores
    failed: bool  # the verifier could not score it, which counts as 0
    answer: str | None  # the answer that the verifier extracts
    logprob: float  # nats, Σ log π(token) under the model that responded
    ref_logprob: float | None  # nats, Σ log π_ref(token)
    kl: float | None  # nats, Σ KL(π ‖ π_ref) over the vocabulary; policy only
    k1: float | None  # nats, Σ log π(token) - log π_ref(token); policy only
    verdict: tuple[float, float] | None  # `comparison.Verdict`; policy only
    # For an episode of several turns, else None. `length` counts sampled tokens only.
    turns: int | None = None
    observed: int | None = None  # tokens
    end: str | None = None  # one of ENDS, or "failed" or "timed_out"
    # Counts of a verifier or environment, by name; all responses have the same names.
    counts: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> Self:
        """Reads a row of samples.jsonl."""
        names = [field.name for field in dataclasses.fields(cls)]
        # Rows of older versions have fewer fields.
        values = {name: row[name] for name in names if name in row}
        if values["verdict"] is not None:
            values["verdict"] = tuple(values["verdict"])
        return cls(**values)

    @property
    def right(self) -> bool:
        """Whether the verifier scores the response as right."""
        return self.score == RIGHT


PerPrompt = list[list[Response]]  # responses of one model, by prompt and sample


def by_prompt(responses: Sequence[Response], *, model: str, decoding: str) -> PerPrompt:
    """Returns a model's responses with one decoding, by prompt and sample."""
    prompts: dict[int, list[Response]] = {}
    for response in sorted(responses, key=lambda r: (r.row, r.sample)):
        if (response.model, response.decoding) == (model, decoding):
            prompts.setdefault(response.row, []).append(response)
    return list(prompts.values())


def over_prompts(
    values: Sequence[float], *, share: bool = False, trials: bool = False
) -> Figure:
    """Returns the mean over prompts and its 95% interval.

        mean ± t(0.975, P - 1)·s/√P,        or Wilson's of a share of trials

    Args:
      values: one value for each of P prompts.
      share: whether values are in [0, 1], to which the interval is clipped.
      trials: whether each prompt has one outcome, as with one sample. If all values
        are 0 or 1, the interval is then Wilson's. Means over several samples keep
        Student's t even if all are 0 or 1, since each prompt has its own rate.
    """
    array = np.asarray(values, float)
    mean = float(array.mean())
    if trials and np.isin(array, (0.0, 1.0)).all():
        outcome = stats.binomtest(int(array.sum()), len(array))
        wilson = outcome.proportion_ci(statistics.CONFIDENCE, method="wilson")
        return Figure(mean, float(wilson.low), float(wilson.high), len(array))
    interval = statistics.of_mean(array)
    if interval is None or interval.low == interval.high:
        return Figure(mean, None, None, len(array))
    low, high = interval
    if share:
        low, high = max(low, 0.0), min(high, 1.0)
    return Figure(mean, low, high, len(array))


def of_model(
    prompts: PerPrompt, *, kind: Kind, ks: Sequence[int], answers: bool
) -> dict[str, Figure]:
    """Computes the figures of a model with one decoding; README.md defines each.

    Args:
      prompts: the responses, n for each prompt.
      kind: source of the scores.
      ks: values of k for pass@k, best@k and majority@k; those above n are left out.
      answers: whether the verifier extracts answers.
    """
    count, single = min(map(len, prompts)), _single(prompts)
    chosen = [k for k in ks if k <= count]
    figures: dict[str, Figure] = {}

    def mean(number: Callable[[Response], float | None]) -> Figure:
        return over_prompts(_means(prompts, lambda r: _required(number(r))))

    if kind != "none":
        figures["score"] = over_prompts(
            _means(prompts, _score), trials=single and kind in CHECKED
        )
    for k in chosen:
        if kind in CHECKED:
            figures[f"pass@{k}"] = over_prompts(
                [
                    success.pass_at_k(sum(r.right for r in p), num_samples=len(p), k=k)
                    for p in prompts
                ],
                share=True,
                # With k = n a prompt has one outcome: whether any sample is right.
                trials=all(len(p) == k for p in prompts),
            )
        if kind in GRADED:
            figures[f"best@{k}"] = over_prompts(
                [success.best_at_k(list(map(_score, p)), k=k) for p in prompts]
            )
    if kind == "verifier" and answers:
        for k in chosen:
            figures[f"majority@{k}"] = over_prompts(
                [
                    success.majority_at_k(
                        [r.answer for r in p], [r.right for r in p], k=k
                    )
                    for p in prompts
                ],
                share=True,
                trials=single,
            )
    if kind in CHECKED:
        figures["failed"] = _share(prompts, lambda r: r.failed)
        for name in prompts[0][0].counts:
            means = _means(prompts, lambda r, name=name: r.counts[name])
            shares = all(0 <= mean <= 1 for mean in means)
            figures[name] = over_prompts(means, share=shares, trials=single)
    if kind == "environment":
        figures["turns"] = mean(lambda r: r.turns)
        figures["observed"] = mean(lambda r: r.observed)
        for end in ENDS:
            figures[end] = _share(prompts, lambda r, end=end: r.end == end)
    figures["length"] = mean(lambda r: r.length)
    figures["ended"] = _share(prompts, lambda r: r.ended)
    if count > 1:
        figures["distinct"] = over_prompts(
            [len({r.response for r in p}) / len(p) for p in prompts], share=True
        )
    if prompts[0][0].ref_logprob is not None:
        # -(1/T) Σ log π_ref(token), nats per token.
        figures["log_perplexity"] = mean(lambda r: -_required(r.ref_logprob) / r.length)
    if prompts[0][0].kl is not None:
        figures["kl"] = mean(lambda r: r.kl)
        figures["kl_k1"] = mean(lambda r: r.k1)
    return figures


def compared(policy: PerPrompt, reference: PerPrompt, *, kind: Kind) -> dict[str, Any]:
    """Compares the policy with the reference by responses to the same prompts."""
    figures: dict[str, Figure] = {}
    single = _single(policy) and _single(reference)
    if kind != "none":
        scores = [
            (list(map(_score, ours)), list(map(_score, theirs)))
            for ours, theirs in zip(policy, reference, strict=True)
        ]
        figures["score_difference"] = over_prompts(
            [float(np.mean(ours) - np.mean(theirs)) for ours, theirs in scores]
        )
        figures["win_rate_by_score"] = over_prompts(
            [comparison.win_rate(ours, theirs) for ours, theirs in scores],
            share=True,
            trials=single,
        )
    if policy[0][0].verdict is not None:
        for name, number in (
            ("win_rate_by_judge", lambda r: _verdict(r).win),
            ("judge_prefers_first", lambda r: _verdict(r).first),
        ):
            values = _means(policy, number)
            figures[name] = over_prompts(values, share=True, trials=single)
    return figures


def distinct_share(prompts: PerPrompt) -> float:
    """Returns the number of different responses over that of all responses."""
    texts = [response.response for samples in prompts for response in samples]
    return len(set(texts)) / len(texts)


def _single(prompts: PerPrompt) -> bool:
    return all(len(samples) == 1 for samples in prompts)


def _share(prompts: PerPrompt, is_one: Callable[[Response], bool]) -> Figure:
    """The share of responses for which `is_one` holds."""
    return over_prompts(_means(prompts, is_one), share=True, trials=_single(prompts))


def _means(prompts: PerPrompt, number: Callable[[Response], float]) -> list[float]:
    """The mean of a number over each prompt's samples."""
    return [float(np.mean([number(r) for r in samples])) for samples in prompts]


def _score(response: Response) -> float:
    return _required(response.score)


def _verdict(response: Response) -> Verdict:
    assert response.verdict is not None  # all responses have one, or none has
    return Verdict(*response.verdict)


def _required(number: float | None) -> float:
    assert number is not None  # all responses have one, or none has
    return number
