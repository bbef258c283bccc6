"""A verifier as an environment of one turn."""

from __future__ import annotations

import dataclasses

from rlhf_jax.environments.protocol import CountedTurn, Row, Started, Turn
from rlhf_jax.roles.rewards import verifiers
from rlhf_jax.roles.rewards.verifiers import Verifier


@dataclasses.dataclass(frozen=True)
class SingleTurn:
    """The row's prompt, one response, and the verifier's score of it.

    An episode is the same as without an environment.
    """

    verifier: Verifier
    """(prompt, response, row) -> float, as in `roles/rewards/verifiers.py`. The prompt
    is the text of the row's field, or the contents of its messages, one per line."""
    field: str = "prompt"
    """Field of the row with the prompt, a text or messages."""

    @property
    def counts(self) -> tuple[str, ...]:
        """The names of the verifier's counts."""
        return verifiers.counted(self.verifier)

    def reset(self, row: Row) -> Started:
        """Returns the row's prompt; the row is the state."""
        return Started(row[self.field], dict(row))

    def step(self, state: Row, response: str) -> Turn:
        """Scores the response and ends the episode."""
        prompt = state[self.field]
        if not isinstance(prompt, str):
            prompt = "\n".join(message["content"] for message in prompt)
        score, counts = verifiers.judged(self.verifier, prompt, response, state)
        return CountedTurn("", score, True, None, counts=counts)
