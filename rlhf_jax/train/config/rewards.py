"""`rewards`: a weighted list, each NAME=KIND:SOURCE,weight=W.

    --rewards right=verifier:gsm8k kind=model:runs/rm/model,weight=0.5 \\
        short=length,weight=-0.001

--reward-model, --reward and --verifier are short for a list of one.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Literal, Self

from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.extensions import entry_points
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.rewards.scores import Combine, OnFailure
from rlhf_jax.runs import choices
from rlhf_jax.train.config import capabilities
from rlhf_jax.train.config.watch import refuse_twice

VERIFIERS = ("gsm8k", "integer", "exact")  # in the library


@dataclasses.dataclass(frozen=True)
class Model:
    """A reward model, or an ensemble A+B+C as one reward."""

    paths: tuple[str, ...]
    combine: Combine = "mean"
    std_coef: float | None = None
    risk: float | None = None

    def __post_init__(self) -> None:
        if "" in self.paths or len(set(self.paths)) < len(self.paths) or not self.paths:
            raise InputError(
                f"reward model: expected different checkpoints with + between them, "
                f"got {'+'.join(self.paths)!r}; name each once"
            )
        checks.non_negative(std_coef=self.std_coef)
        checks.positive(risk=self.risk)
        capabilities.need(
            {"risk= of a reward model": self.risk is not None},
            "combine=entropic",
            has=self.combine == "entropic",
        )
        capabilities.need(
            {"std_coef= of a reward model": self.std_coef is not None},
            "combine=mean_minus_std",
            has=self.combine == "mean_minus_std",
        )
        capabilities.need(
            {f"combine={self.combine}": self.combine != "mean"},
            "several checkpoints A+B",
            has=len(self.paths) > 1,
        )


@dataclasses.dataclass(frozen=True)
class Function:
    """A Python function of texts: score(prompts, responses, rows) -> numbers."""

    function: str


@dataclasses.dataclass(frozen=True)
class Verifier:
    """A verifier of one response, run in separate processes; a score of 1 is right."""

    name: str
    answer_field: str = "answer"
    unmarked: Literal["wrong", "last_number"] = "wrong"

    def __post_init__(self) -> None:
        if self.is_function and ":" not in self.name:
            others = entry_points.names("verifiers")
            known = (*VERIFIERS, *others, "module:function")
            checks.one_of(among=known, **{"--verifier": self.name})
        chosen = f"--verifier {self.name}"
        capabilities.exclude(
            {f"unmarked={self.unmarked}": self.unmarked != "wrong"},
            {chosen: self.name != "gsm8k"},
            reason="gsm8k alone looks for a mark",
        )
        capabilities.exclude(
            {"answer_field=": self.answer_field != "answer"},
            {chosen: self.is_function},
            reason="the function reads the row itself",
        )

    @property
    def is_function(self) -> bool:
        """Whether it is module:function or the entry point of another package."""
        return self.name not in VERIFIERS


@dataclasses.dataclass(frozen=True)
class Length:
    """The number of tokens of the response."""


@dataclasses.dataclass(frozen=True)
class Environment:
    """The rewards that the environment gives its episodes."""


Source = Model | Function | Verifier | Length | Environment
FORM = "NAME=KIND:SOURCE[,weight=W][,key=value], KIND one of " + ", ".join(
    choices.kinds_of(Source)
)


@dataclasses.dataclass(frozen=True)
class Reward:
    """One reward of the list."""

    name: str
    source: Source
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a text such as "right=verifier:gsm8k,weight=2"."""
        name, equals, rest = text.partition("=")
        kind, colon, after = rest.partition(":")
        kind = kind.partition(",")[0] if not colon else kind
        kinds = choices.kinds_of(Source)
        if not (equals and re.fullmatch(r"[A-Za-z0-9_.-]+", name)) or kind not in kinds:
            raise InputError(f"--rewards: expected {FORM}, got {text!r}")
        keys = [field.name for field in dataclasses.fields(kinds[kind])]
        words = choices.split(after if colon else rest, [*keys, "weight"])
        if colon:
            words[0] = f"{keys[0]}={words[0]}"
        else:
            words = words[1:]
        weights = [word for word in words if word.startswith("weight=")]
        try:
            weight = float(weights[-1].partition("=")[2]) if weights else 1.0
        except ValueError:
            raise InputError(f"{text!r}: expected a number as weight") from None
        values = choices.fields(
            [word for word in words if word not in weights], kinds[kind], written=text
        )
        return cls(name, choices.build(kinds[kind], values, written=text), weight)

    def __post_init__(self) -> None:
        checks.finite(weight=self.weight)

    def __str__(self) -> str:
        words = choices.text(self.source, Source).split(",")
        kind, *rest = words
        if rest:  # the first field is written after the colon
            kind = f"{kind}:{rest[0].partition('=')[2]}"
        more = rest[1:] + [f"weight={self.weight}"] * (self.weight != 1.0)
        return ",".join([f"{self.name}={kind}", *more])


