"""Who samples: our decoder here, by its program; or a process, or a server, outside.

A `Sampler` samples on a mesh and in a dtype of its own.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.devices.mesh_shape import ONE_DEVICE
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import axes
from rlhf_jax.models.lora import LoRA
from rlhf_jax.models.lora import merge as merged
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import NO_MODELS, Frozen, FrozenModels
from rlhf_jax.roles.reference.storage import store
from rlhf_jax.train.build import Meshes, Models
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.config.sampler import Here, Process, Server

if TYPE_CHECKING:
    from rlhf_jax.samplers.protocol import Retries
    from rlhf_jax.samplers.protocol import Sampler as OutsideProtocol
    from rlhf_jax.train.rollouts.outside import OutsideSampler

Array = jax.Array
Params = Any
HERE = Here()


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
    may be given them in another order, and they wait for each other for ever. So may
    the devices of several processes, each of which has a thread.
    """
    if jax.process_count() > 1:
        return False
    # One device runs programs in the order it was given them: nothing can cross there.
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
        frozen: FrozenModels = NO_MODELS,
        options: Here = HERE,
    ) -> None:
        """Compiles nothing yet.

        Args:
          mesh: where responses are sampled; `home` brings nothing anywhere.
          home: the policy's mesh, where responses are wanted.
          frozen: of which the base is read, brought to the mesh now, and by a recipe of
            mixtures the reference.
          options: dtype of the parameters while they are sampled with, and how keys and
            values are kept.
        """
        check_pages(options, recipe=recipe, mesh=mesh)
        # How the cache is kept belongs to sampling: the trainer's own model is
        # unchanged.
        recipe = dataclasses.replace(recipe, model=options.sampled(recipe.model))
        self._sample = jax.jit(
            functools.partial(sharding.on(mesh, iteration.sample), recipe=recipe)
        )
        self._mesh, self._home = mesh, home
        self.threaded = threaded(mesh, home=home)
        self._store = None
        # Cast before it is moved: fewer bytes travel, and the trained parameters stay.
        if options.dtype != "float32":
            self._store = jax.jit(
                functools.partial(
                    sharding.on(home, store),
                    dtype=options.dtype,
                    embeddings=options.embeddings,
                    vectors="float32",
                )
            )
        base = frozen.base
        if base is not None and mesh is not home:
            base = sharding.place(base, mesh=mesh)
        self._frozen = dataclasses.replace(frozen, base=base)

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
          version: i32[], of the policy, `TrainState.step`; None stamps no token.
        """
        if self._store is not None:
            policy = sharding.place(self._store(policy), mesh=self._mesh)
        return self.draw(policy, prompts=prompts, key=key, version=version)

    def follow(self, reference: Frozen) -> None:
        """Takes the reference as its lifecycle left it, for a recipe of mixtures."""
        self._frozen = dataclasses.replace(self._frozen, reference=reference)

    def hand_over(self, policy: Params) -> Params:
        """The parameters as `draw` takes them, which no donation of `policy` touches.

        They are cast and resharded; on devices of the policy it is a copy of all.
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
        """
        rollout = self.draw_there(policy, prompts=prompts, key=key, version=version)
        return self.bring_home(rollout)

    def draw_there(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        key: Array,
        version: Array | None = None,
    ) -> Rollout:
        """The same responses on the mesh of the sampler."""
        if self._mesh is self._home:
            return self._sample(
                policy, prompts=prompts, key=key, frozen=self._frozen, version=version
            )
        policy, key, version = sharding.place((policy, key, version), mesh=self._mesh)
        prompts = row_sharding.put_rows(prompts, mesh=self._mesh)
        return self._sample(
            policy, prompts=prompts, key=key, frozen=self._frozen, version=version
        )

    def bring_home(self, rollout: Rollout) -> Rollout:
        """Responses of `draw_there` on the policy's mesh."""
        if self._mesh is self._home:
            return rollout
        return row_sharding.put_rows(rollout, mesh=self._home)


