"""One update of a policy gradient in float64, by loops: from logits to the loss.

Like `oracles`, this file never imports jax and uses nothing of the package: a method is
its published formula with the formula's options. Quantities under a stop-gradient (old
log-probs, importance weights, clipped ratios of CISPO, values of a KL estimate) are
computed at the parameters before the update, `start`, and the rest at `now`, so that
finite differences of the loss match the gradient.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np
import oracles

Array = np.ndarray
Table = Array  # f64[B, S, V], log-probs of what stands in column t, after all before it


@dataclasses.dataclass(frozen=True)
class Rows:
    """A rollout: prompts on the left, `group` neighbouring rows of one prompt."""

    tokens: Array
    mask: Array
    response_mask: Array
    sampler_logprobs: Array  # log μ
    scores: Array
    group: int
    stops: tuple[int, ...]

    def columns(self, row: int) -> list[int]:
        return [t for t in range(self.mask.shape[1]) if self.response_mask[row, t]]

    @property
    def finished(self) -> list[bool]:
        return [
            any(self.tokens[b, t] in self.stops for t in self.columns(b))
            for b in range(len(self.tokens))
        ]


def logits(params: dict, model, rows: Rows) -> Array:
    """f64[B, S, V] of what predicts each column; 0 where nothing does."""
    output = np.zeros((*rows.tokens.shape, model.vocab_size))
    for b, row in enumerate(rows.tokens):
        columns = np.flatnonzero(rows.mask[b])
        of_text = oracles.decoder_logits(params, model, row[columns].tolist())
        output[b, columns[1:]] = of_text[:-1]
    return output


def table(raw: Array, temperature: float, softcap: float | None = None) -> Table:
    """log softmax(logits / temperature), with a soft cap before."""
    if softcap is not None:
        raw = softcap * np.tanh(raw / softcap)
    scaled = raw / temperature
    top = scaled.max(axis=-1, keepdims=True)
    return scaled - top - np.log(np.exp(scaled - top).sum(axis=-1, keepdims=True))


def picked(of: Table, rows: Rows) -> Array:
    """f64[B, S], log-probs of the response tokens; 0 elsewhere."""
    output = np.zeros(rows.tokens.shape)
    for b, t in oracles.entries(rows.response_mask):
        output[b, t] = of[b, t, rows.tokens[b, t]]
    return output


@dataclasses.dataclass(frozen=True, kw_only=True)
class KL:
    """A KL penalty, by the names of its paper."""

    value: str = "k1"
    grad: str | None = None
    placement: str | None = "reward"
    direction: str = "reverse"
    per: str = "token"
    weights: str | None = None
    clip: float | None = None
    top_k: int | None = None
    sampled_tail: bool = False
    of_reference: float | None = None

    def to(self, reference: Array, old: Array) -> Array:
        """Log-probs of what the KL is to: a geometric mixture, not normalised."""
        share = self.of_reference
        if share is None:
            return reference
        return np.log(np.exp(reference) ** share * np.exp(old) ** (1 - share))

    def exact(self, policy: Table, reference: Table, mask: Array) -> Array:
        output = np.zeros(mask.shape)
        for b, t in oracles.entries(mask):
            p, q = np.exp(policy[b, t]), np.exp(reference[b, t])
            if self.top_k is not None:
                order = np.argsort(-p, kind="stable")
                p, q = (
                    np.append(x[order[: self.top_k]], x[order[self.top_k :]].sum())
                    for x in (p, q)
                )
            if self.direction == "forward":
                p, q = q, p
            output[b, t] = math.fsum(p * np.log(p / q))
        return output

    def with_sampled_tail(
        self, now: Table, reference: Table, rows: Rows, *, start: Table, own: Array
    ) -> Array:
        """Σ_K p log(p/q) and w·x of a token beside K; p and log π move, logs do not."""
        output = np.zeros(rows.tokens.shape)
        for b, t in oracles.entries(rows.response_mask):
            top = np.argsort(-start[b, t], kind="stable")[: self.top_k]
            x = start[b, t] - reference[b, t]
            output[b, t] = math.fsum(np.exp(now[b, t, top]) * x[top])
            token = rows.tokens[b, t]
            if token not in top:
                weight = math.exp(own[b, t]) if self.weights == "token" else 1.0
                moved = now[b, t, token] - start[b, t, token]
                output[b, t] += weight * x[token] * (1 + moved)
        return output

    def terms(
        self,
        estimator: str,
        *,
        log_ratio: Array,
        log_weights: Array,
        exact: Array | None,
        rows: Rows,
    ) -> dict[tuple[int, int], float]:
        """The estimate at each column that has one, times its importance weight."""
        output = {}
        for b in range(len(rows.tokens)):
            columns = rows.columns(b)
            for t in columns:
                before = [s for s in columns if s <= t]
                x, own = log_ratio[b, t], log_weights[b, t]
                level = None if exact is None else exact[b, t]
                if self.per == "response":
                    if t != columns[-1]:
                        continue
                    x = math.fsum(log_ratio[b, s] for s in columns)
                    own = math.fsum(log_weights[b, s] for s in columns)
                    if exact is not None:
                        level = math.fsum(exact[b, s] for s in columns)
                elif self.weights == "prefix":
                    own = math.fsum(log_weights[b, s] for s in before)
                k = {
                    "k1": x,
                    "k2": x * x / 2,
                    "k3": math.exp(-x) - 1 + x,
                    "exact": level,
                }[estimator]
                if estimator == "exact" and self.sampled_tail:
                    own = 0.0  # the tail has it
                output[b, t] = math.exp(own) * k
        return output

    def share(self, rows: Rows, row: int) -> float:
        return 1 / len(rows.columns(row)) if self.per == "length" else 1.0

    def in_reward(
        self, rows: Rows, old: Array, policy: Table, reference: Table
    ) -> Array:
        """f64[B, S]: what β is multiplied by in the reward of each token."""
        ref = self.to(picked(reference, rows), old)
        sign = 1 if self.direction == "reverse" else -1
        log_ratio = sign * (old - ref)
        weighted = self.direction == "forward" and self.weights is not None
        terms = self.terms(
            self.value,
            log_ratio=log_ratio,
            log_weights=log_ratio if weighted else np.zeros_like(old),
            exact=self.exact(policy, reference, rows.response_mask),
            rows=rows,
        )
        output = np.zeros(old.shape)
        for (b, t), term in terms.items():
            if self.clip is not None:
                term = min(max(term, -self.clip), self.clip)
            output[b, t] = term * self.share(rows, b)
        return output

    def in_loss(
        self,
        rows: Rows,
        *,
        start: Table,
        now: Table,
        reference: Table,
        behaviour: Array,
        weights: Array,
    ) -> tuple[float, float]:
        """(Σ weights·kl, Σ of the values over tokens), values standing still."""
        mask, ref = rows.response_mask, self.to(picked(reference, rows), behaviour)
        sign = 1 if self.direction == "reverse" else -1
        log_weights = np.zeros_like(ref)
        if self.weights is not None:
            target = picked(start, rows) if self.direction == "reverse" else ref
            log_weights = target - behaviour

        def at(policy: Table, estimator: str) -> dict[tuple[int, int], float]:
            exact = self.exact(policy, reference, mask)
            if self.sampled_tail:
                exact = self.with_sampled_tail(
                    policy, reference, rows, start=start, own=log_weights
                )
            return self.terms(
                estimator,
                log_ratio=sign * (picked(policy, rows) - ref),
                log_weights=log_weights,
                exact=exact,
                rows=rows,
            )

        values = at(start, self.value)
        slope = self.value if self.grad is None else self.grad
        before, after = at(start, slope), at(now, slope)
        loss = total = 0.0
        for (b, t), value in values.items():
            moved = after[b, t] - before[b, t]
            if self.clip is not None and abs(value) > self.clip:
                value, moved = math.copysign(self.clip, value), 0.0
            loss += weights[b, t] * self.share(rows, b) * (value + moved)
            total += value
        return loss, total


def token_weights(rows: Rows, aggregation: str, scale: float | None = None) -> Array:
    """f64[B, S]: what each token's loss is multiplied by."""
    mask = rows.response_mask
    lengths = [len(rows.columns(b)) for b in range(len(mask))]
    responses = sum(length > 0 for length in lengths)
    weights = np.zeros(mask.shape)
    for b, t in oracles.entries(mask):
        first = b // rows.group * rows.group
        of_prompt = sum(lengths[first : first + rows.group])
        firsts = range(0, len(lengths), rows.group)
        prompts = sum(sum(lengths[f : f + rows.group]) > 0 for f in firsts)
        weights[b, t] = {
            "token_mean": 1 / sum(lengths),
            "sequence_mean": 1 / (lengths[b] * responses),
            "prompt_mean": 1 / (prompts * of_prompt),
            "constant": 1 / ((scale or 1) * responses),
        }[aggregation]
    return weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class Surrogate:
    """clip, cispo or sapo, of the ratio of a token or its response; dar; centred."""

    kind: str = "clip"
    low: float = 0.2
    high: float = 0.2
    dual: float | None = None
    positive: float = 1.0
    negative: float = 1.05
    level: str = "token"
    beta: float = 1.0
    share: float = 0.0
    cap: float = math.inf
    floor: float = 0.0
    # Of the sampler's likeliest tokens: i64[B, S, k], and their log-probs f64[B, S, k].
    recorded: Callable[[], tuple[Array, Array]] | None = None

    def ratios(self, rows: Rows, *, now: Array, start: Array, old: Array) -> Array:
        """f64[B, S]; of sequence_token the response's, which its own token moves."""
        output = np.ones(rows.tokens.shape)
        for b, t in oracles.entries(rows.response_mask):
            columns = rows.columns(b)

            def mean(x: Array, b: int = b, columns: list[int] = columns) -> float:
                return math.fsum(x[b, s] - old[b, s] for s in columns) / len(columns)

            log_ratio = {
                "token": now[b, t] - old[b, t],
                "sequence": mean(now),
                "sequence_token": mean(start) + now[b, t] - start[b, t],
            }[self.level]
            output[b, t] = math.exp(log_ratio)
        return output

    def terms(
        self,
        rows: Rows,
        *,
        now: Array,
        start: Array,
        old: Array,
        advantages: Array,
        reference: Array,
        tables: tuple[Table, Table],
    ) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
        """(loss of each token, 1 where its bound holds); tables of now and start."""
        loss, bounded = {}, {}
        ratios = self.ratios(rows, now=now, start=start, old=old)
        fixed = self.ratios(rows, now=start, start=start, old=old)
        for b, t in oracles.entries(rows.response_mask):
            ratio, a = ratios[b, t], advantages[b, t]
            within = min(max(ratio, 1 - self.low), 1 + self.high)
            if self.kind == "clip":
                gain = min(ratio * a, within * a)
                if self.dual is not None and a < 0:
                    gain = max(gain, self.dual * a)
                loss[b, t] = -gain
                bounded[b, t] = float(within * a < ratio * a)
            elif self.kind == "cispo":
                weight = min(max(fixed[b, t], 1 - self.low), 1 + self.high)
                loss[b, t] = -weight * a * now[b, t]
                bounded[b, t] = float(weight != fixed[b, t])
            elif self.kind == "dar":
                back = math.fsum(reference[b, s] - old[b, s] for s in rows.columns(b))
                weight = math.exp(self.share * back + a / self.beta)
                loss[b, t] = -min(weight, self.cap) * now[b, t]
                bounded[b, t] = float(weight > self.cap)
            elif self.kind == "centred":
                mean = self._expected(b, t, *tables)
                weight = self._weight(fixed[b, t])
                loss[b, t] = -a * (weight * now[b, t] - mean)
                bounded[b, t] = float(not self.floor <= fixed[b, t] <= self.cap)
            else:
                tau = self.positive if a > 0 else self.negative
                gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
                loss[b, t] = -4 / tau * gate * a
        return loss, bounded

    def _weight(self, ratio: float) -> float:
        """A ratio cut at the cap, or 0 outside of floor and cap where there is one."""
        if self.floor:
            return ratio if self.floor <= ratio <= self.cap else 0.0
        return min(ratio, self.cap)

    def _expected(self, b: int, t: int, now: Table, start: Table) -> float:
        """Σ_v (μ f(π/μ) - α π)·log π over the recorded tokens, α = ρ·f(1/ρ)."""
        assert self.recorded is not None
        tokens, log_sampler = (x[b, t] for x in self.recorded())
        sampler, policy = np.exp(log_sampler), np.exp(start[b, t, tokens])
        rho = (1 - sampler.sum()) / (1 - policy.sum())
        alpha = rho * self._weight(1 / rho)
        terms = [
            (q * self._weight(p / q) - alpha * p) * now[b, t, token]
            for q, p, token in zip(sampler, policy, tokens, strict=True)
        ]
        return math.fsum(terms)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shaping:
    """Of scores, in the order in which they are applied."""

    normalise: bool = False
    clip: float | None = None
    length_penalty: float = 0.0
    overlong: tuple[float, int, int] | None = None  # (penalty, after, buffer)
    missing_stop_score: float | None = None
    missing_stop_penalty: float = 0.0

    def of(self, rows: Rows) -> Array:
        output = np.array(rows.scores, np.float64)
        mean = output.mean()
        deviation = math.sqrt(((output - mean) ** 2).mean() + 1e-8)
        for b, finished in enumerate(rows.finished):
            length = len(rows.columns(b))
            if self.normalise:
                output[b] = (output[b] - mean) / deviation
            if self.clip is not None:
                output[b] = min(max(output[b], -self.clip), self.clip)
            output[b] -= self.length_penalty * length
            if self.overlong is not None:
                penalty, after, buffer = self.overlong
                output[b] -= penalty * min(max((length - after) / buffer, 0), 1)
            if not finished:
                output[b] -= self.missing_stop_penalty
                if self.missing_stop_score is not None:
                    output[b] = self.missing_stop_score
        return output


