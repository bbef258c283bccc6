"""The compiled programs of episodes, and the state that stays on the devices."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.devices import replicas
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.caches import DeltaState
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.generation import decode, episode_places, episodes
from rlhf_jax.models.generation.episode_places import Arrivals, Episodes
from rlhf_jax.models.generation.sampling import Decoder, Draw, Shaping
from rlhf_jax.roles.reference.frozen import Frozen, adapted_params

Array = jax.Array
HostArray = Any
Params = Any
READERS = 8  # one in this many places reads at a time
EVERYWHERE, BY_PLACE = PartitionSpec(), PartitionSpec(replicas.AXIS)
BY_HEAD = PartitionSpec(replicas.AXIS, replicas.TENSOR)


class Weights(NamedTuple):
    """Parameters in the forms that the programs of a rollout read."""

    params: Params  # the whole policy
    layers: tuple[Params, ...]  # its layers, as decoding reads them


@dataclasses.dataclass(frozen=True)
class Sampled:
    """The fields of a recipe that an evaluation needs."""

    model: ModelConfig
    stop_ids: tuple[int, ...]  # tokens that end a turn
    temperature: float
    lora: None = None
    continuous_batching: None = None
    routing_record: None = None


class EpisodePrograms:
    """The programs of the policy and the places (cache rows) of this process's devices.

        data=2,tensor=2     devices 0 and 1   all weights   places 0 to 3
                            devices 2 and 3   all weights   places 4 to 7

    Each replica of the policy reads and draws in its own places; `advance` returns when
    the last replica does. Replicas of one device each do not synchronise; replicas of
    several devices run the same number of steps. Processes synchronise only when
    `holding` begins, for the weights. The cache stays on the devices from rollout to
    rollout, and every program is compiled once.
    """

    def __init__(
        self,
        recipe: PolicyGradient | Sampled,
        *,
        columns: int,
        places: int,
        chunk: int,
        mesh: Mesh | None = None,
        base: Frozen | None = None,
        shaping: Shaping | None = None,
    ) -> None:
        """Compiles nothing yet.

        Args:
          columns: P + R, tokens of the longest prompt and of its longest episode.
          places: episodes at a time in all processes. This process has C of them, after
            rounding up to a multiple of the replicas.
          chunk: N, columns that are read at a time.
          mesh: devices along `tensor` form a replica; None is one device.
          base: the base under adapters.
          shaping: of the distribution, for evaluation only.
        """
        if columns > recipe.model.max_positions:
            raise InputError(
                f"expected prompt and episode within {recipe.model.max_positions} "
                f"positions, got {columns}; shorten either"
            )
        self.stop_ids = recipe.stop_ids
        # D replicas of the policy here; each has C / D consecutive places.
        self._replicas, self.shares, of_all, together = None, 1, 1, None
        if mesh is not None and mesh.devices.size > 1:
            self._replicas = replicas.of_mesh(mesh)
            self.shares, of_all = self._replicas.num_own, self._replicas.num_of_all
            # Collectives may span all replicas: they must take the same steps.
            together = replicas.AXIS if self._replicas.size > 1 else None
        own = -(-places // of_all)  # places of one replica
        self.places, self.chunk = own * self.shares, chunk
        # A, places that read in one call, A / D of each share.
        self.arriving = max(1, own // READERS) * self.shares
        # L and k, layers and experts of a token to record; None records none.
        self.record = recipe.routing_record
        draw = Draw(
            recipe.stop_ids, recipe.temperature, shaping, recipe.model.unused_ids
        )

        # Split into layers once per rollout, as that copies all parameters.
        def weights(policy: Params, base: Frozen | None) -> Weights:
            params = adapted_params(policy, base=base, lora=recipe.lora)
            decoder = Decoder(params, recipe.model).to_decode(rows=own)
            return Weights(decoder.params, decoder.layers)

        def decoder(weights: Weights) -> Decoder:
            params, layers = weights
            record = self.record is not None
            return Decoder(params, recipe.model, layers, record)

        def here(place: Array) -> Array:
            """Converts places to this replica's own numbers; others become `own`."""
            first = 0
            if self._replicas is not None:
                first = own * jax.lax.axis_index(replicas.AXIS)
            return jnp.clip(place - first, 0, own)

        def read(weights: Weights, state: Episodes, arrivals: Arrivals) -> Episodes:
            arrivals = dataclasses.replace(
                arrivals,
                place=here(arrivals.place),
                keys=_keys_like(state.keys, arrivals.keys),
            )
            return episodes.read(decoder(weights), state, arrivals, draw=draw)

        def copied(
            state: Episodes, source: Array, place: Array, keys: Array
        ) -> Episodes:
            keys = _keys_like(state.keys, keys)
            return episode_places.copied(
                state, source=here(source), place=here(place), keys=keys
            )

        def taken(state: Episodes, place: Array) -> Episodes:
            rows = episode_places.rows(state, here(place))
            return dataclasses.replace(rows, keys=jax.random.key_data(rows.keys))

        def put(state: Episodes, rows: Episodes, place: Array) -> Episodes:
            rows = dataclasses.replace(rows, keys=_keys_like(state.keys, rows.keys))
            return episode_places.put(state, rows, place=here(place))

        def advance(
            weights: Weights, state: Episodes, until: Array, steps: Array
        ) -> tuple[Episodes, Episodes]:
            state = episodes.advance(
                decoder(weights),
                state,
                until=until[0],
                steps=steps,
                draw=draw,
                axis=together,
            )
            return state, dataclasses.replace(state, caches=(), experts=None)

        def experts(state: Episodes, place: Array) -> Array | None:
            return episode_places.rows(state, here(place)).experts

        self._base = self._put(base)
        self._keys_program = jax.jit(_row_keys)
        empty = functools.partial(
            episode_places.empty,
            recipe.model,
            places=self.places,
            columns=columns + chunk + 1,
            record_experts=self.record is not None,
        )
        where, on_host = self._where(empty, heads=recipe.model.common_kv_heads)
        self._empty_program = jax.jit(empty, out_shardings=where)
        self._weights_program = jax.jit(weights)
        self._read_program = jax.jit(
            self._split(read, EVERYWHERE, BY_PLACE, BY_PLACE),
            donate_argnums=1,
            out_shardings=where,
        )
        self._copy_program = jax.jit(
            self._split(copied, BY_PLACE, BY_PLACE, BY_PLACE, BY_PLACE),
            donate_argnums=0,
            out_shardings=where,
        )
        self._take_program = jax.jit(
            self._split(taken, BY_PLACE, BY_PLACE), out_shardings=where
        )
        self._put_program = jax.jit(
            self._split(put, BY_PLACE, BY_PLACE, BY_PLACE),
            donate_argnums=0,
            out_shardings=where,
        )
        self._advance_program = jax.jit(
            self._split(advance, EVERYWHERE, BY_PLACE, BY_PLACE, EVERYWHERE),
            donate_argnums=1,
            out_shardings=(where, on_host),
        )
        self._experts_program = jax.jit(self._split(experts, BY_PLACE, EVERYWHERE))
        self._state: Episodes | None = None
        self._weights: Weights | None = None

    @contextlib.contextmanager
    def holding(self, policy: Params, *, key: Array) -> Iterator[None]:
        """Holds the weights for the calls inside; an error there frees the places."""
        if self._state is None:
            self._state = self._empty_program(key=self._put(key))
        self._weights = self._weights_program(self._put(policy), self._base)
        try:
            yield
        except BaseException:
            self._state = None  # turns may be under way in it
            raise
        finally:
            self._weights = None  # the update donates the policy

    def free(self) -> None:
        """Frees the cache until the next rollout."""
        self._state = None

    def row_keys(self, key: Array, *, index: Array, sample: Array) -> HostArray:
        """Returns u32[B, ...], the data of the rows' keys, on the host.

        Args:
          key: the key of the step; rows take the first of the two keys split from it.
          index, sample: i32[B], fields of `Prompts`.
        """
        return jax.device_get(self._keys_program(self._put(key), index, sample))

    def read(self, arrivals: Arrivals) -> None:
        """Reads prompts and observations, and draws the first token of each turn.

        Args:
          arrivals: NumPy arrays, share by share; keys are key data, u32[A, ...].
        """
        assert self._state is not None
        self._state = self._read_program(self._weights, self._state, arrivals)

    def copy(self, *, source: HostArray, place: HostArray, keys: HostArray) -> None:
        """Copies the prompts that A places have read to other places of their shares.

        Args:
          source: i32[A], places that have read the prompt, share by share.
          place: i32[A], places that get the copy; C is none.
          keys: u32[A, ...], key data of the rows that get the copy.
        """
        self._state = self._copy_program(self._state, source, place, keys)

    def take(self, *, place: HostArray) -> Episodes:
        """Copies A places to the host, with their caches.

        Args:
          place: i32[A], share by share; C is none.

        Returns:
          Episodes[A] of NumPy arrays; keys are key data, u32[A, ...].
        """
        return jax.device_get(self._take_program(self._state, place))

    def put(self, rows: Episodes, *, place: HostArray) -> None:
        """Writes rows that `take` returned, share by share, to A places of any share.

        Args:
          place: i32[A]; C is none.
        """
        self._state = self._put_program(self._state, rows, place)

    def experts(self, *, place: int) -> HostArray:
        """Returns the record of a place on the host, i32[W, L, k].

        Columns from the place's `cached` on have no meaning.
        """
        rows = self._experts_program(self._state, np.array([place], np.int32))
        return jax.device_get(rows)[place * self.shares // self.places]

    def advance(self, *, until: HostArray, steps: int) -> Episodes:
        """Draws tokens; returns the places on the host, without caches and records.

        Args:
          until: i32[D]; returns once at most this many turns of each share are left.
          steps: the most tokens drawn in each place.
        """
        self._state, places = self._advance_program(
            self._weights, self._state, until, np.int32(steps)
        )
        return jax.device_get(places)

    def _put(self, tree: Any) -> Any:
        """Places a tree in every replica; on one device it stays where it is."""
        if self._replicas is None:
            return tree
        return replicas.place(tree, replicas=self._replicas)

    def _where(self, empty: Callable[..., Episodes], *, heads: int) -> tuple[Any, Any]:
        """Returns shardings of the places, and of the part that `advance` returns.

        The devices of a replica share the heads of the cache if they divide them.
        """
        if self._replicas is None:
            return None, None
        mesh = self._replicas.own
        shared = heads % mesh.shape[replicas.TENSOR] == 0
        of_cache = NamedSharding(mesh, BY_HEAD if shared else BY_PLACE)
        shapes = jax.eval_shape(empty, key=jax.random.key(0))
        by_place = NamedSharding(mesh, BY_PLACE)
        where = jax.tree.map(lambda _: by_place, shapes)
        # In a recurrent state the tails of convolutions have no axis of heads.
        caches = jax.tree.map(
            lambda kept: by_place if isinstance(kept, DeltaState) else of_cache,
            shapes.caches,
            is_leaf=lambda kept: isinstance(kept, DeltaState),
        )
        return (
            dataclasses.replace(where, caches=caches),
            dataclasses.replace(where, caches=(), experts=None),
        )

    def _split(
        self, function: Callable[..., Any], *specs: PartitionSpec
    ) -> Callable[..., Any]:
        """Maps a function over the replicas; `specs` shard its arguments."""
        if self._replicas is None:
            return function
        return jax.shard_map(
            function,
            mesh=self._replicas.own,
            in_specs=specs,
            out_specs=BY_PLACE,
            axis_names={replicas.AXIS},
            check_vma=False,
        )


def _row_keys(key: Array, index: Array, sample: Array) -> Array:
    sample_key, _ = jax.random.split(key)
    return jax.random.key_data(decode.row_keys(sample_key, index=index, sample=sample))


def _keys_like(keys: Array, data: Array) -> Array:
    """Returns keys with the given data and the implementation of `keys`."""
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(keys))
