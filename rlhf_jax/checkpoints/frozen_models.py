"""Frozen models from checkpoints, and the options that say how they are held.

A reference and a reward model are held in the same ways: `Storage` is a group of
options, `--reference-storage.dtype int8` on the command line.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.checkpoints import hf
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import tokenization
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import ONE_DEVICE, MeshOption, MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import layout
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference import frozen, storage
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any


@dataclasses.dataclass(frozen=True)
class Storage:
    """How a frozen model is held."""

    dtype: Literal["float32", "bfloat16", "float16", "int8"] = "float32"
    """Of its parameters; int8 has a scale for every channel."""
    embeddings: Literal["float32", "bfloat16", "float16"] | None = None
    """Dtype of embeddings and output head beside int8; None is int8 too."""
    memory: Literal["device", "pinned_host", "cpu"] = "device"
    """pinned_host streams it a layer at a time; cpu runs it on the host."""
    mesh: MeshOption | None = None
    """Another mesh over the policy's devices, or its own; None is the policy's."""
    own_devices: bool = False
    """Its mesh is over the last devices, which --mesh leaves free."""

    def __post_init__(self) -> None:
        if self.embeddings is not None and self.dtype != "int8":
            raise InputError(
                f"embeddings: expected None where dtype is {self.dtype}, got "
                f"{self.embeddings}; they have a dtype of their own beside int8 only"
            )

        if self.memory == "cpu" and (self.mesh is not None or self.own_devices):
            raise InputError(
                "memory: expected device or pinned_host with a mesh or own_devices, "
                "got cpu; leave one or the other out"
            )

    @property
    def apart(self) -> bool:
        """Whether it is placed apart from the policy, so that no program reads both."""
        return self.memory == "cpu" or self.own_devices or self.mesh is not None

    @property
    def num_own(self) -> int:
        """Devices that are its own."""
        return self._shape.size if self.own_devices else 0

    @property
    def _shape(self) -> MeshShape:
        return ONE_DEVICE if self.mesh is None else self.mesh

    def shapes(self, params: Params) -> Params:
        """What a copy has, of the shapes of parameters; nothing is allocated."""
        store = functools.partial(
            storage.store, dtype=self.dtype, embeddings=self.embeddings
        )
        return jax.eval_shape(store, params)

    def mesh_beside(self, policy: Mesh) -> Mesh | None:
        """How a copy is sharded beside a policy; None is the host's memory.

        Raises:
          InputError: as `MeshShape.make`.
        """
        if self.memory != "device":
            return None
        if not self.apart:
            return policy
        return self._shape.make(self._devices(policy.devices.flat))

    def _devices(self, policy: Iterable[Any]) -> list[Any]:
        """The devices of a copy that is placed apart from a policy on these devices."""
        if self.own_devices:
            return jax.devices()[-self.num_own :]
        return sorted(policy, key=lambda device: device.id)

    def freeze(self, params: Params) -> Frozen:
        """A copy of the parameters, held in this way.

        Raises:
          InputError: as `storage.store`, there is no CPU beside the accelerator, or the
            mesh does not fit the devices.
        """
        return frozen.freeze(
            params,
            dtype=self.dtype,
            embeddings=self.embeddings,
            memory="pinned_host" if self.memory == "pinned_host" else None,
            sharding=self._sharding(params),
        )

    def _sharding(self, params: Params) -> Any:
        if self.memory == "cpu":
            return _on_cpu()
        if not self.apart:
            return None
        held = jax.tree.leaves(params)[0].sharding.device_set
        devices = self._devices(held)
        if self.own_devices and not held.isdisjoint(devices):
            raise InputError(
                f"own_devices: expected the last {self.num_own} of "
                f"{jax.device_count()} devices to be free, got a policy on "
                f"{len(held)}; make either mesh smaller"
            )
        return sharding.shardings(params, mesh=self._shape.make(devices))


COPY = Storage()  # in float32, where it was read


def policy_mesh(shape: MeshShape, *, taken: int = 0) -> Mesh:
    """The policy's mesh: over all devices but the last ones, which others have taken.

    Raises:
      InputError: as `MeshShape.make`, or some are taken and there are several
        processes, none of which could copy to all of them.
    """
    if taken and jax.process_count() > 1:
        raise InputError(
            f"expected one process where models have devices of their own, got "
            f"{jax.process_count()}; share the devices, or leave out --coordinator"
        )
    if taken >= jax.device_count():
        raise InputError(
            f"expected more than the {taken} devices that models have as their own, "
            f"got {jax.device_count()}; make their meshes smaller, or share the devices"
        )
    return shape.make(jax.devices()[: jax.device_count() - taken])


def _on_cpu() -> SingleDeviceSharding:
    if jax.process_count() > 1:
        raise InputError(
            f"memory: expected device or pinned_host with several processes, got cpu "
            f"with {jax.process_count()}; choose one of them"
        )
    try:
        return SingleDeviceSharding(jax.devices("cpu")[0])
    except RuntimeError as error:
        raise InputError(
            f"memory: expected cpu among the platforms of JAX, got "
            f"{jax.default_backend()} alone; unset JAX_PLATFORMS or add cpu to it, or "
            f"choose device or pinned_host"
        ) from error


def run_beside(
    program: Callable[[Rollout], Array], model: Frozen, rollout: Rollout
) -> Array:
    """A frozen model's program on the devices that hold it; asynchronous throughout.

    Args:
      program: takes the rollout there, returns [B, ...].

    Returns:
      What it returns, back beside the rollout.
    """
    there = program(frozen.beside(model, rollout))
    return jax.device_put(there, rollout.index.sharding)  # of rows, whatever the rank


class RewardModel(NamedTuple):
    """A frozen reward model with its shape."""

    model: ModelConfig
    frozen: Frozen


def load_reference(
    path_or_repo_id: str | None,
    *,
    policy: Pretrained,
    storage: Storage,
    sharding: Any = None,
) -> Frozen:
    """The policy as it starts (None), or a checkpoint that can score its tokens.

    Args:
      sharding: where a checkpoint is read to, as `hf.load`.

    Raises:
      InputError: as `hf.load`, or the checkpoint has another shape or other token ids.
    """
    if path_or_repo_id is None:
        return storage.freeze(policy.params)
    model, params = hf.load(path_or_repo_id, dtype="float32", sharding=sharding)
    check_reference(path_or_repo_id, model=model, policy=policy.model)
    _check_ids(path_or_repo_id, policy=policy, role="reference")
    return storage.freeze(params)


def check_reference(name: str, *, model: ModelConfig, policy: ModelConfig) -> None:
    """InputError unless a reference of shape `model` scores the policy's rollouts.

    One program reads both, by the policy's compute dtype, attention, remat and layout.
    Every other field must be the policy's: the vocabulary, for one KL over the same
    tokens; the context, for the longest rollout; the rest, for drift and lifecycles to
    compare the two leaf by leaf.
    """
    wanted = dataclasses.asdict(policy)
    got = dataclasses.asdict(model.run_as(policy))
    differing = [
        f"{field} {got[field]} for {wanted[field]}"
        for field in wanted
        if got[field] != wanted[field]
    ]
    if differing:
        raise InputError(
            f"reference {name}: expected a model of the policy's shape, got "
            f"{', '.join(differing)}; take the checkpoint that the policy was trained "
            f"from, or leave it out for the policy as it starts"
        )


def load_reward_model(
    path_or_repo_id: str,
    *,
    policy: Pretrained,
    storage: Storage,
    sharding: Any = None,
) -> RewardModel:
    """A reward model, which must read the policy's tokens as they are.

    Args:
      sharding: where it is read to, as `hf.load`.

    Raises:
      InputError: as `hf.load_reward`, or its vocabulary is another.
    """
    model, params = hf.load_reward(path_or_repo_id, dtype="float32", sharding=sharding)
    if model.vocab_size < policy.model.vocab_size:
        raise InputError(
            f"reward model {path_or_repo_id}: expected the policy's vocabulary of "
            f"{policy.model.vocab_size} ids, got {model.vocab_size}; train one on top "
            f"of this policy (reward_model.py)"
        )
    _check_ids(path_or_repo_id, policy=policy, role="reward model")
    # A critic that is trained from it takes this shape, and how it computes with it.
    ours = policy.model
    model = dataclasses.replace(
        model, dtype=ours.dtype, remat=ours.remat, attention=ours.attention
    )
    return RewardModel(layout.fastest(model), storage.freeze(params))


def _check_ids(path_or_repo_id: str, *, policy: Pretrained, role: str) -> None:
    ids = policy.tokenizer.get_vocab()
    try:
        read = tokenization.load_tokenizer(path_or_repo_id).get_vocab()
    except InputError:  # it came without one: the sizes must do
        return
    if not ids.items() <= read.items():
        raise InputError(
            f"{role} {path_or_repo_id}: expected the policy's tokenizer, got one that "
            f"gives other ids; both must read the same tokens, so take one that was "
            f"trained on top of this policy or of its ancestor"
        )
