"""Placement of roles: on which devices, over which mesh, in which memory.

    placement = Placement(
        policy=MeshShape(data=2, fsdp=2), critic=Place.parse("last:data=2")
    )
    mesh = placement.policy_mesh()                      # of the first four of six
    critic_mesh = placement.critic.mesh_beside(mesh)    # of the last two

A role other than the policy is at one of these places:

| value | devices | mesh | memory |
|---|---|---|---|
| `policy` | the policy's | the policy's | device |
| `tensor=8` | the policy's | its own | device |
| `last`, `last:data=2` | the last, which the policy leaves free | its own | device |
| `hosts:data=8` | all of the last processes | its own | device |
| `cpu` | the host's processor | none | the host's |

With several processes, each gives equally many of its last devices; `hosts` takes whole
processes instead. Roles on the last devices, or on hosts, share them.

A sampler may also be at `auto`: before a run begins, this becomes the mesh over the
policy's devices on which a token takes the least time (`train/rollouts/fastest.py`).

`@pinned_host` after one of the first three keeps parameters in pinned host memory, from
which they are streamed a layer at a time; alone it means `policy@pinned_host`.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import jax
from jax.sharding import Mesh, SingleDeviceSharding

from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import ONE_DEVICE, MeshOption, MeshShape, one_word
from rlhf_jax.functional.errors import InputError, located, refuse

Params = Any
FORMS = "policy, AXIS=SIZE,..., last, last:AXIS=SIZE,..., hosts:AXIS=SIZE,..., cpu"
LAST = ("last", "hosts")  # devices that the policy leaves free
PINNED = "pinned_host"


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a role other than the policy is."""

    devices: Literal["policy", "last", "hosts", "cpu", "auto"] = "policy"
    """Devices: policy, those of the policy; last, the last ones, which the policy
    leaves free; hosts, all devices of the last processes; cpu, the host's; auto, the
    policy's with the fastest mesh to sample."""
    mesh: MeshShape | None = None
    """Mesh over these devices; None is the policy's mesh, or only the last device."""
    memory: Literal["device", "pinned_host"] = "device"
    """Memory that keeps the parameters of a frozen model."""

    def __post_init__(self) -> None:
        alone = self.devices in ("cpu", "auto")
        if alone and (self.mesh is not None or self.memory == PINNED):
            raise InputError(
                f"place: expected {self.devices} alone, which has neither a mesh nor "
                f"another memory, got {self}; leave one or the other out"
            )
        if self.devices == "last" and self.mesh == ONE_DEVICE:
            # Equal places must have equal records, as a resume compares them.
            object.__setattr__(self, "mesh", None)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses a text such as "policy", "last:data=2" or "cpu".

        Raises:
          InputError: The text has another form, or its mesh is wrong.
        """
        whole = f"policy@{PINNED}" if text.strip() == PINNED else text.strip()
        where, at, memory = whole.partition("@")
        place_memory: Any = PINNED if at else "device"
        devices, colon, axes = where.partition(":")
        if not at or memory == PINNED:
            if where in ("policy", "last", "cpu", "auto"):
                return cls(where, memory=place_memory)
            if not colon and "=" in where:
                return cls("policy", MeshShape.parse(where), place_memory)
            if colon and devices in LAST:
                return cls(devices, MeshShape.parse(axes), place_memory)
        raise InputError(
            f"place: expected {FORMS} or, of a sampler, auto, got {text!r}; @{PINNED} "
            f"may follow"
        )

    def __str__(self) -> str:
        where = self.devices
        if self.mesh is not None:
            where = f"{where}:{self.mesh}" if where in LAST else str(self.mesh)
        return where if self.memory == "device" else f"{where}@{self.memory}"

    @property
    def apart(self) -> bool:
        """Whether no program can read both this role's arrays and the policy's."""
        return self.devices not in ("policy", "auto") or self.mesh is not None

    @property
    def num_last(self) -> int:
        """Number of last devices that the role takes."""
        return self._shape.size if self.devices in LAST else 0

    @property
    def _shape(self) -> MeshShape:
        return ONE_DEVICE if self.mesh is None else self.mesh

    def mesh_beside(self, policy: Mesh) -> Mesh | None:
        """The mesh that programs of this role run on; None is the host's processor."""
        if self.devices == "cpu":
            return None
        if not self.apart:
            return policy
        if self.devices == "hosts":
            return self._shape.make(split_hosts(jax.devices(), last=self.num_last)[1])
        if self.devices == "last":
            return self._shape.make(split(jax.devices(), last=self.num_last)[1])
        return self._shape.make(
            sorted(policy.devices.flat, key=lambda device: device.id)
        )

    def memory_mesh(self, policy: Mesh) -> Mesh | None:
        """The mesh whose memory keeps the parameters; None is the host's memory."""
        return None if self.memory == PINNED else self.mesh_beside(policy)

    def sharding(self, params: Params, *, policy: Mesh | None) -> Any:
        """Shardings for a copy of parameters that are on the policy's mesh.

        Returns:
          A tree like `params`, one sharding for all leaves, or None to keep the
          sharding of the parameters.

        Raises:
          InputError: the mesh does not fit the devices, or JAX has no CPU platform
            besides the accelerator.
        """
        if self.devices == "cpu":
            return _host()
        if not self.apart:
            return None
        assert policy is not None
        return sharding.shardings(params, mesh=self.mesh_beside(policy))


