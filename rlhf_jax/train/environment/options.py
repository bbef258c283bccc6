"""The options of `--environment`, and the environments that it names."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from rlhf_jax.environments.calculator import Calculator
from rlhf_jax.environments.guessing import Guessing
from rlhf_jax.environments.programming import Programming
from rlhf_jax.environments.protocol import Environment
from rlhf_jax.environments.rooms import Rooms
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line
from rlhf_jax.train.start import StartConfig

NAMES = "calculator, guessing, programming, rooms"
TIMEOUT = 10.0  # seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvironmentConfig(StartConfig):
    """Options of episodes of several turns."""

    environment: str | None = None
    """Environment that answers turn by turn: calculator, guessing, programming, rooms,
    or module:name of a class of yours."""
    max_turns: int = 8
    """With --environment: most turns of an episode."""
    max_turn_tokens: int | None = None
    """With --environment: longest response of a turn, tokens; one that does not end by
    then ends the episode. None is --max-new-tokens, which is the room of all turns and
    of what is observed between them."""
    observation_chunk: int = 32
    """With --environment: observed tokens that the model reads at a time."""
    episodes_timeout: float | None = None
    """With --environment: seconds for the episodes of one iteration, after which those
    that are left end as they are; None waits for all, and so do held-out rows."""
    chat: bool = False
    """With --environment: whether its texts are messages of the user, by the
    tokenizer's chat template."""
    num_workers: int | None = None
    """With --environment: processes that run it; None is one per processor."""
    timeout: float = TIMEOUT
    """With --environment: seconds to answer one turn."""
    on_failure: Literal["zero", "stop"] = "zero"
    """With --environment: what happens where it fails: the turn's reward is 0 and the
    episode ends, or the run stops."""

    def check_environment(
        self, *, max_new_tokens: int, replaced: dict[str, Any], alone: bool = False
    ) -> None:
        """Raises InputError for options that do not belong together.

        Args:
          max_new_tokens: the room of an episode.
          replaced: options that an environment takes the place of, or does not read,
            with their values, where they were set.
          alone: nothing but an environment reads the options of its processes.
        """
        own = ["max_turns", "max_turn_tokens", "observation_chunk", "episodes_timeout"]
        if alone:
            own += ["chat", "num_workers", "timeout", "on_failure"]
        if self.environment is None:
            for flag, value in self.changed(*own).items():
                raise InputError(
                    f"{flag}: expected --environment with it, got {value} without; "
                    f"give both, or leave it out"
                )
            return
        checks.positive(
            max_turns=self.max_turns, observation_chunk=self.observation_chunk
        )
        for name in ("max_turn_tokens", "episodes_timeout"):
            if (number := vars(self)[name]) is not None:
                checks.positive(**{name: number})
        if self.max_turn_tokens is not None and self.max_turn_tokens > max_new_tokens:
            raise InputError(
                f"--max-turn-tokens: expected at most the {max_new_tokens} tokens of "
                f"--max-new-tokens, the room of a whole episode, got "
                f"{self.max_turn_tokens}; lower it, or raise --max-new-tokens"
            )
        for flag, value in replaced.items():
            raise InputError(
                f"{flag}: expected none with --environment {self.environment}, "
                f"which does not read it, got {value}; leave one of them out"
            )


def make_environment(name: str) -> Environment:
    """The environment that --environment names.

    "module:name" is a class of yours, or a function without arguments, whose result is
    an environment.

    Raises:
      InputError: there is no such environment, or what it makes is none.
      StopError: the module calls `sys.exit` when it is imported.
    """
    match name:
        case "calculator":
            return Calculator()
        case "guessing":
            return Guessing()
        case "programming":
            return Programming()
        case "rooms":
            return Rooms()
    if ":" not in name:
        raise InputError(
            f"--environment: expected {NAMES} or module:name, got {name!r}; choose one"
        )
    make = command_line.load_function(name, kind="class")
    try:
        environment = make()
    except Exception as error:  # whatever the user's own code raises
        raise InputError(
            f"--environment {name}: expected a class or a function without arguments "
            f"that makes an environment, got {type(error).__name__}: {error}"
        ) from error
    if not isinstance(environment, Environment):
        raise InputError(
            f"--environment {name}: expected what it makes to have the methods reset "
            f"and step, got {environment!r:.80}; see environments/README.md"
        )
    return environment
