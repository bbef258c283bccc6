"""The options of `rlhf-jax evaluate`."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data.lengths import Limits
from rlhf_jax.devices.placement import PolicyPlacement
from rlhf_jax.evaluation.figures import Kind
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs.run_config import RunConfig
from rlhf_jax.train.config import capabilities
from rlhf_jax.train.config.config import FLAT
from rlhf_jax.train.config.models import Compute
from rlhf_jax.train.config.prompts import AskedPrompts
from rlhf_jax.train.config.rewards import Model, Reward, Rewards, Verifier, Workers
from rlhf_jax.train.config.sampler import Episodes

NUM_TEXTS = 256
KINDS: dict[str, Kind] = {  # {option: kind of its scores}
    "--reward": "reward",
    "--verifier": "verifier",
    "--reward-model": "reward",
    "--environment": "environment",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evaluated(Compute):
    """The model that is evaluated."""

    model: str
    """Policy to evaluate, a checkpoint folder or hub id."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    """The options of `rlhf-jax evaluate`."""

    start: Annotated[Evaluated, FLAT]
    """The model that is evaluated."""
    data: Annotated[AskedPrompts, FLAT]
    """The held-out prompts."""
    workers: Annotated[Workers, FLAT] = Workers()
    """The processes that verify, or that run the environment."""
    reference: str | None = None
    """Reference to compare with, a checkpoint with the policy's vocabulary. None
    compares with none."""
    reward: str | None = None
    """Python function that scores responses, module:function. None has none."""
    verifier: Verifier | None = None
    """Verifier that scores responses: gsm8k, integer, exact, or module:function.
    Options: answer_field=answer, and for gsm8k unmarked=last_number. None has none."""
    reward_model: str | None = None
    """Reward model that scores responses, a checkpoint or hub id. None has none."""
    environment: Episodes | None = None
    """Environment whose episodes are evaluated, as in `rlhf-jax ppo`. None evaluates
    responses."""
    judge: str | None = None
    """Judge of pairs of responses, module:function. It is asked in both orders. None
    has none."""
    num_samples: int = 8
    """Number of sampled responses per prompt, n."""
    ks: tuple[int, ...] | None = None
    """k of pass@k, best@k and majority@k, at most n; 1 is always included. None is
    1, 2, 4, ... and n."""
    temperature: float = 1.0
    """Temperature of sampling, of the KL and of the perplexity of responses."""
    max_new_tokens: int = 256
    """Longest response, tokens."""
    batch_size: int = 16
    """Prompts at a time."""
    texts: str | None = None
    """Held-out texts whose loss shows forgetting: plain text (.txt), or demonstrations
    in JSONL. None has none."""
    num_texts: int = NUM_TEXTS
    """Rows of --texts to read, from the beginning."""
    text_max_length: int | None = None
    """Longest row of --texts, tokens; None is the model's context. Plain text is cut
    into such rows, longer demonstrations are left out."""
    stop_timeout: float = 20.0
    """Seconds that sampling and scoring may still take after SIGTERM or Ctrl-C. Then
    the state from before this step is saved, and the run ends."""
    snapshot_every: int = 10
    """Steps (batches of prompts) between snapshots."""
    placement: PolicyPlacement = dataclasses.field(default_factory=PolicyPlacement)
    """Devices and mesh of all models."""

    @property
    def compute_dtype(self) -> str:
        """Dtype of activations, --dtype."""
        return self.start.dtype

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            num_samples=self.num_samples,
            temperature=self.temperature,
            max_new_tokens=self.max_new_tokens,
            batch_size=self.batch_size,
            num_texts=self.num_texts,
            text_max_length=self.text_max_length,
            stop_timeout=self.stop_timeout,
        )
        checks.rows(batch_size=self.batch_size * self.num_samples)
        mesh = self.placement.policy
        sharing = mesh.rows * mesh.context
        if self.batch_size % sharing:
            raise InputError(
                f"--batch-size: expected a multiple of {sharing}, the devices that "
                f"share the prompts on {mesh}, got {self.batch_size}; change either"
            )
        for k in self.ks or ():
            checks.within(
                least=1,
                most=self.num_samples,
                advice="raise --num-samples, or leave it out",
                **{"--ks": k},
            )
        self._check_scores()
        num_texts = {
            "--num-texts": self.num_texts != NUM_TEXTS,
            "--text-max-length": self.text_max_length is not None,
        }
        capabilities.need(num_texts, "--texts", has=self.texts is not None)
        judge = {f"--judge {self.judge}": self.judge is not None}
        capabilities.need(judge, "--reference", has=self.reference is not None)

    def limits(self, reader: Pretrained) -> Limits:
        """Returns the limits on a prompt; `reader` is --model, without parameters."""
        room = reader.room(max_new_tokens=self.max_new_tokens)
        return Limits(room, self.data.overlong, more="lower --max-new-tokens")

    @property
    def rewards(self) -> Rewards:
        """The reward, verifier or reward model, as a trainer has it."""
        model = None if self.reward_model is None else Model((self.reward_model,))
        return Rewards(
            **vars(self.workers),
            reward=self.reward,
            verifier=self.verifier,
            reward_model=model,
        )

    @property
    def sources(self) -> tuple[Reward, ...]:
        """What scores responses, if anything does."""
        return self.rewards.sources(environment=self.environment is not None)

    def _check_scores(self) -> None:
        """Raises InputError for scorers that cannot be combined."""
        if len(self.scorers) > 1:
            chosen = " and ".join(map(" ".join, self.scorers.items()))
            raise InputError(
                f"expected one of --reward, --verifier, --reward-model and "
                f"--environment, or none, got {chosen}; evaluate with each in a run of "
                f"its own"
            )
        self.workers.refuse_unread(has_pool=self.kind in ("verifier", "environment"))
        if self.environment is not None:
            option = self.data.writing_option
            capabilities.exclude(
                {str(option): option is not None},
                {f"--environment {self.environment.name}": True},
                reason="it writes its prompts from the rows",
            )
            capabilities.exclude(
                {"seconds= of --environment": self.environment.seconds is not None},
                {"rlhf-jax evaluate": True},
                reason="its figures would depend on the clock (--timeout limits turns)",
            )

    @property
    def levels(self) -> tuple[int, ...]:
        """The k of pass@k, best@k and majority@k."""
        if self.ks is not None:
            return tuple(sorted({1, *self.ks}))
        powers = [2**i for i in range(self.num_samples.bit_length())]
        return tuple(sorted({*powers, self.num_samples}))

    @property
    def scorers(self) -> dict[str, str]:
        """{option: value} of what scores responses; at most one entry."""
        options = {
            "--reward": self.reward,
            "--verifier": self.verifier and self.verifier.name,
            "--reward-model": self.reward_model,
            "--environment": self.environment and self.environment.name,
        }
        return {name: value for name, value in options.items() if value is not None}

    @property
    def score_called(self) -> str:
        """The scorer as messages name it; "" without one."""
        return " ".join(word for pair in self.scorers.items() for word in pair)

    @property
    def kind(self) -> Kind:
        """The kind of the scores."""
        for option in self.scorers:
            return KINDS[option]
        return "none"


SCREEN = {
    "Models": ("start.model", "reference"),
    "Data": (
        "data.prompts",
        "data.prompt_field",
        "data.template",
        "data.chat",
        "texts",
    ),
    "Score": ("verifier", "reward", "reward_model", "environment", "judge"),
    "Sampling": ("num_samples", "temperature", "max_new_tokens"),
    "Run": ("out", "resume"),
}
"""The options of --help."""
