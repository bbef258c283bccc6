"""Our decoder in the worker of `process`: the program of `iteration.sample`."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import ONE_DEVICE
from rlhf_jax.roles.reference import fingerprint
from rlhf_jax.samplers import weight_files
from rlhf_jax.samplers.protocol import Drawn
from rlhf_jax.verification.worker import Failed

Array = jax.Array
Params = Any
OTHER_VERSION = Failed("has another version of the policy")


class Decoder:
    """Draws responses on one device; pickled before it has parameters."""

    def __init__(self, recipe: PolicyGradient) -> None:
        """Stores the recipe, without adapters; compiles nothing yet."""
        optimizers = ("policy_optimizer", "critic_optimizer")
        # Sampling needs no optimizer, and optax's closures cannot be pickled.
        without: Any = {name: None for name in optimizers if hasattr(recipe, name)}
        self.recipe = dataclasses.replace(recipe, **without)
        self.version: int | None = None  # of the parameters

    @functools.cached_property
    def _sample(self) -> Any:
        # The program of a trainer on one device: others may round differently.
        return jax.jit(
            functools.partial(
                sharding.on(ONE_DEVICE.make(), iteration.sample), recipe=self.recipe
            )
        )

    def load(self, file: str, version: int) -> str:
        """Loads the parameters of the next draws; returns their fingerprint's root."""
        params = weight_files.read(Path(file))
        # The arrays may be views of a file that is removed after the hand-over.
        copied = jax.tree.map(np.array, params)
        self._params = sharding.place(copied, mesh=ONE_DEVICE.make())
        self.version = version
        return fingerprint.fingerprint(params).root

    def draw(
        self, prompts: Prompts, key_data: Any, impl: str, version: int
    ) -> Drawn | Failed:
        """Draws a response to every prompt; equal arguments give equal bits.

        Args:
          key_data, impl: of the step's key, since typed keys cannot be pickled.
          version: of the parameters; returns OTHER_VERSION if another was loaded last.

        Raises:
          InputError: sizes of the batch do not divide.
        """
        if self.version != version:
            return OTHER_VERSION
        key = jax.random.wrap_key_data(key_data, impl=impl)
        mesh = ONE_DEVICE.make()
        rollout = jax.device_get(
            self._sample(
                self._params,
                prompts=row_sharding.put_rows(prompts, mesh=mesh),
                key=sharding.place(key, mesh=mesh),
            )
        )
        before = prompts.tokens.shape[1]
        return Drawn(
            tokens=rollout.tokens[:, before:],
            sampler_logprobs=rollout.old_logprobs[:, before:],
            lengths=rollout.response_mask.sum(axis=1).astype(np.int32),
            entropy=rollout.entropy[:, before:],
            experts=rollout.experts,
        )
