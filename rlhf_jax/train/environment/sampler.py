"""Episodes as a sampler of a run: its compiled programs, and a rollout with scores."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.environments.episodes import Limits, Play
from rlhf_jax.environments.pool import EnvironmentPool
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import cached_decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation import decode as decoding
from rlhf_jax.models.generation import episode_places, episodes
from rlhf_jax.models.generation.episode_places import Arrivals, Episodes
from rlhf_jax.models.generation.sampling import Shaping
from rlhf_jax.models.lora import LoRA
from rlhf_jax.roles import adapted
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.rewards.scores import Scores

Array = jax.Array
HostArray = Any
Params = Any
SHARE = 8  # one place in so many reads at a time


class Weights(NamedTuple):
    """What the programs of a rollout read."""

    params: Params  # of the whole policy
    layers: tuple[Params, ...]  # the same, as decoding reads them


class Drawn(NamedTuple):
    """Episodes and what they were worth."""

    rollout: Rollout
    scores: Scores


class EpisodeRecipe(Protocol):
    """What episodes read of a recipe."""

    @property
    def model(self) -> ModelConfig:
        """Of the policy, or of its base."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    @property
    def temperature(self) -> float:
        """Divides the logits, dimensionless."""
        ...

    @property
    def lora(self) -> LoRA | None:
        """That adapters were made by."""
        ...

    @property
    def continuous_batching(self) -> int | None:
        """Episodes at a time; None is all."""
        ...


class EpisodeSampler:
    """The compiled programs of episodes, on one device.

    The cache of a run stays on the device from iteration to iteration; every program
    is compiled once.
    """

    def __init__(
        self,
        recipe: EpisodeRecipe,
        *,
        pool: EnvironmentPool,
        encoder: TurnEncoder,
        decode: Callable[[list[int]], str],
        limits: Limits,
        prompt_size: int,
        places: int,
        chunk: int,
        base: Frozen | None = None,
        shaping: Shaping | None = None,
    ) -> None:
        """Compiles nothing yet.

        Args:
          recipe: static.
          pool: that answers turns.
          encoder: of observations.
          decode: token ids -> text of a turn, for the environment.
          limits: of an episode.
          prompt_size: P, tokens of the longest prompt.
          places: C, episodes at a time.
          chunk: N, columns that are read at a time.
          base: the parameters that adapters adapt.
          shaping: for evaluation only.

        Raises:
          InputError: an episode is longer than the model's context.
        """
        size = prompt_size + limits.tokens
        if size > recipe.model.max_positions:
            raise InputError(
                f"expected prompt and episode within {recipe.model.max_positions} "
                f"positions, got {prompt_size} + {limits.tokens}; shorten either"
            )
        self.places, self.chunk = places, chunk
        self.arriving = max(1, places // SHARE)
        self._pool, self._encoder, self._decode = pool, encoder, decode
        self._limits, self._stop_ids = limits, recipe.stop_ids
        self._empty = functools.partial(
            episode_places.empty, recipe.model, places=places, columns=size + chunk + 1
        )
        options: dict[str, Any] = {
            "model": recipe.model,
            "stop_ids": recipe.stop_ids,
            "temperature": recipe.temperature,
            "shaping": shaping,
        }

        # Taken apart once per rollout: in every call it would copy all parameters.
        def weights(policy: Params, base: Frozen | None) -> Weights:
            params = adapted.params(policy, base=base, lora=recipe.lora)
            return Weights(
                params,
                cached_decoder.layers_to_decode(
                    params, model=recipe.model, rows=places
                ),
            )

        def read(weights: Weights, state: Episodes, arrivals: Arrivals) -> Episodes:
            params, layers = weights
            keys = _keys_like(state.keys, arrivals.keys)
            arrivals = dataclasses.replace(arrivals, keys=keys)
            return episodes.read(params, state, arrivals, layers=layers, **options)

        def copied(
            state: Episodes, source: Array, place: Array, keys: Array
        ) -> Episodes:
            keys = _keys_like(state.keys, keys)
            return episode_places.copied(state, source=source, place=place, keys=keys)

        def advance(
            weights: Weights, state: Episodes, until: Array, steps: Array
        ) -> tuple[Episodes, Episodes]:
            params, layers = weights
            state = episodes.advance(
                params, state, until=until, steps=steps, layers=layers, **options
            )
            return state, dataclasses.replace(state, caches=())

        self._base = base
        self._keys_program = jax.jit(_row_keys)
        self._weights_program = jax.jit(weights)
        self._read_program = jax.jit(read, donate_argnums=1)
        self._copy_program = jax.jit(copied, donate_argnums=0)
        self._advance_program = jax.jit(advance, donate_argnums=1)
        self._state: Episodes | None = None
        self._weights: Weights | None = None

    def __call__(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        states: Sequence[bytes],
        key: Array,
        version: Array | None = None,
    ) -> Drawn:
        """An episode from every row of prompts.

        Args:
          policy: the policy's parameters, or its adapters.
          prompts: Prompts[B, P].
          states: of the environment, by `prompts.index`.
          key: of this step; the sampler takes the first of the two keys split from it.
          version: i32[], of the policy; None stamps no token.

        Returns:
          Rollout[B, P + R] and Scores[B] of NumPy arrays.

        Raises:
          StopError: the environment failed, and the pool is to stop then.
        """
        mine = jax.device_get(prompts)
        # On the host, where each read takes those of some rows.
        keys = jax.device_get(self._keys_program(key, mine.index, mine.sample))
        if self._state is None:
            self._state = self._empty(key=key)
        self._weights = self._weights_program(policy, self._base)
        try:
            ended = Play(
                device=self,
                prompts=mine,
                states=states,
                keys=keys,
                pool=self._pool,
                encoder=self._encoder,
                decode=self._decode,
                stop_ids=self._stop_ids,
                limits=self._limits,
            ).run()
        except BaseException:
            self._state = None  # turns may be under way in it
            raise
        finally:
            self._weights = None  # the update takes the policy
        rollout = ended.rollout
        if version is not None:
            stamped = np.where(rollout.response_mask, int(version), 0)
            rollout = dataclasses.replace(rollout, version=stamped.astype(np.int32))
        return Drawn(rollout, ended.scores())

    def free(self) -> None:
        """Lets the cache go, until the next call."""
        self._state = None

    def read(self, arrivals: Arrivals) -> None:
        """Runs prompts and observations."""
        assert self._state is not None
        self._state = self._read_program(self._weights, self._state, arrivals)

    def copy(self, *, source: HostArray, place: HostArray, keys: HostArray) -> None:
        """Has what some places have read of a prompt in others, too."""
        self._state = self._copy_program(
            self._state, source=source, place=place, keys=keys
        )

    def advance(self, *, until: int, steps: int) -> Episodes:
        """Draws on, and returns the places on the host, without their caches."""
        self._state, seen = self._advance_program(
            self._weights, self._state, np.int32(until), np.int32(steps)
        )
        return jax.device_get(seen)


def _row_keys(key: Array, index: Array, sample: Array) -> Array:
    """u32[B, ...]: data of the rows' keys, from the first half of the step's key."""
    sample_key, _ = jax.random.split(key)
    return jax.random.key_data(
        decoding.row_keys(sample_key, index=index, sample=sample)
    )


def _keys_like(keys: Array, data: Array) -> Array:
    """The keys with such data, of the kind of others."""
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
