"""A verifier as an environment of one turn."""

from __future__ import annotations

import dataclasses

from rlhf_jax.environments.protocol import CountedTurn, Row, Started, Turn
from rlhf_jax.roles.rewards import verifiers
from rlhf_jax.roles.rewards.verifiers import Verifier


@dataclasses.dataclass(frozen=True)
class SingleTurn:
    """The row's prompt, one response, and the verifier's score of it.

    An episode is then what it is without an environment: one response and its score.
    """

    verifier: Verifier
    """(prompt, response, row) -> float, as in `roles/rewards/verifiers.py`. The prompt
    is the text of the row's field; of messages, their contents, a line each."""
    field: str = "prompt"
    """Of the row, a text or messages."""

    @property
    def counts(self) -> tuple[str, ...]:
        """What the verifier counts."""
        return verifiers.counted(self.verifier)

    def reset(self, row: Row) -> Started:
        """The row's prompt; the row is the state."""
        return Started(row[self.field], dict(row))

    def step(self, state: Row, response: str) -> Turn:
        """The score of the response, and the end."""
        prompt = state[self.field]
        if not isinstance(prompt, str):
            prompt = "\n".join(message["content"] for message in prompt)
        score, counts = verifiers.judged(self.verifier, prompt, response, state)
        return CountedTurn("", score, True, None, counts=counts)
