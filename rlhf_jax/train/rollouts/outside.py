"""Adapts a sampler outside the trainer to the calls of the loop and the queue.

With several processes only the first one talks to the sampler:

    draw_there    all gather the policy in the first, whose thread hands over and draws
    bring_home    all wait for that thread, and keep their own rows of the responses
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Prompts, Request, Rollout
from rlhf_jax.devices import processes, row_sharding
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import StopError
from rlhf_jax.samplers import protocol
from rlhf_jax.samplers.protocol import Retries, TransientError
from rlhf_jax.train.rollouts.queue import Lane
from rlhf_jax.train.rollouts.waits import Waits

Array = jax.Array
Params = Any


class Asked(NamedTuple):
    """A request to the sampler."""

    prompts: Prompts  # on the host
    version: int
    answer: Future[protocol.Drawn]  # set in the first process only


class OutsideSampler(contextlib.AbstractContextManager[Any]):
    """Hands parameters over once per version, and draws; closes the sampler on exit.

    It has the methods of `train.sampler.Sampler`, for the trainer or the thread of a
    queue. Draws come in the order of versions. With several processes its own thread
    draws, as that runs no program on the devices of all.
    """

    def __init__(
        self,
        sampler: protocol.Sampler | None,
        *,
        home: Mesh,
        max_new_tokens: int,
        record: tuple[int, int] | None = None,
        merge: Callable[[Params], Params] | None = None,
        retries: Retries | None = None,
        threaded: bool = True,
    ) -> None:
        """Starts nothing yet.

        Args:
          sampler: None in every process but the first.
          home: the policy's mesh, where responses are returned.
          record: L and k, layers and experts of a token that the sampler records; None:
            it records none.
          merge: adapters -> merged parameters; None for a policy without adapters.
          threaded: whether a thread may call it during updates.
        """
        self.threaded = threaded
        self._sampler, self._home, self._merge = sampler, home, merge
        self._max_new_tokens, self._record = max_new_tokens, record
        # With several processes: the version whose parameters are on the first's host.
        self._gathered: tuple[int, Params] | None = None
        self.retries = Retries() if retries is None else retries
        self._version: int | None = None
        self._distance: float | None = None
        self._waits = Waits("hand_over", "draw")
        self._lane = None
        if sampler is not None and jax.process_count() > 1:
            self._lane = Lane("sampler")

    def __enter__(self) -> Self:
        if self._lane is not None:
            self._lane.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._lane is not None:
            self._lane.close(patience=0.0)  # closing the sampler ends its draw
        if self._sampler is not None:
            self._sampler.close()

    def __call__(self, policy: Params, request: Request) -> Rollout:
        """Draws responses as `draw`, from parameters that are not handed over yet."""
        if self._merge is not None:
            policy = self._merge(policy)
        return self.draw(policy, request)

    def hand_over(self, policy: Params) -> Params:
        """Returns parameters for `draw`, in buffers that no update donates.

        The sampler receives them at the first draw.
        """
        if self._merge is not None:
            return self._merge(policy)
        if jax.process_count() > 1:
            return policy  # `draw_there` copies them to the host before any update
        # A copy: the update donates the policy while a thread still sends it.
        return jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), policy)

    def draw(self, policy: Params, request: Request) -> Rollout:
        """Draws responses and returns them on the policy's mesh.

        Args:
          policy: all parameters; sent to the sampler if the version is new.

        Raises:
          StopError: every attempt of the sampler failed.
          SelfCheckError: the sampler uses other parameters.
        """
        return self.bring_home(self.draw_there(policy, request))

    def draw_there(self, policy: Params, request: Request) -> Asked:
        """Requests responses; with several processes it does not wait for them."""
        assert request.version is not None  # a sampler outside needs the number
        prompts, key = request.prompts, request.key
        number, on_host = (
            int(processes.whole(request.version)),
            processes.whole(prompts),
        )
        data: Any = processes.whole(jax.random.key_data(key))  # it may be on a mesh
        here = jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))
        params = policy
        if jax.process_count() > 1:
            params = self._whole(policy, version=number)
        answer: Future[protocol.Drawn] = Future()
        asked = Asked(on_host, number, answer)

        def job() -> None:
            try:
                answer.set_result(self._drawn(params, asked, key=here))
            except BaseException as error:  # `bring_home` raises it
                answer.set_exception(error)

        if self._lane is not None:
            self._lane.append(job)
        elif self._sampler is not None:
            job()
        return asked

    def bring_home(self, asked: Asked) -> Rollout:
        """Waits for the responses of `draw_there`; moves them to the policy's mesh."""
        if jax.process_count() == 1:
            drawn = asked.answer.result()
        else:
            drawn = self._from_first(asked)
        rollout = protocol.rollout_of(asked.prompts, drawn, version=asked.version)
        mine = row_sharding.own_rows(rollout, mesh=self._home)
        return row_sharding.put_rows(mine, mesh=self._home)

    def _drawn(self, params: Params, asked: Asked, *, key: Array) -> protocol.Drawn:
        """Hands over and draws, with retries after transient errors."""
        sampler = self._sampler
        assert sampler is not None

        def draw() -> protocol.Drawn:
            # Once per version: redraws and retries of a step reuse the weights.
            if asked.version != self._version:
                with self._waits.of("hand_over"):
                    self._version = None  # until the hand-over has succeeded
                    self._distance = sampler.hand_over(params, version=asked.version)
                    self._version = asked.version
            with self._waits.of("draw"):
                try:
                    return sampler.draw(asked.prompts, key=key, version=asked.version)
                except TransientError:
                    self._version = None  # a restarted server has lost the weights
                    raise

        return self.retries(draw)

    def _whole(self, policy: Params, *, version: int) -> Params:
        """Gathers all parameters on the first process's host, leaf by leaf."""
        if self._gathered is None or self._gathered[0] != version:
            self._gathered = None  # freed first: the host holds one version at a time
            leaves, structure = jax.tree.flatten(policy)
            whole = []
            for leaf in leaves:
                of_all = processes.whole(leaf)
                # A copy: on a CPU it may be the buffer that the next update donates.
                whole.append(np.array(of_all) if processes.is_first() else None)
            self._gathered = version, jax.tree.unflatten(structure, whole)
        return self._gathered[1]

    def _from_first(self, asked: Asked) -> protocol.Drawn:
        """Broadcasts the responses of the first process to all processes.

        Raises:
          StopError: the draw failed; the first process raises the original error.
        """
        rows, before = asked.prompts.tokens.shape
        zeros = np.zeros((rows, self._max_new_tokens), np.float32)
        experts = None
        if self._record is not None:
            shape = rows, before + self._max_new_tokens, *self._record
            experts = np.zeros(shape, np.int32)
        drawn = protocol.Drawn(
            zeros.astype(np.int32), zeros, np.ones(rows, np.int32), zeros, experts
        )
        failure, message = None, ""
        if processes.is_first():
            try:
                drawn = asked.answer.result()
            except Exception as error:  # the other processes wait for the outcome
                failure, message = error, str(error) or type(error).__name__
        if message := processes.from_first(message):
            raise StopError(message) if failure is None else failure
        entropy = drawn.entropy
        if entropy is None:  # estimated as in `rollout_of`
            entropy = -drawn.sampler_logprobs
        distance = math.nan if self._distance is None else self._distance
        # The other processes pass zeros of the same shapes.
        *arrays, experts, distance = multihost_utils.broadcast_one_to_all(
            (
                np.asarray(drawn.tokens, np.int32),
                np.asarray(drawn.sampler_logprobs, np.float32),
                np.asarray(drawn.lengths, np.int32),
                np.asarray(entropy, np.float32),
                drawn.experts,
                np.float32(distance),
            )
        )
        self._distance = None if math.isnan(distance) else float(distance)
        return protocol.Drawn(*jax.tree.map(np.asarray, (*arrays, experts)))

    def stats(self) -> masked.Stats:
        """`policy/sampler_check`: distance at the last hand-over, nats per token."""
        if self._distance is None:
            return {}
        return {"policy/sampler_check": (jnp.float32(self._distance), None)}

    def seconds(self) -> dict[str, float]:
        """Seconds of hand-overs (checks included) and draws since the last call."""
        return self._waits.read()

    def summary(self) -> dict[str, Any]:
        """Returns how often a call was tried again, for the summary."""
        return {"sampler_retries": self.retries.count}