def _host() -> SingleDeviceSharding:
    if jax.process_count() > 1:
        raise InputError(
            f"place: expected devices of an accelerator with several processes, got "
            f"cpu with {jax.process_count()}; choose another place"
        )
    try:
        return SingleDeviceSharding(jax.devices("cpu")[0])
    except RuntimeError as error:
        raise InputError(
            f"place: expected cpu among the platforms of JAX, got "
            f"{jax.default_backend()} alone; unset JAX_PLATFORMS or add cpu to it, or "
            f"choose another place"
        ) from error


def split(devices: Sequence[Any], *, last: int) -> tuple[list[Any], list[Any]]:
    """Splits off the `last` last devices, equally many of every process.

    So every process runs programs of every role, reads their results, and has rows.

    Raises:
      InputError: the number of processes does not divide `last`.
    """
    of_process = _of_process(devices)
    share, rest = divmod(last, len(of_process))
    if rest:
        raise InputError(
            f"place: expected a number of last devices that the {len(of_process)} "
            f"processes divide, as each gives as many, got {last}; change its mesh"
        )
    first, others = [], []
    for own in of_process.values():
        first += own[: len(own) - share]
        others += own[len(own) - share :]
    return first, others


def split_hosts(devices: Sequence[Any], *, last: int) -> tuple[list[Any], list[Any]]:
    """Splits off all devices of the last processes, which together have `last`.

    Raises:
      InputError: there is one process, no whole processes have together `last` devices
        and leave one to the policy, or a part is a single device.
    """
    of_process = _of_process(devices)
    if len(of_process) == 1:
        raise InputError(
            "place: expected several processes with hosts, got one; write last for "
            "last devices of this process"
        )
    first, others = dict(sorted(of_process.items())), []
    while len(first) > 1 and len(others) < last:
        others = first.popitem()[1] + others
    if len(others) != last:
        sizes = sorted({len(own) for own in of_process.values()})
        raise InputError(
            f"place: expected hosts with a mesh over all devices of the last processes "
            f"(at most {len(of_process) - 1}, of {' or '.join(map(str, sizes))} each), "
            f"got {last} devices; change its mesh, or write last"
        )
    policy = [device for own in first.values() for device in own]
    if 1 in (len(policy), len(others)):
        # Processes without it crash in XLA when they repeat its programs.
        raise InputError(
            f"place: expected hosts of two or more devices, for the policy and for "
            f"other roles, got {len(policy)} and {len(others)}; use more devices, or "
            f"place all roles with the policy"
        )
    return policy, others


def _of_process(devices: Sequence[Any]) -> dict[int, list[Any]]:
    """{process: its devices}."""
    of_process: dict[int, list[Any]] = {}
    for device in devices:
        of_process.setdefault(device.process_index, []).append(device)
    return of_process


WITH_POLICY = Place()
AUTO = Place("auto")
PlaceOption = Annotated[Place, one_word(Place, metavar="PLACE")]
"""A Place as one option of a command line."""


