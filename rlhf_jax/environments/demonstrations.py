"""Demonstrations: an expert's episodes in an environment, as rows for SFT.

    {"prompt": "...", "turns": ["calc: 12*7", "84", "answer: 84"]}

Responses and observations alternate in `turns`; only the responses are learned
(`data/README.md`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from rlhf_jax.environments.answers import waited
from rlhf_jax.environments.protocol import Environment, Row, Written

MAX_TURNS = 1_000
Expert = Callable[[Row, list[Written]], str]


class Played(NamedTuple):
    """An episode of an expert."""

    prompt: Written
    turns: list[Written]
    """Alternating responses and observations; a response is first and last."""
    reward: float
    """Sum of the rewards of all turns."""


def play(environment: Environment, row: Row, *, expert: Expert) -> Played:
    """Plays one episode in this process.

    Args:
      expert: (row, turns so far) -> next response.

    Raises:
      ValueError: the episode does not end.
    """
    prompt, state = waited(environment.reset(row))
    turns: list[Written] = []
    reward = 0.0
    for _ in range(MAX_TURNS):
        response = expert(row, [*turns])
        turn = waited(environment.step(state, response))
        turns.append(response)
        reward += float(turn.reward)
        if turn.done:
            return Played(prompt, turns, reward)
        turns.append(turn.observation)
        state = turn.state
    raise ValueError(
        f"expected an episode that ends, got {MAX_TURNS} turns from {row!r:.80}; give"
        " the environment a limit of turns"
    )


def demonstrations(
    environment: Environment, rows: Iterable[Row], *, expert: Expert
) -> list[dict[str, Any]]:
    """Plays episodes; returns rows with prompt and turns for `rlhf-jax sft`."""
    played = [play(environment, row, expert=expert) for row in rows]
    return [{"prompt": episode.prompt, "turns": episode.turns} for episode in played]
