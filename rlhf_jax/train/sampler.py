"""The sampler of a run: the decoder beside the trainer, a process, or a server.

A `Sampler` is the decoder, on a mesh and in a dtype of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.batch import Request, Rollout
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.devices.mesh_shape import ONE_DEVICE
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.masked import Stats
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
    """Returns the oldest version of the policy that drew a token of each response.

    None stands for an episode that never began.

    Args:
      rollout: on the host, with versions.
    """
    assert rollout.version is not None  # trainers stamp every token
    return [
        int(version[drawn].min()) if drawn.any() else None
        for version, drawn in zip(
            np.asarray(rollout.version), np.asarray(rollout.response_mask), strict=True
        )
    ]


def threaded(sampling: Mesh, *, home: Mesh) -> bool:
    """Returns whether a thread may start the sampler's programs.

    Two threads that start programs on the same devices can deadlock: each device may
    receive the programs in another order. So can a thread in each of several processes.
    """
    if jax.process_count() > 1:
        return False
    # One device runs programs in the order in which it receives them: no deadlock.
    shared = set(sampling.devices.flat) & set(home.devices.flat)
    return not shared or home.devices.size == sampling.devices.size == 1


class Sampler:
    """The compiled `sample` of a recipe.

    Training shards a weight over all devices, so that decoding there would gather
    weights, or sum activations of all rows, for every token. On a mesh such as
    data=8,tensor=8 of the same devices each group of eight holds all weights, and the
    parameters are resharded once per iteration. They are cast to bfloat16 or int8
    first, so that the copy is smaller and each token reads less. Norms and biases stay
    in float32: with bfloat16 activations, casting the weights changes no sample.
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
          mesh: where responses are sampled; if it is `home`, nothing is moved.
          home: the policy's mesh, where responses are returned.
          frozen: the base, which is moved to `mesh` now, and for a recipe that samples
            from a mixture the reference.
          options: dtype of the parameters during sampling, and of keys and values.
        """
        check_pages(options, recipe=recipe, mesh=mesh)
        # The options of the cache apply to sampling only, not to the trainer's model.
        recipe = dataclasses.replace(recipe, model=options.sampled(recipe.model))
        self._sample = jax.jit(
            functools.partial(sharding.on(mesh, iteration.sample), recipe=recipe)
        )
        self._mesh, self._home = mesh, home
        self.threaded = threaded(mesh, home=home)
        self._store = None
        # Cast on the policy's mesh, so that fewer bytes are moved.
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

    def __call__(self, policy: Params, request: Request) -> Rollout:
        """Draws responses and returns them on the policy's mesh; asynchronous.

        Parameters are cast and resharded once, and freed after the last token.
        """
        if self._store is not None:
            policy = sharding.place(self._store(policy), mesh=self._mesh)
        return self.draw(policy, request)

    def follow(self, reference: Frozen) -> None:
        """Sets the current reference, for a recipe that samples from a mixture."""
        self._frozen = dataclasses.replace(self._frozen, reference=reference)

    def hand_over(self, policy: Params) -> Params:
        """Returns parameters for `draw`, cast and resharded; donating `policy` is safe.

        On devices of the policy they are a full copy.
        """
        if self._store is not None:
            policy = self._store(policy)
        elif not set(self._mesh.devices.flat).isdisjoint(self._home.devices.flat):
            policy = jax.tree.map(lambda leaf: jnp.array(leaf, copy=True), policy)
        return sharding.place(policy, mesh=self._mesh)

    def draw(self, policy: Params, request: Request) -> Rollout:
        """Draws responses as `__call__`, from parameters of `hand_over`."""
        return self.bring_home(self.draw_there(policy, request))

    def draw_there(self, policy: Params, request: Request) -> Rollout:
        """Draws the responses of `draw`, and leaves them on the sampler's mesh."""
        if self._mesh is not self._home:
            prompts = row_sharding.put_rows(request.prompts, mesh=self._mesh)
            others = policy, request.key, request.version
            policy, key, version = sharding.place(others, mesh=self._mesh)
            request = Request(prompts, key, version)
        return self._sample(
            policy,
            prompts=request.prompts,
            key=request.key,
            frozen=self._frozen,
            version=request.version,
        )

    def bring_home(self, rollout: Rollout) -> Rollout:
        """Moves responses of `draw_there` to the policy's mesh."""
        if self._mesh is self._home:
            return rollout
        return row_sharding.put_rows(rollout, mesh=self._home)

    def stats(self) -> Stats:
        """Returns no statistics: the trainer has all of its figures."""
        return {}

    def seconds(self) -> dict[str, float]:
        """Returns no waits: the sampler runs on the trainer's own devices."""
        return {}

    def summary(self) -> dict[str, Any]:
        """Returns no figures for the summary."""
        return {}


def check_pages(options: Here, *, recipe: PolicyGradient, mesh: Mesh) -> None:
    """Raises InputError if pages of keys and values cannot be placed on a mesh."""
    pages, size = options.cache_pages, options.page_size
    if pages is None:
        return
    places = recipe.continuous_batching
    assert places is not None  # the config requires it for pages
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
    # The shortest prompt has one token, and a response's last token is not cached.
    from rlhf_jax.models.generation.page_table import pages_of

    least = pages_of(recipe.max_new_tokens, size=size) * shares
    checks.within(
        least=least,
        advice=f"a response of {recipe.max_new_tokens} tokens may take "
        f"{least // shares} pages of {size} columns; give more, or leave it out",
        **{"cache_pages of --sampler": pages},
    )


def make_sampler(
    config: PolicyGradientConfig,
    models: Models,
    *,
    meshes: Meshes,
    stack: contextlib.ExitStack,
) -> Sampler | OutsideSampler:
    """Makes the sampler of a run; one outside the trainer ends with `stack`."""
    options, recipe = config.sampler.sampler, models.recipe
    if isinstance(options, Here):
        # The programs of episodes have their own copy of the base.
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
    # Imported here and below because few runs need them.
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
    outside = OutsideSampler(
        made[0] if made else None,
        home=meshes.policy,
        max_new_tokens=recipe.max_new_tokens,
        record=recipe.routing_record,
        merge=merge,
        retries=retries,
        # The check of a server's hand-over runs on the policy's devices, where programs
        # of two threads could deadlock.
        threaded=jax.process_count() == 1
        and (isinstance(options, Process) or meshes.policy.devices.size == 1),
    )
    return stack.enter_context(outside)


def _outside(
    config: PolicyGradientConfig,
    recipe: PolicyGradient,
    *,
    options: Process | Server,
    retries: Retries,
    meshes: Meshes,
) -> OutsideProtocol:
    """Makes the sampler that runs in a process or on a server."""
    if isinstance(options, Process):
        from rlhf_jax.samplers.process import ProcessSampler

        return ProcessSampler(recipe, weights=options.weights, timeout=options.timeout)
    from rlhf_jax.samplers.server import ServerSampler

    mesh = meshes.policy
    if jax.process_count() > 1:  # a program on all devices would wait for all processes
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
    """Merges adapters into the base for outside samplers: f32 weights, on the mesh."""

    def of_base(policy: Any, base: Frozen) -> Any:
        return merged(frozen.read(base), policy, lora=lora, rounded_to=jnp.float32)

    return functools.partial(jax.jit(sharding.on(mesh, of_base)), base=base)
