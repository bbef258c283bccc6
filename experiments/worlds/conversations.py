"""All episodes of two turns over 4 tokens, with an observation between the turns.

    column          0  1  2  3  4  5  6
    tokens          0  1  3  2  0  1  3      the prompt is one 0; a 3 ends a turn
    sampled         0  1  1  0  0  1  1
    observed        0  0  0  1  1  0  0

A turn has 1 or 2 tokens. After a first turn that ends in 3 the environment draws one of
two observations, [1] or [2, 0], with probabilities that depend on the turn, and the
policy has a second turn. A first turn without a 3 has reached the token limit and ends
the episode. So there are 9 episodes of one turn and 4·2·13 of two, 113 in all, with 1
to 4 sampled tokens and 0 to 2 observed ones.

    J(π) = E[r] - β·E[Σ log π(a)/π_ref(a)], where a runs over the sampled tokens

The probability of an episode is π of its sampled tokens times the environment's
probability of the observation, which no gradient reaches.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rlhf_jax import batch, policy
from rlhf_jax.models.config import ModelConfig
from worlds import enumerable

Array = jax.Array
Float64 = npt.NDArray[np.float64]
Params = Any

PROMPT = enumerable.PROMPT
STOP = 3  # ends a turn
TURN_TOKENS = 2  # the token limit of a turn
OBSERVATIONS = ((1,), (2, 0))
LENGTH = 2 * TURN_TOKENS + 2  # response columns, those of observations included
Turn = tuple[int, ...]


class Episodes(NamedTuple):
    """Every episode once."""

    tokens: Array  # i32[N, 7]
    mask: Array  # bool[N, 7], not padding
    response_mask: Array  # bool[N, 7], sampled tokens
    chance: Array  # f32[N], probability of the observation; 1 if there is none
    first: Array  # i32[N], number of the first turn if a second follows, else -1
    # bool[N, 7], the last token of a first turn that a second follows.
    turn_ends: Array


def turns() -> list[Turn]:
    """Returns the 13 turns: a 3, or another token and then any token."""
    alone = [(STOP,)]
    every = range(enumerable.VOCABULARY)
    others = [token for token in every if token != STOP]
    return alone + list(itertools.product(others, every))


def every_episode(*, seed: int) -> Episodes:
    """Returns all 113 episodes.

    Args:
      seed: seed of the observations' probabilities.
    """
    answered = [turn for turn in turns() if turn[-1] == STOP]
    chances = np.random.default_rng(seed).dirichlet((2.0, 2.0), len(answered))
    rows: list[tuple[Turn, Turn, Turn, float, int]] = [
        (turn, (), (), 1.0, -1) for turn in turns() if turn[-1] != STOP
    ]
    for number, first in enumerate(answered):
        for observation, chance in zip(OBSERVATIONS, chances[number], strict=True):
            rows += [(first, observation, last, chance, number) for last in turns()]
    size = len(rows), PROMPT + LENGTH
    tokens = np.zeros(size, np.int32)
    mask, sampled, ends = (np.zeros(size, bool) for _ in range(3))
    mask[:, :PROMPT] = True
    for row, (first, observation, last, _, _) in enumerate(rows):
        column = PROMPT
        for part, own in ((first, True), (observation, False), (last, True)):
            at = slice(column, column + len(part))
            tokens[row, at], mask[row, at], sampled[row, at] = part, True, own
            column += len(part)
        ends[row, PROMPT + len(first) - 1] = bool(last)
    return Episodes(
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(mask),
        response_mask=jnp.asarray(sampled),
        chance=jnp.asarray([row[3] for row in rows], jnp.float32),
        first=jnp.asarray([row[4] for row in rows], jnp.int32),
        turn_ends=jnp.asarray(ends),
    )


def model(*, hidden_size: int) -> ModelConfig:
    """The model of `enumerable`, with as many positions as an episode has tokens."""
    shape = enumerable.model(hidden_size=hidden_size)
    return dataclasses.replace(shape, max_positions=PROMPT + LENGTH)


def rewards(episodes: Episodes, *, seed: int) -> tuple[Array, Array]:
    """Draws the total rewards, f32[N], and the rewards of first turns, f32[N, 7].

    The reward of a first turn depends on that turn alone; the rest of the total depends
    on the whole episode. Both are normal, in reward units.
    """
    rng = np.random.default_rng(seed)
    of_first = np.append(rng.normal(size=int(episodes.first.max()) + 1), 0.0)
    early = of_first[np.asarray(episodes.first)]
    total = early + rng.normal(size=len(early))
    of_turns = np.where(episodes.turn_ends, early[:, None], 0.0)
    return jnp.asarray(total, jnp.float32), jnp.asarray(of_turns, jnp.float32)


def rollout(
    params: Params, episodes: Episodes, *, model: ModelConfig, temperature: float
) -> batch.Rollout:
    """Each episode once, as if the policy had sampled it; `entropy` is set to 0."""
    logprobs = policy.logprobs(
        params,
        model=model,
        tokens=episodes.tokens,
        mask=episodes.mask,
        temperature=temperature,
        first_column=PROMPT,
    )
    rows = len(episodes.tokens)
    return batch.Rollout(
        tokens=episodes.tokens,
        mask=episodes.mask,
        response_mask=episodes.response_mask,
        old_logprobs=jnp.where(episodes.response_mask, logprobs, 0.0),
        entropy=jnp.zeros(logprobs.shape, jnp.float32),
        index=jnp.zeros(rows, jnp.int32),
        sample=jnp.arange(rows, dtype=jnp.int32),
    )


def sampled_logprobs(
    params: Params, episodes: Episodes, *, model: ModelConfig, temperature: float
) -> Array:
    """f32[N, 6], nats: log π of the tokens in columns 1 to 6; 0 where observed."""
    logits = policy.logits(
        params, model=model, tokens=episodes.tokens, mask=episodes.mask
    )
    logprobs = jax.nn.log_softmax(logits[:, :-1] / temperature)
    taken = jnp.take_along_axis(logprobs, episodes.tokens[:, 1:, None], axis=-1)
    return jnp.where(episodes.response_mask[:, 1:], taken[..., 0], 0.0)


def objective(
    params: Params,
    ref_params: Params,
    episodes: Episodes,
    *,
    totals: Array,
    beta: float,
    model: ModelConfig,
    temperature: float,
) -> Array:
    """J(π), reward units, as a sum over all episodes computed from logits alone."""
    own, reference = (
        sampled_logprobs(
            model_params, episodes, model=model, temperature=temperature
        ).sum(1)
        for model_params in (params, ref_params)
    )
    return (episodes.chance * jnp.exp(own)) @ (totals - beta * (own - reference))


def discounted(
    params: Params,
    ref_params: Params,
    episodes: Episodes,
    *,
    totals: Array,
    of_turns: Array,
    beta: float,
    gamma: float,
    model: ModelConfig,
    temperature: float,
) -> Array:
    """A surrogate whose gradient is E[Σ_t ∇log π(a_t) Σ_{s≥t} γ^{s-t}·r_s].

    s and t count sampled tokens. r has the reward of the first turn at that turn's last
    token, the rest of the total at the episode's last token, and -β·log π/π_ref at each
    token. The value of the surrogate has no meaning.

    Args:
      of_turns: f32[N, 7], rewards of first turns, reward units.
      gamma: γ, per sampled token.
    """
    own, reference = (
        sampled_logprobs(model_params, episodes, model=model, temperature=temperature)
        for model_params in (params, ref_params)
    )
    sampled = episodes.response_mask[:, 1:]
    number = jnp.cumsum(sampled, axis=1)
    last = sampled & (number == number[:, -1:])
    rest = totals - of_turns.sum(axis=1)
    rewards = of_turns[:, 1:] + jnp.where(last, rest[:, None], 0.0)
    rewards = rewards - beta * (own - reference)
    ahead = number[:, None, :] - number[:, :, None]  # s - t
    counted = sampled[:, None, :] & sampled[:, :, None] & (ahead >= 0)
    weight = jnp.where(counted, gamma ** jnp.maximum(ahead, 0), 0.0)
    to_go = jnp.einsum("nts,ns->nt", weight, rewards)
    chance = episodes.chance * jnp.exp(own.sum(axis=1))
    return jnp.sum(jax.lax.stop_gradient(chance[:, None] * to_go) * own)
