"""Sampling on a mesh and in a dtype of its own: its program."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.models.config import PAGE_SIZE, Cache
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.reference.storage import store

Array = jax.Array
Params = Any


def versions(rollout: Rollout) -> list[int | None]:
    """Which version of the policy drew each response; of several its oldest.

    None drew an episode that never began.

    Args:
      rollout: on the host, with versions.
    """
    assert rollout.version is not None  # as trainers stamp every token
    return [
        int(version[drawn].min()) if drawn.any() else None
        for version, drawn in zip(
            np.asarray(rollout.version), np.asarray(rollout.response_mask), strict=True
        )
    ]


def threaded(sampling: Mesh, *, home: Mesh) -> bool:
    """Whether a thread may start the sampler's programs.

    Where programs of two threads run on the same devices, several of them, each device
    may be given them in another order, and they wait for each other for ever.

    Args:
      sampling: mesh of the sampler.
      home: mesh of the policy.
    """
    shared = set(sampling.devices.flat) & set(home.devices.flat)
    return not shared or home.devices.size == sampling.devices.size == 1


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
        cache_pages: int | None = None,
        page_size: int = PAGE_SIZE,
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
          cache_pages: pages that rows share for them, of all shares of the rows
            together; None gives each row columns of its own.
          page_size: columns of a page.
          prefill_chunk: columns of prompts at a time; None is all.
        """
        model = dataclasses.replace(
            recipe.model,
            cache=cache,
            cache_pages=cache_pages,
            page_size=page_size,
            prefill_chunk=prefill_chunk,
        )
        recipe = dataclasses.replace(recipe, model=model)
        self._sample = jax.jit(
            functools.partial(sharding.on(mesh, iteration.sample), recipe=recipe)
        )
        self._mesh, self._home = mesh, home
        self.threaded = threaded(mesh, home=home)
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

    def __call__(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        key: Array,
        version: Array | None = None,
    ) -> Rollout:
        """Responses, on the policy's mesh.

        Parameters are cast and resharded once, and let go with the last token. It is
        asynchronous: what is dispatched next on other devices runs beside it.

        Args:
          policy: on the policy's mesh.
          prompts: Prompts[B, P].
          key: of this step.
          version: i32[], of the policy, `TrainState.step`; None stamps no token.

        Raises:
          InputError: the row axes of the sampler's mesh do not divide the rows.
        """
        if self._store is not None:
            policy = sharding.place(self._store(policy), mesh=self._mesh)
        return self.draw(policy, prompts=prompts, key=key, version=version)

    def hand_over(self, policy: Params) -> Params:
        """The parameters as `draw` takes them, which no donation of `policy` touches.

        They are cast and resharded; on devices of the policy it is a copy of all.

        Args:
          policy: on the policy's mesh.
        """
        if self._store is not None:
            policy = self._store(policy)
        elif not set(self._mesh.devices.flat).isdisjoint(self._home.devices.flat):
            policy = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), policy)
        return sharding.place(policy, mesh=self._mesh)

    def draw(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        key: Array,
        version: Array | None = None,
    ) -> Rollout:
        """Responses, on the policy's mesh.

        Args:
          policy: of `hand_over`.
          prompts, key, version: as those of a call.

        Raises:
          InputError: the row axes of the sampler's mesh do not divide the rows.
        """
        if self._mesh is self._home:
            return self._sample(
                policy, prompts=prompts, key=key, base=self._base, version=version
            )
        policy, key, version = sharding.place((policy, key, version), mesh=self._mesh)
        prompts = row_sharding.put_rows(prompts, mesh=self._mesh)
        rollout = self._sample(
            policy, prompts=prompts, key=key, base=self._base, version=version
        )
        return row_sharding.put_rows(rollout, mesh=self._home)
