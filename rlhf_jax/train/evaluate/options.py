"""The options of `rlhf-jax evaluate`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from rlhf_jax.devices.placement import PolicyPlacement
from rlhf_jax.evaluation.figures import Kind
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train.environment.options import EnvironmentConfig

# Defaults of options that belong to another one.
ANSWER_FIELD = "answer"
NUM_TEXTS = 256
TIMEOUT = 10.0  # seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(EnvironmentConfig):
    """The options of `rlhf-jax evaluate`."""

    model: str
    """Policy to evaluate, a checkpoint folder or hub id."""
    reference: str | None = None
    """Reference to compare with, a checkpoint that reads the policy's tokens; None
    compares with nothing."""
    prompts: str
    """Held-out prompts: JSONL, .txt, or hf:NAME:SPLIT."""
    prompt_field: str = "prompt"
    """Field of --prompts with the prompts."""
    template: str = "{question}"
    """Prompt, with {question} where the text of --prompt-field stands."""
    chat: bool = False
    """Whether the text is put as a message of the user, by the tokenizer's chat
    template."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of prompts that leave no room for a response: an error, or drop
    them."""
    reward: str | None = None
    """Score of a response by a Python function of texts, module:function."""
    verifier: str | None = None
    """Score of a response by a verifier: gsm8k, integer, exact, or a Python function
    module:function."""
    reward_model: str | None = None
    """Score of a response by a reward model, a checkpoint folder or hub id."""
    answer_field: str = ANSWER_FIELD
    """Field of the rows with the right answers; for gsm8k they end in #### and a
    number."""
    unmarked: Literal["wrong", "last_number"] = "wrong"
    """Treatment of a response without #### by gsm8k: it is wrong, or its last number
    counts."""
    judge: str | None = None
    """Judge of pairs of responses, module:function, which is asked in both orders."""
    num_samples: int = 8
    """Number of sampled responses per prompt, n."""
    ks: tuple[int, ...] | None = None
    """k of pass@k, best@k and majority@k, at most n, beside 1; None is 1, 2, 4, ...
    and n."""
    temperature: float = 1.0
    """Temperature of sampling, of the KL and of the perplexity of responses."""
    max_new_tokens: int = 256
    """Longest response, tokens."""
    batch_size: int = 16
    """Prompts at a time."""
    texts: str | None = None
    """Held-out texts whose loss shows forgetting: plain text (.txt), or demonstrations
    in JSONL."""
    num_texts: int = NUM_TEXTS
    """Rows of --texts to read, from the beginning."""
    num_workers: int | None = None
    """Processes that verify, or run --environment; None is one per processor."""
    timeout: float = TIMEOUT
    """Seconds to verify one response, or to answer one turn."""
    on_failure: Literal["zero", "stop"] = "zero"
    """What happens where a response could not be verified, or a turn answered: it
    scores 0, or the run stops."""
    stop_timeout: float = 20.0
    """Seconds that sampling and scoring may still take after SIGTERM or Ctrl-C. Then
    the state from before this step is saved, and the run ends."""
    snapshot_every: int = 10
    """Steps, batches of prompts, between snapshots."""
    placement: PolicyPlacement = dataclasses.field(default_factory=PolicyPlacement)
    """Where all models are: devices and mesh."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            num_samples=self.num_samples,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            num_texts=self.num_texts,
            timeout=self.timeout,
            stop_timeout=self.stop_timeout,
        )
        checks.rows(batch_size=self.batch_size * self.num_samples)
        mesh = self.placement.policy
        sharing = mesh.data * mesh.fsdp * mesh.context
        if self.batch_size % sharing:
            raise InputError(
                f"--batch-size: expected a multiple of {sharing}, the devices that "
                f"share the prompts on {mesh}, got {self.batch_size}; change either"
            )
        for k in self.ks or ():
            if not 1 <= k <= self.num_samples:
                raise InputError(
                    f"--ks: expected 1 to the {self.num_samples} samples of "
                    f"--num-samples, got {k}; sample more, or leave it out"
                )
        scorers = {
            "--reward": self.reward,
            "--verifier": self.verifier,
            "--reward-model": self.reward_model,
        }
        if self.environment is not None:
            self._check_episodes(scorers)
        given = [f"{name} {value}" for name, value in scorers.items() if value]
        if len(given) > 1:
            raise InputError(
                f"expected one of --reward, --verifier and --reward-model, or none, "
                f"got {' and '.join(given)}; evaluate with each in a run of its own"
            )
        if self.verifier is None and self.unmarked != "wrong":
            raise InputError(
                f"--unmarked: expected --verifier gsm8k with it, which reads it, got "
                f"{self.unmarked} without; give both, or leave it out"
            )
        if self.verifier is None and self.answer_field != ANSWER_FIELD:
            raise InputError(
                f"--answer-field: expected --verifier with it, which reads it, got "
                f"{self.answer_field} without; give both, or leave it out"
            )
        of_verifier = {
            "--num-workers": (self.num_workers, None),
            "--timeout": (self.timeout, TIMEOUT),
            "--on-failure": (self.on_failure, "zero"),
        }
        answers = self.verifier is not None or self.environment is not None
        _check_read(of_verifier, by="--verifier or --environment", given=answers)
        of_texts = {"--num-texts": (self.num_texts, NUM_TEXTS)}
        _check_read(of_texts, by="--texts", given=self.texts is not None)
        if self.judge is not None and self.reference is None:
            raise InputError(
                f"--judge {self.judge}: expected --reference with it, whose responses "
                f"the policy's are compared with, got none; give one, or leave it out"
            )
        names = ("prompt_field", "template")
        self.check_environment(
            max_new_tokens=self.max_new_tokens, replaced=self.changed(*names)
        )
        if "{question}" not in self.template:
            raise InputError(
                f"--template: expected {{question}} where the prompt is to stand, got "
                f"{self.template!r}; put it in"
            )

    def _check_episodes(self, scorers: Mapping[str, str | None]) -> None:
        """Raises InputError for what does not go with an environment."""
        for name, value in scorers.items():
            if value is not None:
                raise InputError(
                    f"{name} {value}: expected none with --environment "
                    f"{self.environment}, whose own rewards are the score of an "
                    f"episode; leave one of them out"
                )
        if self.episodes_timeout is not None:
            raise InputError(
                f"--episodes-timeout: expected none, as figures would depend on the "
                f"clock, got {self.episodes_timeout:g}; leave it out, or limit each "
                f"turn with --timeout"
            )

    @property
    def levels(self) -> tuple[int, ...]:
        """The k of pass@k, best@k and majority@k."""
        if self.ks is not None:
            return tuple(sorted({1, *self.ks}))
        powers = [2**i for i in range(self.num_samples.bit_length())]
        return tuple(sorted({*powers, self.num_samples}))

    @property
    def score_called(self) -> str:
        """What messages call the reward or verifier."""
        if self.environment is not None:
            return f"--environment {self.environment}"
        if self.verifier is not None:
            return f"--verifier {self.verifier}"
        if self.reward is not None:
            return f"--reward {self.reward}"
        return f"--reward-model {self.reward_model}"

    @property
    def kind(self) -> Kind:
        """What scores are."""
        if self.environment is not None:
            return "environment"
        if self.verifier is not None:
            return "verifier"
        scored = self.reward is not None or self.reward_model is not None
        return "reward" if scored else "none"


def _check_read(
    options: Mapping[str, tuple[object, object]], *, by: str, given: bool
) -> None:
    """Refuses options that nothing would read.

    Args:
      options: {name: (value, default)}.
      by: the option that they belong to.
      given: whether that is.
    """
    for name, (value, default) in options.items():
        if value != default and not given:
            raise InputError(
                f"{name}: expected {by} with it, which it belongs to, got {value} "
                f"without; give both, or leave it out"
            )


SCREEN = {
    "Models": ("model", "reference"),
    "Data": ("prompts", "prompt_field", "template", "chat", "texts"),
    "Score": ("verifier", "answer_field", "reward", "reward_model", "judge"),
    "Sampling": ("num_samples", "temperature", "max_new_tokens"),
    "Run": ("out", "resume"),
}
"""The options of --help."""
