"""Sampling on a mesh and in a dtype of its own, which parameters are brought to."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.models.config import Cache
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.reference.storage import store

Array = jax.Array
Params = Any


class Sampler:
    """The compiled `sample` of a recipe.

    Training shards a weight over all devices, so that decoding would fetch it, or sum
    activations of all rows, for every token. On a mesh such as data=8,tensor=8 of the
    same devices a group of eight holds all weights, and the parameters are resharded
    once per iteration. Before that they are cast, in bfloat16 or int8, so that the
    copy is smaller and a token reads less. Norms and biases stay in float32: with
    activations in bfloat16 the samples of bfloat16 weights are those of float32 ones.
    """

    def __init__(
        self,
        recipe: PolicyGradient,
        *,
        mesh: Mesh,
        home: Mesh,
        base: Frozen | None = None,
        storage: Storage = frozen_models.COPY,
        cache: Cache = "same",
        prefill_chunk: int | None = None,
    ) -> None:
        """Compiles nothing yet.

        Args:
          recipe: static.
          mesh: where responses are sampled; `home` brings nothing anywhere.
          home: the policy's mesh, where responses are wanted.
          base: the parameters that adapters adapt, brought to the mesh now.
          storage: dtype of the parameters while they are sampled with; not for
            adapters.
          cache: how keys and values are kept.
          prefill_chunk: columns of prompts at a time; None is all.
        """
        model = dataclasses.replace(
            recipe.model, cache=cache, prefill_chunk=prefill_chunk
        )
        recipe = dataclasses.replace(recipe, model=model)
        self._sample = jax.jit(
            functools.partial(sharding.on(mesh, iteration.sample), recipe=recipe)
        )
        self._mesh, self._home = mesh, home
        self._store = None
        if storage != frozen_models.COPY:
            self._store = jax.jit(
                functools.partial(
                    sharding.on(home, store),
                    dtype=storage.dtype,
                    embeddings=storage.embeddings,
                    vectors="float32",
                )
            )
        if base is not None and mesh is not home:
            base = sharding.place(base, mesh=mesh)
        self._base = base

    def __call__(self, policy: Params, *, prompts: Prompts, key: Array) -> Rollout:
        """Responses, on the policy's mesh.

        Parameters are cast and resharded once, and let go with the last token. It is
        asynchronous: what is dispatched next on other devices runs beside it.

        Args:
          policy: on the policy's mesh.
          prompts: Prompts[B, P].
          key: of this step.

        Raises:
          InputError: the row axes of the sampler's mesh do not divide the rows.
        """
        if self._store is not None:
            policy = sharding.place(self._store(policy), mesh=self._mesh)
        if self._mesh is self._home:
            return self._sample(policy, prompts=prompts, key=key, base=self._base)
        policy, key = sharding.place((policy, key), mesh=self._mesh)
        prompts = row_sharding.put_rows(prompts, mesh=self._mesh)
        rollout = self._sample(policy, prompts=prompts, key=key, base=self._base)
        return row_sharding.put_rows(rollout, mesh=self._home)