def refuse_auto(place: Place, *, option: str) -> None:
    """Raises InputError for a role at `auto` that is not a sampler."""
    if place == AUTO:
        raise InputError(
            f"{option}: expected {FORMS}, got auto, which is for a sampler; name a "
            f"place"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyPlacement:
    """Where the policy, or any other trained model, is; all other roles are with it."""

    policy: MeshOption = ONE_DEVICE
    """Mesh of the model that is trained, for example data=2,fsdp=4. Its axes multiply
    to the number of devices that no other role takes; 1 is the first device."""

    def places(self) -> dict[str, Place]:
        """The roles other than the policy, each with its place."""
        names = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in names if name != "policy"}

    def policy_mesh(self, *, further: Mapping[str, Place] | None = None) -> Mesh:
        """The mesh of the policy, over all devices but the last ones that roles take.

        Raises:
          InputError: a mesh does not fit the devices, JAX lacks the CPU that a role
            needs, or with several processes a role is on the CPU or takes a number of
            last devices that they do not divide.
        """
        places = {f"--placement.{role}": at for role, at in self.places().items()}
        places |= {} if further is None else further
        taken = max((place.num_last for place in places.values()), default=0)
        # The role with the most devices comes last: messages name it.
        by_size = sorted(places.items(), key=lambda item: item[1].num_last)
        of_roles = {place.devices: option for option, place in by_size}
        kinds = of_roles.keys() & {*LAST}
        if len(kinds) > 1:
            raise InputError(
                f"--placement: expected last for all roles, or hosts for all, got last "
                f"for {of_roles['last']} and hosts for {of_roles['hosts']}; change one"
            )
        if "last" in kinds and taken >= jax.device_count():
            raise InputError(
                f"--placement: expected at least {taken + 1} devices, of which roles "
                f"take the last {taken}, got {jax.device_count()}; make their meshes "
                f"smaller, or place them with the policy"
            )
        # The last devices go to other roles: those of the policy keep their order.
        apart = split_hosts if "hosts" in kinds else split
        with located(of_roles[kinds.pop()] if kinds else "--placement"):
            free, _ = apart(jax.devices(), last=taken)
        with located("--placement.policy"):
            mesh = self.policy.make(free)
        for option, place in places.items():  # before any weights are read
            with located(option):
                place.mesh_beside(mesh)
                if place.devices == "cpu":
                    _host()
        count = len(free)
        if mesh.size < count and jax.default_backend() != "cpu":  # a CPU's are virtual
            print(
                f"note: the policy is on {mesh.size} of {count} devices, as "
                f"--placement.policy is 1; data={count} or fsdp={count} takes all, "
                f"with a --batch-size that {count} divides",
                file=sys.stderr,
            )
        return mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferencePlacement(PolicyPlacement):
    """Where the policy and the frozen reference are."""

    reference: PlaceOption = WITH_POLICY
    """Place of the reference: policy, a mesh such as tensor=8 over the policy's
    devices, last or last:MESH for the last devices, hosts:MESH for those of the last
    processes, or cpu; @pinned_host after it, or alone, keeps the reference in host
    memory."""

    def __post_init__(self) -> None:
        for role, place in self.places().items():
            if role != "sampler":
                refuse_auto(place, option=f"--placement.{role}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutPlacement(ReferencePlacement):
    """Where the policy, sampler, reference and reward model are."""

    sampler: PlaceOption = AUTO
    """Place of the sampler: policy; a mesh such as data=2,tensor=4 over the policy's
    devices, to which parameters are resharded once per iteration; last:MESH or
    hosts:MESH, which samples the next responses while the policy trains on these, one
    step off-policy; or auto, the mesh on which a token takes the least time."""
    reward: PlaceOption = WITH_POLICY
    """Place of the reward model, in the forms of --placement.reference."""

    def __post_init__(self) -> None:
        super().__post_init__()
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        mesh = self.sampler.mesh
        if (
            self.sampler.devices == "cpu"
            or self.sampler.memory == PINNED
            or (mesh is not None and mesh.context > 1)
        ):
            yield (
                f"--placement.sampler: expected policy, AXIS=SIZE,..., "
                f"last:AXIS=SIZE,... or hosts:AXIS=SIZE,... of data, fsdp and tensor, "
                f"got {self.sampler}; the other places are for frozen models, and a "
                f"token that is decoded has no columns to share: give context to data"
            )

    @property
    def samples_ahead(self) -> bool:
        """Whether the next responses are sampled while the policy trains on these."""
        return self.sampler.devices in LAST


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement(RolloutPlacement):
    """Where the policy, sampler, reference, reward model and critic are."""

    critic: PlaceOption = WITH_POLICY
    """Place of the critic and its optimizer: policy, or last:MESH or hosts:MESH, where
    it trains at the same time as the policy."""

    def _faults(self) -> Iterator[str]:
        yield from super()._faults()
        if (
            self.critic.apart and self.critic.devices not in LAST
        ) or self.critic.memory == PINNED:
            yield (
                f"--placement.critic: expected policy, last:AXIS=SIZE,... or "
                f"hosts:AXIS=SIZE,..., got {self.critic}; the other places are for "
                f"frozen models"
            )