def check_pages(options: Here, *, recipe: PolicyGradient, mesh: Mesh) -> None:
    """Checks that pages of keys and values can be on a mesh."""
    pages, size = options.cache_pages, options.page_size
    if pages is None:
        return
    places = recipe.continuous_batching
    assert places is not None  # as a config with pages has it
    sizes = dict(mesh.shape)
    if any(
        sizes.get(axis, 1) > 1 for axis in ("fsdp", axes.EXPERT_AXIS, axes.CONTEXT_AXIS)
    ):
        raise InputError(
            f"--sampler: expected cache_pages on a mesh without fsdp and context, as "
            f"data=2,tensor=4, whose devices with the same rows have all weights, got "
            f"{sizes}; choose another --placement.sampler, or leave it out"
        )
    shares = sizes.get("data", 1)
    for name, number in {
        "cache_pages of --sampler": pages,
        "--continuous-batching": places,
    }.items():
        if number % shares:
            raise InputError(
                f"{name}: expected a multiple of {shares}, as each share of the rows "
                f"has pages of its own, got {number}; change it, or choose another "
                f"--placement.sampler"
            )
    # A prompt has one token or more, and the last token of a response is not run.
    from rlhf_jax.models.generation.page_table import pages_of

    least = pages_of(recipe.max_new_tokens, size=size) * shares
    checks.within(
        least=least,
        advice=f"a response of {recipe.max_new_tokens} tokens may take "
        f"{least // shares} pages of {size} columns; give more, or leave it out",
        **{"cache_pages of --sampler": pages},
    )


def make_sampler(
    config: PolicyGradientConfig, models: Models, *, meshes: Meshes
) -> Sampler | OutsideSampler:
    """The sampler of a run."""
    options, recipe = config.sampler.sampler, models.recipe
    if isinstance(options, Here):
        # Episodes are drawn by programs that have a copy of their own.
        alone = config.sampler.environment is None
        frozen = FrozenModels(base=models.base if alone else None)
        if config.mixes_reference:
            frozen = FrozenModels(models.reference, models.base)
        return Sampler(
            recipe,
            mesh=meshes.sampler,
            home=meshes.policy,
            frozen=frozen,
            options=dataclasses.replace(options, dtype=config.sampler_dtype),
        )
    # Here and below, as they are modules that no other run needs.
    from rlhf_jax.samplers.protocol import Retries
    from rlhf_jax.train.rollouts.outside import OutsideSampler

    merge = None
    if models.base is not None and recipe.lora is not None:
        merge = _merging(models.base, recipe.lora, mesh=meshes.policy)
        recipe = dataclasses.replace(recipe, lora=None)
    retries = Retries(options.tries)
    made: list[OutsideProtocol] = []
    processes.on_first(
        lambda: made.append(
            _outside(config, recipe, options=options, retries=retries, meshes=meshes)
        )
    )
    return OutsideSampler(
        made[0] if made else None,
        home=meshes.policy,
        max_new_tokens=recipe.max_new_tokens,
        merge=merge,
        retries=retries,
        # Programs of two threads on several devices could wait for each other for
        # ever: the check of a server's hand-over runs on those of the policy.
        threaded=jax.process_count() == 1
        and (isinstance(options, Process) or meshes.policy.devices.size == 1),
    )


def _outside(
    config: PolicyGradientConfig,
    recipe: PolicyGradient,
    *,
    options: Process | Server,
    retries: Retries,
    meshes: Meshes,
) -> OutsideProtocol:
    """A process, or a server that answers."""
    if isinstance(options, Process):
        from rlhf_jax.samplers.process import ProcessSampler

        return ProcessSampler(recipe, weights=options.weights, timeout=options.timeout)
    from rlhf_jax.samplers.server import ServerSampler

    mesh = meshes.policy
    if jax.process_count() > 1:  # a program on the devices of all would wait for them
        mesh = ONE_DEVICE.make(jax.local_devices()[:1])
    tolerance = options.check_tolerance
    if tolerance is None:
        tolerance = self_check.TOLERANCE[config.start.dtype]
    return ServerSampler(
        options.address,
        recipe,
        tolerance=tolerance,
        mesh=mesh,
        model=options.model,
        weights=options.weights,
        timeout=options.timeout,
        retries=retries,
    )


def _merging(base: Frozen, lora: LoRA, *, mesh: Mesh) -> Callable[[Any], Any]:
    """What samplers outside draw with, who know no adapters: f32, on the mesh."""

    def of_base(policy: Any, base: Frozen) -> Any:
        return merged(frozen.read(base), policy, lora=lora, rounded_to=jnp.float32)

    return functools.partial(jax.jit(sharding.on(mesh, of_base)), base=base)
