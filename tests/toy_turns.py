"""Episodes of one, two and three turns, small enough to check by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import toys

from rlhf_jax import batch, policy

PROMPT, SIZE = 3, 8  # columns
# E ends a turn, o is observed, a trailing o is what an episode ended with.
ROWS = (
    ("p p p", "a E o o b E"),
    ("- p p", "E o o o b b b"),
    ("p p p", "a b a E"),
    ("- - p", "a E o b E o c E"),
    ("p p p", "a E o o"),
    ("- p p", "b o a a E o"),
)
TURNS, OBSERVED = (2, 2, 1, 3, 1, 2), (2, 3, 0, 2, 2, 2)


def _cells() -> np.ndarray:
    rows = [
        [*prompt.split(), *response.split(), *"-" * (SIZE - len(response.split()))]
        for prompt, response in ROWS
    ]
    return np.array(rows)


CELLS = _cells()
MASK = CELLS != "-"
OBSERVATIONS = CELLS == "o"
SAMPLED = MASK & ~OBSERVATIONS & (CELLS != "p")
TURN_ENDS = SAMPLED & np.pad(~SAMPLED[:, 1:], ((0, 0), (0, 1)), constant_values=True)
# Observed tokens that no sampled one follows: nothing reads them.
LAST = np.where(SAMPLED, np.arange(PROMPT + SIZE), -1).max(axis=1)
# The state after the last turn, which has a value in N+; it may precede an observation.
AFTER = np.arange(PROMPT + SIZE) == LAST[:, None] + 1
UNREAD = OBSERVATIONS & (np.arange(PROMPT + SIZE) > LAST[:, None])


def tokens(*, seed: int = 0, observed_seed: int | None = None) -> np.ndarray:
    """i32[6, 11]: random tokens, with the stop token at E and none elsewhere.

    Args:
      seed: the seed of all tokens.
      observed_seed: changes the observed tokens alone; None keeps those of `seed`.
    """
    rng = np.random.default_rng(seed)
    words = rng.integers(3, toys.GPT2.vocab_size, CELLS.shape)
    if observed_seed is not None:
        shift = np.random.default_rng(observed_seed).integers(1, 9, CELLS.shape)
        words = np.where(OBSERVATIONS, 3 + (words - 3 + shift) % 10, words)
    words = np.where(CELLS == "E", toys.STOP[0], words)
    return np.where(MASK, words, 0)


def rollout(params=None, *, temperature: float = 0.7, **of_tokens) -> batch.Rollout:
    """Two rows of each of three prompts' groups; log-probs differ from the policy's.

    Args:
      params: the policy near which log-probs are drawn; None draws any.
    """
    rng = np.random.default_rng(1)
    logprobs = rng.normal(-2.0, 0.5, CELLS.shape)
    if params is not None:
        logprobs = 0.3 * rng.normal(size=CELLS.shape) + np.asarray(
            toys.jit(policy.logprobs, static_argnames=("model", "temperature"))(
                params,
                model=toys.GPT2,
                tokens=toys.array(tokens(), np.int32),
                mask=toys.array(MASK, bool),
                temperature=temperature,
            )
        )
    logprobs = np.where(SAMPLED, logprobs, 0.0)
    return batch.Rollout(
        tokens=toys.array(tokens(**of_tokens), np.int32),
        mask=toys.array(MASK, bool),
        response_mask=toys.array(SAMPLED, bool),
        old_logprobs=toys.array(logprobs),
        entropy=toys.array(np.where(SAMPLED, 1.0, 0.0)),
        index=toys.array(np.arange(6) // 2, np.int32),
        sample=toys.array(np.arange(6) % 2, np.int32),
    )


def rewards() -> tuple[np.ndarray, np.ndarray]:
    """f32[6] totals and f32[6, 11] of the turns before the last, reward units."""
    rng = np.random.default_rng(8)  # no group's totals are close
    early = TURN_ENDS & (np.arange(CELLS.shape[1]) < LAST[:, None])
    of_turns = np.where(early, rng.normal(size=CELLS.shape), 0.0)
    totals = of_turns.sum(axis=1) + rng.normal(size=6)
    return totals.astype(np.float32), of_turns.astype(np.float32)


def scored(
    *, observed: float = 0.0, values_after: bool = False, **of_tokens
) -> batch.Scored:
    """A scored rollout with arbitrary numbers, and `observed` at observed tokens.

    Args:
      values_after: the state after the last turn has a value, whatever follows.
    """
    rng = np.random.default_rng(3)
    totals, of_turns = rewards()

    def known(scale: float, *, of: np.ndarray = SAMPLED):
        numbers = np.where(of, rng.normal(0, scale, CELLS.shape), 0.0)
        return toys.array(np.where(OBSERVATIONS & ~of, observed, numbers))

    answered = rollout(**of_tokens)
    old = np.where(OBSERVATIONS, observed, np.asarray(answered.old_logprobs))
    answered = dataclasses.replace(
        answered, old_logprobs=toys.array(old), entropy=known(1.0)
    )
    return batch.Scored(
        rollout=answered,
        scores=toys.array(totals),
        values=known(0.5, of=SAMPLED | AFTER if values_after else SAMPLED),
        ref_logprobs=known(1.0),
        kl=known(0.5),
        turn_rewards=toys.array(np.where(OBSERVATIONS, observed, of_turns)),
        turn_ends=toys.array(TURN_ENDS, bool),
    )
