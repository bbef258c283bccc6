"""A world with exact expectations: 4 tokens, 4 columns, 256 responses.

    column          0     1  2  3  4
    tokens          0     y1 y2 y3 y4      y in {0, 1, 2, 3}⁴, the prompt is one 0
    index           64·y1 + 16·y2 + 4·y3 + y4

The reference is a random decoder, and the reward is one number per response. The
probability of every response is known, and so are the quantities that PPO can only
estimate from samples:

    J(π)   = E_π[r] - β·KL(π ‖ π_ref)
    π*     ∝ π_ref·exp(r/β),  J(π*) = β log E_ref[exp(r/β)]
    J(π*) - J(π) = β·KL(π ‖ π*)

With `STOPS` a 3 ends a response, which leaves 121 responses of 1 to 4 tokens, the stop
token included.

    tokens          0     y1 3  ·  ·       index as above, with 0 for each dot

Models, rollouts and rewards are the library's; sums over all responses are float64
NumPy.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from rlhf_jax import batch, config, decoder, frozen, policy
from rlhf_jax.algorithms import flow
from rlhf_jax.algorithms.flow import score
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.penalty import IN_REWARD
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference.frozen import Frozen, References
from worlds.optima import Frontier, Optimum, divergence, expected_reward, optimum

Array = jax.Array
Float64 = npt.NDArray[np.float64]
Params = Any

VOCABULARY = 4
LENGTH = 4  # response columns
STOPS = (3,)  # the stop ids of worlds whose responses end early; others have ()
PROMPT = 1  # prompt columns
RESPONSES = np.array([*itertools.product(range(VOCABULARY), repeat=LENGTH)], np.int32)
NUM_RESPONSES = len(RESPONSES)
SMALLEST_BETA = 0.1  # of the certificates; the optimum is farthest there
FRONTIER_BETAS = (0.01, 100.0)  # smallest and largest β of the exact frontier


def model(*, hidden_size: int) -> ModelConfig:
    """A GPT-2 of one layer, with a padded vocabulary like any other model."""
    shape = config.gpt2(
        vocab_size=VOCABULARY,
        hidden_size=hidden_size,
        num_layers=1,
        num_heads=2,
        max_positions=PROMPT + LENGTH,
    )
    return dataclasses.replace(shape, vocab_multiple=8)


def init(key: Array, *, model: ModelConfig, scale: float = 0.12) -> Params:
    """A decoder with noise on every leaf, so that no two tokens are equally likely."""
    init_key, noise_key = jax.random.split(key)
    params = decoder.init(init_key, model=model)
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(noise_key, len(leaves))
    return jax.tree.unflatten(
        structure,
        [
            leaf + scale * jax.random.normal(key, leaf.shape, leaf.dtype)
            for leaf, key in zip(leaves, keys, strict=True)
        ],
    )


def prompts(rows: int) -> batch.Prompts:
    """The prompt `rows` times; each row has its own sample number."""
    return batch.Prompts(
        tokens=jnp.zeros((rows, PROMPT), jnp.int32),
        mask=jnp.ones((rows, PROMPT), bool),
        index=jnp.zeros(rows, jnp.int32),
        sample=jnp.arange(rows, dtype=jnp.int32),
    )


def every_tokens(stop_ids: tuple[int, ...] = ()) -> Array:
    """i32[N, 5]: the prompt and each response, then 0."""
    tokens, _ = _responses(stop_ids)
    return jnp.pad(jnp.asarray(tokens), ((0, 0), (PROMPT, 0)))


def every_mask(stop_ids: tuple[int, ...] = ()) -> Array:
    """bool[N, 5]: the prompt, and the response with its stop token."""
    _, mask = _responses(stop_ids)
    return jnp.pad(jnp.asarray(mask), ((0, 0), (PROMPT, 0)), constant_values=True)


def _responses(stop_ids: tuple[int, ...]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """i32[N, 4] tokens and bool[N, 4] mask of every response.

    N is 256 without stop ids and 121 with `STOPS`.
    """
    stopped = np.cumsum(np.isin(RESPONSES, stop_ids), axis=1)
    mask = np.pad(stopped[:, :-1], ((0, 0), (1, 0))) == 0
    tokens, first = np.unique(np.where(mask, RESPONSES, -1), axis=0, return_index=True)
    order = np.argsort(first)
    return np.maximum(tokens, 0)[order], mask[first][order]


def every_response(
    params: Params,
    *,
    model: ModelConfig,
    temperature: float,
    stop_ids: tuple[int, ...] = (),
) -> batch.Rollout:
    """Each response once, ordered by index, as if the policy had sampled it."""
    tokens, mask = every_tokens(stop_ids), every_mask(stop_ids)
    rows = len(tokens)
    old_logprobs, entropy = policy.logprobs_and_entropy(
        params,
        model=model,
        tokens=tokens,
        mask=mask,
        temperature=temperature,
        first_column=PROMPT,
    )
    return batch.Rollout(
        tokens=tokens,
        mask=mask,
        response_mask=mask.at[:, :PROMPT].set(False),
        old_logprobs=old_logprobs,
        entropy=entropy,
        index=jnp.zeros(rows, jnp.int32),
        sample=jnp.arange(rows, dtype=jnp.int32),
    )


def log_probabilities(
    params: Params,
    *,
    model: ModelConfig,
    temperature: float,
    stop_ids: tuple[int, ...] = (),
) -> Array:
    """f32[N]: log π(y) of every response, nats; differentiable in `params`."""
    rollout = every_response(
        params, model=model, temperature=temperature, stop_ids=stop_ids
    )
    return rollout.old_logprobs.sum(axis=1)


def index_of(tokens: Array) -> Array:
    """i32[B]: the index of the response in each row of i32[B, 5]."""
    place = VOCABULARY ** np.arange(LENGTH - 1, -1, -1, dtype=np.int32)
    return (tokens[:, PROMPT:] * place[None, :]).sum(axis=1)


def reward_of(table: Array) -> jax.tree_util.Partial:
    """The reward as `reward(rollout)`; jit traces its table, f32[256]."""
    return jax.tree_util.Partial(_look_up, table)


def _look_up(table: Array, rollout: batch.Rollout) -> Array:
    return table[index_of(rollout.tokens)]


@dataclasses.dataclass(frozen=True)
class World:
    """A reference and rewards, which determine the optimum of every β."""

    start: Params  # parameters of the reference and of the initial policy
    reference: Frozen
    rewards: Float64  # [256], reward units, exactly the float32 values of training
    log_ref: Float64  # [256], log π_ref(y), nats

    def optimum(self, beta: float) -> Optimum:
        """The best policy at one β, and its objective."""
        return optimum(self.log_ref, self.rewards, beta=beta)

    def objective(self, log_policy: Float64, beta: float) -> float:
        """J(π) = E_π[r] - β·KL(π ‖ π_ref), reward units."""
        penalty = beta * divergence(log_policy, self.log_ref)
        return expected_reward(log_policy, self.rewards) - penalty

    @functools.cached_property
    def frontier(self) -> Frontier:
        """(KL*, r*) of 4000 optima, from the largest β down to the smallest."""
        low, high = FRONTIER_BETAS
        optima = [
            self.optimum(beta).log_policy for beta in np.geomspace(high, low, 4000)
        ]
        return Frontier(
            np.array([divergence(best, self.log_ref) for best in optima]),
            np.array([expected_reward(best, self.rewards) for best in optima]),
        )

    def below_frontier(self, log_policy: Float64) -> float:
        """r*(KL) - E_π[r] at the KL of π, reward units: the reward that π forgoes.

        Never negative. For every β it is at most β·KL(π ‖ π*), by the tangent of the
        frontier at that optimum.
        """
        kl = divergence(log_policy, self.log_ref)
        best = np.interp(kl, self.frontier.kl, self.frontier.reward)
        return float(best - expected_reward(log_policy, self.rewards))


def draw(
    seed: int, *, model: ModelConfig, distance: float, temperature: float = 1.0
) -> World:
    """Draws a random reference and random rewards of a given scale.

    Args:
      seed: seed of both.
      distance: KL(π_ref ‖ π*) at `SMALLEST_BETA`, nats; it sets the scale of the
        rewards, which are normal.
      temperature: temperature of the policies.

    Raises:
      InputError: distance is not positive.
    """
    checks.positive(distance=distance)
    start = jax.jit(functools.partial(init, model=model))(jax.random.key(seed))
    log_ref = known(start, model=model, temperature=temperature)
    normal = np.random.default_rng(seed).normal(size=NUM_RESPONSES)

    def reached(scale: float) -> float:
        best = optimum(log_ref, scale * normal, beta=SMALLEST_BETA)
        return divergence(log_ref, best.log_policy)

    low, high = 0.0, 1.0
    while reached(high) < distance:
        high *= 2.0
    for _ in range(60):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if reached(middle) < distance else (low, middle)
    rewards = (high * normal).astype(np.float32).astype(np.float64)
    return World(start, frozen.freeze(start), rewards, log_ref)


def known(params: Params, *, model: ModelConfig, temperature: float) -> Float64:
    """f64[256]: log π(y), nats, computed in float32."""
    log_policy = _log_probabilities(params, model=model, temperature=temperature)
    return np.asarray(log_policy, np.float64)


@functools.partial(jax.jit, static_argnames=("model", "temperature"))
def _run_kl(
    params: Params,
    reference: Frozen,
    *,
    model: ModelConfig,
    temperature: float,
    further: References | None = None,
) -> tuple[Array, Array]:
    rollout = every_response(params, model=model, temperature=temperature)
    scored = score.score(
        rollout,
        scores=jnp.zeros(NUM_RESPONSES, jnp.float32),
        reference=reference,
        model=model,
        max_new_tokens=LENGTH,
        temperature=temperature,
    )
    if further:
        scored, _ = flow.objective.add_further(
            scored,
            further=further,
            model=model,
            max_new_tokens=LENGTH,
            temperature=temperature,
            penalty=IN_REWARD,
        )
    assert scored.kl is not None
    return rollout.old_logprobs.sum(axis=1), scored.kl.sum(axis=1)


def run_kl(
    params: Params,
    reference: Frozen,
    *,
    model: ModelConfig,
    temperature: float,
    further: References | None = None,
) -> float:
    """E_π[Σ_t kl_t], nats, with the kl_t that a run subtracts from the reward."""
    logprobs, kl = _run_kl(
        params, reference, model=model, temperature=temperature, further=further
    )
    return float(np.exp(np.asarray(logprobs, np.float64)) @ np.asarray(kl, np.float64))


_log_probabilities = jax.jit(
    log_probabilities, static_argnames=("model", "temperature")
)