# Of shaped scores and what β multiplies in the reward: (advantages, trained rows).
Advantages = Callable[[Rows, Array, Array], tuple[Array, Array]]


def to_go(rows: Rows, rewards: Array, *, whiten: bool) -> Array:
    """REINFORCE++: the sum of a token's reward and of those after it."""
    output = np.zeros(rewards.shape)
    for b, t in oracles.entries(rows.response_mask):
        output[b, t] = math.fsum(rewards[b, s] for s in rows.columns(b) if s >= t)
    return oracles.masked_whiten(output, rows.response_mask) if whiten else output


def over_groups(
    rows: Rows,
    rewards: Array,
    *,
    baseline: str,
    normalise: str | None,
    overlong_mask: str | None,
    equal_groups: str,
) -> tuple[Array, list[bool]]:
    """(advantages [B], rows that are trained on) of GRPO, RLOO and DAPO."""
    totals = [
        math.fsum(rewards[b, t] for t in rows.columns(b)) for b in range(len(rewards))
    ]
    finished = rows.finished
    trained = [overlong_mask is None or end for end in finished]
    counted = [overlong_mask != "group" or end for end in finished]
    output = np.zeros(len(totals))
    for first in range(0, len(totals), rows.group):
        members = [b for b in range(first, first + rows.group) if counted[b]]
        group = [totals[b] for b in members]
        if len(set(group)) <= 1 and equal_groups == "leave_out":
            for b in range(first, first + rows.group):
                trained[b] = False
        for b in members:
            others = [totals[c] for c in members if c != b]
            mean = sum(group) / len(group)
            if baseline == "leave_one_out":
                output[b] = totals[b] - sum(others) / len(others) if others else 0.0
                continue
            output[b] = totals[b] - mean
            if normalise == "group":
                squares = sum((total - mean) ** 2 for total in group)
                spread = math.sqrt(squares / (len(group) - 1)) if others else 0.0
                output[b] /= spread + 1e-6
    return output, trained


def kept(rows: Rows, trained: Mapping[int, bool] | list[bool] | Array) -> Rows:
    """The same rollout with responses, or tokens, that are not trained on left out."""
    mask = np.array(rows.response_mask)
    for b, t in oracles.entries(rows.response_mask):
        mask[b, t] = trained[b, t] if isinstance(trained, np.ndarray) else trained[b]
    return dataclasses.replace(rows, response_mask=mask)
