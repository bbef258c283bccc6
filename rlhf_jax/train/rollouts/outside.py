"""A sampler of the protocol as a trainer calls it.

Of several processes the first has the sampler: it is handed what all of them hold, and
its responses go to all, each of which keeps its own rows.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.devices import processes, row_sharding
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import StopError
from rlhf_jax.samplers import protocol
from rlhf_jax.samplers.protocol import Retries, TransientError
from rlhf_jax.train.rollouts.waits import Waits

Array = jax.Array
Params = Any


class OutsideSampler(contextlib.AbstractContextManager[Any]):
    """Hands parameters over once per version, and draws; ends the sampler on leaving.

    It is called as `train.sampler.Sampler` is, by the trainer or by the thread
    of a queue; draws come in the order of versions.
    """

    def __init__(
        self,
        sampler: protocol.Sampler | None,
        *,
        home: Mesh,
        max_new_tokens: int,
        merge: Callable[[Params], Params] | None = None,
        retries: Retries | None = None,
        threaded: bool = True,
    ) -> None:
        """Starts nothing yet.

        Args:
          sampler: None in every process but the first.
          merge: adapters -> the parameters that they make of their base; None of a
            policy that is all of its parameters.
          threaded: whether a thread may call it, beside the updates.
        """
        self.threaded = threaded
        self._sampler, self._home, self._merge = sampler, home, merge
        self._max_new_tokens = max_new_tokens
        # Of several processes: the version that the first holds whole on its host.
        self._gathered: tuple[int, Params] | None = None
        self.retries = Retries() if retries is None else retries
        self._version: int | None = None
        self._distance: float | None = None
        self._waits = Waits("hand_over", "draw")

    def __exit__(self, *exception: object) -> None:
        if self._sampler is not None:
            self._sampler.close()

    def __call__(
        self, policy: Params, *, prompts: Prompts, key: Array, version: Array
    ) -> Rollout:
        """Responses, on the policy's mesh, as `draw`."""
        if self._merge is not None:
            policy = self._merge(policy)
        return self.draw(policy, prompts=prompts, key=key, version=version)

    def hand_over(self, policy: Params) -> Params:
        """The parameters as `draw` takes them, which no update of the policy donates.

        The sampler gets them with the first draw.
        """
        if self._merge is not None:
            return self._merge(policy)
        # A copy: the update donates the policy while a thread still hands it over.
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), policy)

    def draw(
        self, policy: Params, *, prompts: Prompts, key: Array, version: Array
    ) -> Rollout:
        """Responses, on the policy's mesh.

        Args:
          policy: all of its parameters, handed over where they are of another version
            than the last ones.
          version: i32[], of the policy, `TrainState.step`.

        Raises:
          StopError: the sampler failed, as often as it was tried.
          SelfCheckError: it samples with other parameters.
        """
        number, on_host = int(version), processes.whole(prompts)
        data: Any = np.asarray(jax.random.key_data(key))  # of a mesh, perhaps
        here = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))

        params = policy
        if jax.process_count() > 1:
            params = self._whole(policy, version=number)

        def drawn() -> protocol.Drawn:
            assert self._sampler is not None
            # Once per version: redraws and retries of a step find the weights there.
            if number != self._version:
                with self._waits.of("hand_over"):
                    self._version = None  # until it is known to have them
                    self._distance = self._sampler.hand_over(params, version=number)
                    self._version = number
            with self._waits.of("draw"):
                try:
                    return self._sampler.draw(on_host, key=here, version=number)
                except TransientError:
                    self._version = None  # it may be another one, without them
                    raise

        rows = len(on_host.tokens)
        if jax.process_count() == 1:
            rollout = protocol.rollout_of(on_host, self.retries(drawn), version=number)
        else:
            of_first = self._from_first(drawn, rows=rows)
            rollout = protocol.rollout_of(on_host, of_first, version=number)
            mine = row_sharding.row_share(self._home).of(rows)
            rollout = jax.tree.map(lambda x: x[mine], rollout)
        return row_sharding.put_rows(rollout, mesh=self._home)

    def _whole(self, policy: Params, *, version: int) -> Params:
        """All of the parameters on the first process's host, gathered leaf by leaf."""
        if self._gathered is None or self._gathered[0] != version:
            self._gathered = None  # before the next: the host holds one version
            leaves, structure = jax.tree.flatten(policy)
            whole = []
            for leaf in leaves:
                of_all = processes.whole(leaf)
                whole.append(of_all if processes.is_first() else None)
            self._gathered = version, jax.tree.unflatten(structure, whole)
        return self._gathered[1]

    def _from_first(
        self, draw: Callable[[], protocol.Drawn], *, rows: int
    ) -> protocol.Drawn:
        """What the first process draws, in all of them.

        Raises:
          StopError: it failed; in the first process whatever it raised.
        """
        shape = rows, self._max_new_tokens
        zeros = np.zeros(shape, np.float32)
        drawn = protocol.Drawn(
            zeros.astype(np.int32), zeros, np.ones(rows, np.int32), zeros
        )
        failure, message = None, ""
        if processes.is_first():
            try:
                drawn = self.retries(draw)
            except Exception as error:  # the others wait to be told, whatever it is
                failure, message = error, str(error) or type(error).__name__
        if message := processes.from_first(message):
            raise StopError(message) if failure is None else failure
        entropy = drawn.entropy
        if entropy is None:  # as `rollout_of` estimates it
            entropy = -drawn.sampler_logprobs
        distance = math.nan if self._distance is None else self._distance
        # All processes call this with arrays of one shape, the first with the real
        # ones.
        *arrays, distance = multihost_utils.broadcast_one_to_all(
            (
                np.asarray(drawn.tokens, np.int32),
                np.asarray(drawn.sampler_logprobs, np.float32),
                np.asarray(drawn.lengths, np.int32),
                np.asarray(entropy, np.float32),
                np.float32(distance),
            )
        )
        self._distance = None if math.isnan(distance) else float(distance)
        return protocol.Drawn(*map(np.asarray, arrays))

    def stats(self) -> masked.Stats:
        """`policy/sampler_check`: what the last hand-over returned, nats per token."""
        if self._distance is None:
            return {}
        return {"policy/sampler_check": (jnp.float32(self._distance), None)}

    def seconds(self) -> dict[str, float]:
        """Seconds of hand-overs, checks included, and of draws, since the last call."""
        return self._waits.read()