Listed = tuple[Reward, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Workers:
    """The processes of a verifier or an environment."""

    num_workers: int | None = None
    """Processes that run the verifier or environment; None is one per processor."""
    timeout: float = 10.0
    """Seconds to verify one response, or to answer one turn."""
    on_failure: OnFailure = "leave_out"
    """Treatment of a failure to verify a response or to answer a turn: leave_out masks
    the response in loss, baseline and group, zero scores the response or turn 0, and
    stop ends the run. Failures are counted in reward/failed and reward/left_out."""
    unsafe_verifier: bool = False
    """Whether code that the model writes runs even without isolation, where neither
    bubblewrap nor Landlock works. It can then read your files and use the network."""

    def __post_init__(self) -> None:
        checks.positive(num_workers=self.num_workers)
        checks.positive(timeout=self.timeout)

    @property
    def of_pool(self) -> dict[str, Any]:
        """The options of the processes, as arguments of a pool."""
        return {
            "num_workers": self.num_workers,
            "timeout": self.timeout,
            "on_failure": self.on_failure,
        }

    def refuse_unread(self, *, has_pool: bool) -> None:
        """Refuses these options in a run without a verifier or environment."""
        chosen = {
            f"--{field.name.replace('_', '-')}": getattr(self, field.name)
            != field.default
            for field in _WORKERS
        }
        capabilities.need(chosen, "--verifier or --environment", has=has_pool)


_WORKERS = dataclasses.fields(Workers)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rewards(Workers):
    """The rewards that are maximised, less the KL penalty."""

    rewards: Listed = ()
    """Rewards to add up, each NAME=KIND:SOURCE,weight=W. Each is logged as
    reward/NAME, without its weight. KIND:SOURCE is model:CHECKPOINT (or
    model:A+B,combine=minimum), function:module:name, verifier:NAME (answer_field=,
    unmarked=), length, or environment."""
    reward_model: Model | None = None
    """Checkpoint of a reward model, or an ensemble A+B+C. An ensemble is combined by
    combine=mean, minimum, mean_minus_std (with std_coef=1) or entropic (with risk=1,
    reward units: the smaller, the closer to the minimum). None has none."""
    reward: str | None = None
    """Python function that scores texts, module:function. None uses none."""
    verifier: Verifier | None = None
    """Verifier: gsm8k, integer, exact, or module:function. Installed packages add names
    (`rlhf-jax new reward`). Options: answer_field=answer, the field of a row with its
    answer; for gsm8k unmarked=last_number, which takes the last number of a response
    without ####. None has none."""
    reward_storage: Storage = frozen_models.COPY
    """Dtype in which reward models are stored."""

    def __post_init__(self) -> None:
        super().__post_init__()
        names = [source.name for source in self.rewards]
        refuse_twice("--rewards", names)
        if "left_out" in names:
            raise InputError(
                "--rewards: expected a name other than left_out, as reward/left_out is "
                "the share of responses without a score; choose another"
            )
        short = {
            "--reward-model": self.reward_model,
            "--reward": self.reward,
            "--verifier": self.verifier,
            "--rewards": self.rewards or None,
        }
        options = [name for name, value in short.items() if value is not None]
        if len(options) > 1:
            raise InputError(
                f"expected one of {', '.join(short)}, got {' and '.join(options)}; put "
                f"several rewards into --rewards"
            )

    def sources(self, *, environment: bool) -> tuple[Reward, ...]:
        """Returns every reward of the run; by default that of the environment."""
        if self.reward_model is not None:
            return (Reward("reward_model", self.reward_model),)
        if self.reward is not None:
            return (Reward("reward", Function(self.reward)),)
        if self.verifier is not None:
            return (Reward("verifier", self.verifier),)
        if self.rewards or not environment:
            return self.rewards
        return (Reward("environment", Environment()),)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names of the reward models in tables, in the order of `models`."""
        names: list[str] = []
        for source in self.sources(environment=False):
            if isinstance(source.source, Model):
                name = f"reward {source.name}" if self.rewards else "reward"
                count = len(source.source.paths)
                names += [name] if count == 1 else [f"{name} {i}" for i in range(count)]
        return tuple(names)

    @property
    def models(self) -> tuple[str, ...]:
        """Checkpoints of all reward models, in the order of the rewards."""
        return tuple(
            path
            for source in self.sources(environment=False)
            if isinstance(source.source, Model)
            for path in source.source.paths
        )
