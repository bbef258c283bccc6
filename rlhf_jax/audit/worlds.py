"""Worlds in which every response can be enumerated, for the audit of a loss.

A vocabulary of three and responses of at most three sampled tokens: policy, sampler and
reference are tables of logits, with one row per state (prefix), and an expectation over
groups of three responses is a sum.

    column          0   1   2
    tokens          y0  y1  y2      y in {0, 1, 2}; each response once
    state           0   1+  4+      the row of the tables that this token is drawn from

world           responses   description
fixed length    27          three tokens in each response
stop token      15          token 2 ends a response, which has 1, 2 or 3 tokens
several turns   27          column 1 is the environment's, and a loss must not count it
stale sampler   15          as stop token, drawn by an older policy
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import jax
import numpy as np
import numpy.typing as npt

Array = jax.Array

VOCABULARY, LENGTH, GROUP = 3, 3, 3
STOP = 2
SPREAD = 0.7  # standard deviation of logits, nats


class World(NamedTuple):
    """Tables of logits, and the responses that can be drawn from them.

    Outside the mask are padding and the environment's tokens. Models have log-probs for
    these too, from separate rows: so a loss that counts them is detected.
    """

    name: str
    tokens: npt.NDArray[np.int32]  # i32[N, T], 0 at padding
    mask: npt.NDArray[np.bool_]  # bool[N, T], the policy's own tokens
    states: npt.NDArray[np.int32]  # i32[N, T], row of a table
    policy: npt.NDArray[np.float32]  # f32[states, V], logits
    sampler: npt.NDArray[np.float32]  # f32[states, V]; equal to policy if on-policy
    reference: npt.NDArray[np.float32]  # f32[states, V]
    rewards: npt.NDArray[np.float32]  # f32[N], reward units
    depths: npt.NDArray[
        np.int32
    ]  # i32[states], column of a state; -1 if it is not the policy's


def every(seed: int = 0) -> tuple[World, ...]:
    """The four worlds; `seed` draws their tables and rewards."""
    return (
        _world("fixed length", seed),
        _world("stop token", seed, stops=True),
        _world("several turns", seed, environment=1),
        _world("stale sampler", seed, stops=True, stale=True),
    )


def _world(
    name: str,
    seed: int,
    *,
    stops: bool = False,
    environment: int | None = None,
    stale: bool = False,
) -> World:
    """Makes a world; `environment` is a column that is not the policy's."""
    rows: dict[tuple[int, ...], list[bool]] = {}
    for words in itertools.product(
        range(VOCABULARY), repeat=LENGTH + (environment is not None)
    ):
        tokens = list(words)
        own = [True] * len(tokens)
        if stops and STOP in tokens:
            end = tokens.index(STOP) + 1
            own[end:] = [False] * (len(tokens) - end)
            tokens[end:] = [0] * (len(tokens) - end)
        if environment is not None:  # a function of the token before it
            own[environment] = False
            tokens[environment] = (tokens[environment - 1] + 1) % VOCABULARY
        rows[tuple(tokens)] = own
    tokens, mask = np.array([*rows], np.int32), np.array([*rows.values()])
    prefixes: dict[tuple[int, ...], int] = {}
    states, depths = np.zeros_like(tokens), []
    for row, column in itertools.product(*map(range, tokens.shape)):
        # Padding has one state per column, whatever the row.
        prefix = tuple(map(int, tokens[row, :column]))
        if not mask[row, column]:
            prefix = (-1, *prefix) if column == environment else (-2, column)
        if prefix not in prefixes:
            prefixes[prefix] = len(prefixes)
            depths.append(column if mask[row, column] else -1)
        states[row, column] = prefixes[prefix]
    random = np.random.default_rng([seed, len(name)])
    shape = (len(prefixes), VOCABULARY)
    policy, older, reference = (
        random.normal(scale=SPREAD, size=shape).astype(np.float32) for _ in range(3)
    )
    return World(
        name=name,
        tokens=tokens,
        mask=mask,
        states=states,
        policy=policy,
        sampler=older if stale else policy,
        reference=reference,
        rewards=random.normal(size=len(tokens)).astype(np.float32),
        depths=np.array(depths, np.int32),
    )
