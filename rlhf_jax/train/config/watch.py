"""`watch`: what is measured but not trained on."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Literal, Self

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import alarms
from rlhf_jax.runs.alarms import Limits
from rlhf_jax.train.config import capabilities


@dataclasses.dataclass(frozen=True)
class Text:
    """Texts whose perplexity shows forgetting."""

    name: str
    source: str

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a text such as "code=files/code.jsonl"."""
        name, _, source = text.partition("=")
        if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or not source:
            raise InputError(f"--texts: expected NAME=SOURCE, got {text!r}")
        return cls(name, source)

    def __str__(self) -> str:
        return f"{self.name}={self.source}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchTexts:
    """Texts, weight drift and alarms, for runs of any command."""

    texts: tuple[Text, ...] = ()
    """Texts or demonstrations, each NAME=SOURCE, whose mean negative log-likelihood is
    logged as eval/NAME_nll. The texts of SFT show forgetting, texts of another kind the
    alignment tax."""
    text_rows: int = 64
    """Rows of each of --texts to evaluate on."""
    text_max_length: int | None = None
    """Longest row of --texts, tokens; None is the model's context. Plain text is cut
    into such rows, longer demonstrations are left out."""
    eval_every: int = 10
    """Steps between evaluations on --texts, and by --judge if it is set."""
    drift_every: int = 1
    """Steps between measurements of the weight drift."""
    alarms: Limits = alarms.LIMITS
    """Limits beyond which the run raises an alarm."""

    def __post_init__(self) -> None:
        checks.positive(
            drift_every=self.drift_every,
            eval_every=self.eval_every,
            text_rows=self.text_rows,
            text_max_length=self.text_max_length,
        )
        refuse_twice("--texts", [text.name for text in self.texts])


def refuse_twice(option: str, names: Sequence[str]) -> None:
    """Raises InputError if two entries of an option have the same name."""
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InputError(
            f"{option}: expected each name once, got {', '.join(twice)} twice; rename "
            f"one"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Watch(WatchTexts):
    """Held-out prompts, judge and samples, for runs of a policy gradient."""

    held_out: str | None = None
    """Prompts to evaluate on, in the forms of --prompts. The mean score of greedy
    responses is measured before and after the run, and every --held-out-every
    iterations. None evaluates on none."""
    held_out_every: int | None = None
    """Iterations between evaluations on --held-out; None evaluates before and after."""
    held_out_rows: int = 256
    """Rows of --held-out to evaluate on, from the beginning."""
    held_out_samples: int = 0
    """Responses k sampled for each row of --held-out; 0 samples none. Reported are
    their mean score, the share of rows with a score above 0 among them (pass@k) and
    their KL."""
    judge: str | None = None
    """Reward that reveals hacking, module:function. It is not trained on.
    None has no judge."""
    judge_failure: Literal["stop", "warn"] = "stop"
    """Treatment of a judge that fails: stop ends the run, warn leaves out that
    judge/score."""
    sample_every: int = 10
    """Iterations between entries in samples.jsonl."""
    num_shown: int = 4
    """Responses per entry in samples.jsonl."""
    sample_reference: bool = False
    """Whether samples.jsonl has responses of the reference to the same prompts, drawn
    with the same keys. It samples another batch each time."""
    num_alternatives: int = 0
    """Likeliest tokens recorded at each position of the responses in samples.jsonl; 0
    records none. It runs two forward passes over these few rows each time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            sample_every=self.sample_every,
            held_out_rows=self.held_out_rows,
        )
        checks.positive(held_out_every=self.held_out_every)
        checks.non_negative(
            num_shown=self.num_shown,
            num_alternatives=self.num_alternatives,
            held_out_samples=self.held_out_samples,
        )
        failure = {"--judge-failure warn": self.judge_failure != "stop"}
        capabilities.need(failure, "--judge", has=self.judge is not None)
