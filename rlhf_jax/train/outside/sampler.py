"""A sampler of the protocol as a trainer calls it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.devices import row_sharding
from rlhf_jax.functional import masked
from rlhf_jax.samplers import protocol
from rlhf_jax.samplers.retries import Retries, TransientError
from rlhf_jax.train.rollouts.waits import Waits

Array = jax.Array
Params = Any


class OutsideSampler(contextlib.AbstractContextManager[Any]):
    """Hands parameters over once per version, and draws; ends the sampler on leaving.

    It is called as `train.sampling.sampler.Sampler` is, by the trainer or by the thread
    of a queue; draws come in the order of versions.
    """

    def __init__(
        self,
        sampler: protocol.Sampler,
        *,
        home: Mesh,
        merge: Callable[[Params], Params] | None = None,
        retries: Retries | None = None,
        threaded: bool = True,
    ) -> None:
        """Starts nothing yet.

        Args:
          home: the policy's mesh, where rollouts are wanted.
          merge: adapters -> the parameters that they make of their base; None of a
            policy that is all of its parameters.
          threaded: whether a thread may call it, beside the updates.
        """
        self.threaded = threaded
        self._sampler, self._home, self._merge = sampler, home, merge
        self.retries = Retries() if retries is None else retries
        self._version: int | None = None
        self._distance: float | None = None
        self._waits = Waits("hand_over", "draw")

    def __exit__(self, *exception: object) -> None:
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
        number, on_host = int(version), jax.device_get(prompts)
        data: Any = np.asarray(jax.random.key_data(key))  # of a mesh, perhaps
        here = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))

        def drawn() -> protocol.Drawn:
            if number != self._version:
                with self._waits.of("hand_over"):
                    self._version = None  # until it is known to have them
                    self._distance = self._sampler.hand_over(policy, version=number)
                    self._version = number
            with self._waits.of("draw"):
                try:
                    return self._sampler.draw(on_host, key=here, version=number)
                except TransientError:
                    self._version = None  # it may be another one, without them
                    raise

        rollout = protocol.rollout_of(on_host, self.retries(drawn), version=number)
        return row_sharding.put_rows(rollout, mesh=self._home)

    def stats(self) -> masked.Stats:
        """`policy/sampler_check`: what the last hand-over returned, nats per token."""
        if self._distance is None:
            return {}
        return {"policy/sampler_check": (jnp.float32(self._distance), None)}

    def seconds(self) -> dict[str, float]:
        """Seconds of hand-overs, checks included, and of draws, since the last call."""
        return self._waits.read()
