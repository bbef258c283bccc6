"""The options of what a run looks at and does not train on."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import alarms
from rlhf_jax.runs.alarms import Limits
from rlhf_jax.train.start import StartConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchedConfig(StartConfig):
    """Options of samples, drift, held-out texts, a judge and alarms."""

    sample_every: int = 10
    """Iterations between rows of samples.jsonl."""
    num_shown: int = 4
    """Responses in samples.jsonl each time."""
    sample_reference: bool = False
    """Whether the reference responds to the same prompts for samples.jsonl, with the
    same keys; it costs the sampling of another batch each time."""
    num_alternatives: int = 0
    """Likeliest tokens at each place of the responses in samples.jsonl; two forward
    passes of these few rows each time. 0 records none."""
    drift_every: int = 1
    """Iterations between measurements of the weight drift."""
    held_out: str | None = None
    """Text or demonstrations like those of SFT; its perplexity shows forgetting."""
    out_of_domain: str | None = None
    """Text of another kind; its perplexity shows the alignment tax."""
    judge: str | None = None
    """Second reward that is not trained on, module:function; it shows reward
    hacking."""
    judge_failure: Literal["stop", "warn"] = "stop"
    """What happens to the run when the judge fails; warn leaves that judge/score
    out."""
    eval_every: int = 10
    """Iterations between evaluations on --held-out, --out-of-domain and --judge."""
    eval_rows: int = 64
    """Rows of each text to evaluate on."""
    alarms: Limits = alarms.LIMITS
    """Limits beyond which the run asks for a look."""

    def check_watched(self) -> None:
        """Raises InputError for what cannot be chosen, or not without a judge."""
        if self.judge is None and self.judge_failure != "stop":
            raise InputError(
                f"--judge-failure {self.judge_failure}: expected a --judge that may "
                f"fail, got none; name one, or leave it out"
            )
        checks.positive(
            sample_every=self.sample_every,
            drift_every=self.drift_every,
            eval_every=self.eval_every,
            eval_rows=self.eval_rows,
        )
        checks.non_negative(
            num_shown=self.num_shown, num_alternatives=self.num_alternatives
        )
