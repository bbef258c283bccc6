"""A critic on its own mesh: the programs of `critic_apart`, and moves of their data.

    update = functools.partial(ppo.update, ...)
    devices = CriticDevices(recipe=recipe, mesh=critic_mesh, home=mesh)
    valued = devices.state_of(critic.from_policy(params, model=model))
    values = devices.values(valued, rollout=rollout)
    train, experience, stats, scored = make_experience(train, ..., values=values)
    valued, critic_stats = devices.update(valued, experience=experience, key=key)
    train, update_stats = update(train, experience=experience, key=key)

Each call returns when its work is dispatched, so that the policy's devices work at the
same time.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.algorithms.batch import Experience, Rollout, RolloutPacking
from rlhf_jax.algorithms.ppo import critic_apart
from rlhf_jax.algorithms.ppo.recipe import PPO
from rlhf_jax.algorithms.state import SupervisedState, supervised_state
from rlhf_jax.devices import moving, row_sharding, sharding
from rlhf_jax.functional import masked
from rlhf_jax.roles.reference.frozen import Frozen, FrozenModels

Array = jax.Array
Params = Any


class CriticDevices:
    """The critic's programs on its mesh; moves their inputs there."""

    def __init__(
        self, *, recipe: PPO, mesh: Mesh, home: Mesh, base: Frozen | None = None
    ) -> None:
        """Compiles nothing yet.

        Args:
          home: the mesh of rollouts and experience, to which values are moved.
          base: the model under the critic's adapters, copied to `mesh`; None without.

        Raises:
          InputError: the recipe cannot train a critic apart from its policy.
        """
        recipe.refuse_critic_apart()
        self._ppo, self._mesh, self._home = recipe, mesh, home
        # A copy on the critic's devices: a program reads arrays of only one mesh.
        self.base = None if base is None else sharding.place(base, mesh=mesh)
        self._frozen = FrozenModels(base=self.base)
        on = functools.partial(sharding.on, mesh)
        self._values = jax.jit(
            functools.partial(on(critic_apart.values), recipe=recipe)
        )
        self._update = jax.jit(
            functools.partial(on(critic_apart.update), recipe=recipe),
            # Parameters and moments are overwritten; the caller keeps the new state.
            donate_argnames=("critic",),
        )

    def state_of(self, params: Params) -> SupervisedState:
        """The state of a critic before its first update, on its mesh.

        Raises:
          TypeError: a parameter is not f32; names the leaf.
        """
        moved = sharding.place(params, mesh=self._mesh)
        state = supervised_state(moved, optimizer=self._ppo.critic_optimizer)
        return sharding.place(state, mesh=self._mesh)

    def values(
        self,
        critic: SupervisedState,
        *,
        rollout: Rollout,
        packing: RolloutPacking | None = None,
    ) -> Array:
        """`critic_apart.values`, f32[B, S], on the mesh of the policy."""
        moved = row_sharding.put_rows(rollout, mesh=self._mesh)
        values = self._values(
            critic.params, rollout=moved, frozen=self._frozen, packing=packing
        )
        # Asynchronous: the copy is queued behind the values, and the host goes on.
        return row_sharding.put_rows(values, mesh=self._home)

    def update(
        self,
        critic: SupervisedState,
        *,
        experience: Experience,
        key: Array,
        packing: RolloutPacking | None = None,
    ) -> tuple[SupervisedState, masked.Stats]:
        """`critic_apart.update`; donates `critic`. The stats stay on its mesh."""
        # The policy's update does not donate its experience, so that both may read it.
        moved = row_sharding.put_rows(experience, mesh=self._mesh)
        # Not `sharding.place`, which cannot be traced, as a rehearsal does.
        key = moving.move(key, NamedSharding(self._mesh, PartitionSpec()))
        return self._update(
            critic, experience=moved, key=key, frozen=self._frozen, packing=packing
        )
