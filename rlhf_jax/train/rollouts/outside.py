"""A sampler of the protocol as a trainer calls it.

Of several processes the first has the sampler: it is handed what all of them hold, and
its responses go to all, each of which keeps its own rows.

    draw_there    all gather the policy to the first, whose thread hands over and draws
    bring_home    all wait for that thread, and take their rows
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

from rlhf_jax.algorithms.batch import Prompts, Rollout
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
    """What a sampler was asked for, and answers in a thread of the first process."""

    prompts: Prompts  # on the host
    version: int
    answer: Future[protocol.Drawn]  # which none but the first gets


class OutsideSampler(contextlib.AbstractContextManager[Any]):
    """Hands parameters over once per version, and draws; ends the sampler on leaving.

    It is called as `train.sampler.Sampler` is, by the trainer or by the thread
    of a queue; draws come in the order of versions. Of several processes its own thread
    draws ahead, as it runs no program on the devices of all.
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
        if jax.process_count() > 1:
            return policy  # `draw_there` copies them to the host, before any update
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
        asked = self.draw_there(policy, prompts=prompts, key=key, version=version)
        return self.bring_home(asked)

    def draw_there(
        self, policy: Params, *, prompts: Prompts, key: Array, version: Array
    ) -> Asked:
        """Asks for these responses: of several processes, without waiting for them."""
        number, on_host = int(version), processes.whole(prompts)
        data: Any = np.asarray(jax.random.key_data(key))  # of a mesh, perhaps
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
        """The responses of `draw_there`, on the policy's mesh; waits for them."""
        rows = len(asked.prompts.tokens)
        if jax.process_count() == 1:
            drawn = asked.answer.result()
        else:
            drawn = self._from_first(asked.answer, rows=rows)
        rollout = protocol.rollout_of(asked.prompts, drawn, version=asked.version)
        mine = row_sharding.own_rows(rollout, mesh=self._home)
        return row_sharding.put_rows(mine, mesh=self._home)

    def _drawn(self, params: Params, asked: Asked, *, key: Array) -> protocol.Drawn:
        """What the sampler draws, tried again where that may help."""
        sampler = self._sampler
        assert sampler is not None

        def draw() -> protocol.Drawn:
            # Once per version: redraws and retries of a step find the weights there.
            if asked.version != self._version:
                with self._waits.of("hand_over"):
                    self._version = None  # until it is known to have them
                    self._distance = sampler.hand_over(params, version=asked.version)
                    self._version = asked.version
            with self._waits.of("draw"):
                try:
                    return sampler.draw(asked.prompts, key=key, version=asked.version)
                except TransientError:
                    self._version = None  # it may be another one, without them
                    raise

        return self.retries(draw)

    def _whole(self, policy: Params, *, version: int) -> Params:
        """All of the parameters on the first process's host, gathered leaf by leaf."""
        if self._gathered is None or self._gathered[0] != version:
            self._gathered = None  # before the next: the host holds one version
            leaves, structure = jax.tree.flatten(policy)
            whole = []
            for leaf in leaves:
                of_all = processes.whole(leaf)
                # A copy: on a CPU it may be the buffer that the next update donates.
                whole.append(np.array(of_all) if processes.is_first() else None)
            self._gathered = version, jax.tree.unflatten(structure, whole)
        return self._gathered[1]

    def _from_first(
        self, answer: Future[protocol.Drawn], *, rows: int
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
                drawn = answer.result()
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
