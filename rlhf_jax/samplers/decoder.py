"""Our decoder as a sampler: the program of `iteration.sample`, on one device."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, cast

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import ONE_DEVICE
from rlhf_jax.functional.checks import StopError
from rlhf_jax.samplers.protocol import Drawn

Array = jax.Array
Params = Any


class DecoderSampler:
    """Draws with our decoder in this process.

    It can be pickled, without parameters: `process` sends it to another process.
    """

    def __init__(self, recipe: PolicyGradient) -> None:
        """Compiles nothing yet.

        Args:
          recipe: static, without adapters; its optimizer is not kept.
        """
        without: Any = {"policy_optimizer": cast(Any, None)}
        self.recipe = dataclasses.replace(recipe, **without)
        self._params: Params = None
        self._version: int | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "_params": None, "_version": None}

    @functools.cached_property
    def _sample(self) -> Any:
        # As a trainer on one device has it: another program may round otherwise.
        return jax.jit(
            functools.partial(
                sharding.on(ONE_DEVICE.make(), iteration.sample), recipe=self.recipe
            )
        )

    def hand_over(self, params: Params, *, version: int) -> float:
        """Has the next draws made with these parameters, of which it takes a copy."""
        copied = jax.tree.map(np.array, params)
        self._params = sharding.place(copied, mesh=ONE_DEVICE.make())
        self._version = version
        return 0.0

    def draw(self, prompts: Prompts, *, key: Array, version: int) -> Drawn:
        """A response to every prompt; equal arguments give equal bits.

        Raises:
          StopError: another version was handed over.
          InputError: sizes of the batch do not divide.
        """
        if version != self._version:
            raise StopError(
                f"expected a draw of version {self._version} of the policy, which was "
                f"handed over last, got one of version {version}; hand that over first"
            )
        mesh = ONE_DEVICE.make()
        rollout = jax.device_get(
            self._sample(
                self._params,
                prompts=row_sharding.put_rows(prompts, mesh=mesh),
                key=sharding.place(key, mesh=mesh),
                version=sharding.place(np.int32(version), mesh=mesh),
                base=None,
            )
        )
        before = prompts.tokens.shape[1]
        return Drawn(
            tokens=rollout.tokens[:, before:],
            sampler_logprobs=rollout.old_logprobs[:, before:],
            lengths=rollout.response_mask.sum(axis=1).astype(np.int32),
            entropy=rollout.entropy[:, before:],
        )

    def close(self) -> None:
        """Lets the parameters go."""
        self._params, self._version = None, None
