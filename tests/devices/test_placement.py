"""Placement of the roles: forms of a place, meshes over devices, and the table."""

import dataclasses
from typing import NamedTuple

import jax
import numpy as np
import pytest
import toys

from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import ONE_DEVICE, MeshShape
from rlhf_jax.devices.placement import (
    Place,
    Placement,
    ReferencePlacement,
    split,
    split_hosts,
)
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference import frozen
from rlhf_jax.runs import report

THIRDS = Place.parse("tensor=3")
TWO, FOUR = MeshShape(data=2), MeshShape(fsdp=4)
FORMS = {
    "policy": Place("policy", None, "device"),
    "fsdp=4": Place("policy", FOUR, "device"),
    "last": Place("last", None, "device"),
    "last:data=2": Place("last", TWO, "device"),
    "cpu": Place("cpu", None, "device"),
    "pinned_host": Place("policy", None, "pinned_host"),
    "policy@pinned_host": Place("policy", None, "pinned_host"),
    "fsdp=4@pinned_host": Place("policy", FOUR, "pinned_host"),
    "hosts:data=1,fsdp=4,tensor=1": Place("hosts", FOUR, "device"),
    "last:data=2@pinned_host": Place("last", TWO, "pinned_host"),
}


def axes(**sizes):
    """A mesh's axes by name, 1 by default; rarely used axes only if given."""
    shape = dataclasses.asdict(MeshShape(**sizes))
    few = {axis for axis in ("dcn", "expert") if axis not in sizes}
    return {axis: size for axis, size in shape.items() if axis not in few}


def ids(mesh):
    return [device.id for device in mesh.devices.flat]


@pytest.mark.parametrize("text", FORMS)
def test_a_place_is_read_and_written(text):
    place = Place.parse(text)
    assert place == FORMS[text]
    assert Place.parse(str(place)) == place


def test_one_place_has_one_record():
    """Otherwise a resume would refuse the run's own place."""
    assert Place.parse("last:data=1") == Place("last", ONE_DEVICE) == Place("last")
    assert str(Place("last", ONE_DEVICE)) == "last"
    # On the policy's devices a mesh of one is another place than the policy's.
    assert Place.parse("data=1") != Place()


@pytest.mark.parametrize(
    "text",
    [
        *("", "gpu", "own", "last:", "last:2", "first:data=2", "policy:data=2"),
        *("cpu@pinned_host", "cpu:data=2", "policy@device", "policy@", "data=0"),
        "pinned_host@pinned_host",
    ],
)
def test_another_form_is_refused(text):
    with pytest.raises(InputError, match=r"^(place|mesh)"):
        Place.parse(text)


def test_the_policy_has_all_devices_that_no_role_takes():
    assert ids(Placement().policy_mesh()) == [0]
    four = Placement(policy=FOUR, critic=Place.parse("last:data=4"))
    assert ids(four.policy_mesh()) == [0, 1, 2, 3]
    assert dict(four.policy_mesh().shape) == axes(fsdp=4)
    # Roles on the last devices share them: two of them take as many as the larger.
    shared = Placement(
        policy=MeshShape(data=6), critic=Place.parse("last"), sampler=Place("last", TWO)
    )
    mesh = shared.policy_mesh()
    assert ids(mesh) == [0, 1, 2, 3, 4, 5]
    assert ids(shared.critic.mesh_beside(mesh)) == [7]
    assert ids(shared.sampler.mesh_beside(mesh)) == [6, 7]


def test_devices_that_are_left_out_are_told(monkeypatch, capsys):
    Placement().policy_mesh()  # the devices of a CPU are virtual
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    Placement(policy=MeshShape(data=8)).policy_mesh()
    Placement(policy=MeshShape(data=6), reference=Place("last", TWO)).policy_mesh()
    assert capsys.readouterr().err == ""
    Placement(reference=Place("last", TWO)).policy_mesh()
    note = "note: the policy is on 1 of 6 devices, as --placement.policy is 1; data=6"
    assert capsys.readouterr().err.startswith(note)


def test_the_mesh_of_each_place():
    mesh = Placement(policy=FOUR, reference=Place("last", FOUR)).policy_mesh()
    assert Place().mesh_beside(mesh) is mesh
    tensor = Place.parse("tensor=4").mesh_beside(mesh)
    assert ids(tensor) == [0, 1, 2, 3]
    assert dict(tensor.shape) == axes(tensor=4)
    assert Place("cpu").mesh_beside(mesh) is None
    # Pinned parameters run on the devices and take none of their memory.
    pinned = Place.parse("last:data=2@pinned_host")
    assert ids(pinned.mesh_beside(mesh)) == [6, 7]
    assert pinned.memory_mesh(mesh) is None
    assert ids(Place.parse("last:data=2").memory_mesh(mesh)) == [6, 7]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": MeshShape(data=8), "critic": Place("last")}, "the 7 devices"),
        (
            {"critic": Place("last", MeshShape(data=8))},
            "at least 9 devices, of which roles take the last 8",
        ),
    ],
)
def test_devices_that_do_not_suffice(options, message):
    with pytest.raises(InputError, match=message):
        Placement(**options).policy_mesh()


@pytest.mark.parametrize("role", ["reference", "reward"])
def test_a_place_that_does_not_fit_is_told_by_its_option(role):
    """The error precedes any reading of weights: the policy's mesh comes first."""
    wide = Placement(
        policy=FOUR, critic=Place("last", FOUR), **{role: Place.parse("tensor=8")}
    )
    with pytest.raises(InputError, match=rf"^--placement.{role}: .* the 4 devices"):
        wide.policy_mesh()


def test_a_host_that_cannot_be_had_is_told_by_its_option(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    eight = ReferencePlacement(policy=MeshShape(data=8), reference=Place("cpu"))
    with pytest.raises(InputError, match=r"^--placement.reference: .* got cpu with 2"):
        eight.policy_mesh()


@pytest.mark.parametrize("text", ["cpu", "pinned_host", "last@pinned_host"])
def test_what_is_trained_or_samples_is_on_devices(text):
    place = Place.parse(text)
    with pytest.raises(InputError, match=r"--placement.critic: expected policy, last"):
        Placement(critic=place)
    with pytest.raises(InputError, match=r"--placement.sampler: expected policy, A"):
        Placement(sampler=place)
    with pytest.raises(InputError, match=r"(?s)\.sampler: .*\.critic: expected policy"):
        Placement(sampler=place, critic=place)


def test_a_sampler_may_have_a_mesh_over_the_policy_s_devices():
    place = Place.parse("data=2,tensor=4")
    with pytest.raises(InputError, match=r"--placement.critic: expected policy, last"):
        Placement(critic=place)
    placement = Placement(policy=MeshShape(fsdp=8), sampler=place)
    mesh = placement.policy_mesh()
    assert dict(placement.sampler.mesh_beside(mesh).shape) == axes(data=2, tensor=4)
    wrong = Placement(policy=MeshShape(fsdp=8), sampler=Place.parse("tensor=3"))
    with pytest.raises(InputError, match=r"^--placement.sampler: .*8 devices"):
        wrong.policy_mesh()
    assert not Placement(sampler=place).samples_ahead
    assert Placement(sampler=Place.parse("last")).samples_ahead


class Device(NamedTuple):
    id: int
    process_index: int


def test_processes_share_their_devices(monkeypatch):
    """Each process gives equally many of its last devices, in any device order."""
    devices = [Device(number, number // 4) for number in range(8)]
    for order in (devices, devices[::-1]):
        mine, last = (sorted(part) for part in split(order, last=4))
        if order is devices:
            assert [device.id for device in mine] == [0, 1, 4, 5]
            assert [device.id for device in last] == [2, 3, 6, 7]
        assert [device.process_index for device in last] == [0, 0, 1, 1]
    assert split(devices, last=0) == (devices, [])
    with pytest.raises(InputError, match=r"that the 2 processes divide, .* got 3"):
        split(devices, last=3)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    with pytest.raises(InputError, match="got cpu with 2"):
        Place("cpu").sharding({}, policy=None)


def test_roles_take_whole_processes():
    """The last ones, in any device order; the policy keeps the first."""
    devices = [Device(number, number // 4) for number in range(12)]
    for order in (devices, devices[::-1]):
        policy, hosts = split_hosts(order, last=8)
        assert sorted(device.id for device in policy) == [0, 1, 2, 3]
        assert sorted(device.id for device in hosts) == [4, 5, 6, 7, 8, 9, 10, 11]
    for wrong in (3, 6, 12):
        with pytest.raises(
            InputError, match=rf"most 2, of 4 each\), got {wrong} devices"
        ):
            split_hosts(devices, last=wrong)


def test_hosts_of_a_single_device_are_refused():
    devices = [Device(number, number) for number in range(3)]
    assert split_hosts([*devices, Device(3, 3)], last=2)[1][0].id == 2
    for last in (1, 2):
        with pytest.raises(InputError, match=f"got {3 - last} and {last}; use more"):
            split_hosts(devices, last=last)


def test_roles_on_hosts_and_on_last_devices_do_not_mix():
    both = {"critic": Place("last", TWO), "reference": Place("hosts", TWO)}
    got = "got last for --placement.critic and hosts for --placement.reference"
    with pytest.raises(InputError, match=got):
        Placement(policy=FOUR, **both).policy_mesh()
    # It is said also where there are fewer devices than both take.
    both["critic"] = Place("last", MeshShape(data=16))
    with pytest.raises(InputError, match=got):
        Placement(policy=FOUR, **both).policy_mesh()


@pytest.mark.parametrize("size", [2, 16])
def test_one_process_has_no_hosts_for_other_roles(size):
    place = Place("hosts", MeshShape(data=size))
    expected = "^--placement.critic: place: expected several processes with hosts, got "
    with pytest.raises(InputError, match=f"{expected}one; write last"):
        Placement(policy=FOUR, critic=place).policy_mesh()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("last:data=2@pinned_host", ("cpu 6-7, pinned_host", "data=2")),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("policy", ("cpu 0-3", "fsdp=4")),
                ("cpu", ("cpu 0", "none")),
                ("data=2,tensor=2", ("cpu 0-3", "data=2,tensor=2")),
                ("last", ("cpu 7", "none")),
                ("last:fsdp=2,tensor=2", ("cpu 4-7", "fsdp=2,tensor=2")),
                ("pinned_host", ("cpu 0-3, pinned_host", "fsdp=4")),
            )
        ),
    ],
)
def test_a_frozen_copy_is_where_its_place_says(text, expected):
    """It is on the devices, sharded by the rules, with equal numbers."""
    four = ReferencePlacement(policy=FOUR, reference=Place("last", FOUR))
    mesh, place = four.policy_mesh(), Place.parse(text)
    params = sharding.place(toys.params(), mesh=mesh)
    copy = Storage().freeze(params, place=place, policy=mesh)
    assert report.cells(copy.stored) == expected
    assert frozen.fingerprint_of(copy) == frozen.fingerprint_of(
        frozen_models.COPY.freeze(params)
    )
    if place.devices != "cpu":
        leaf, shape = jax.tree.leaves(copy.stored)[0], place.mesh_beside(mesh)
        leaf = getattr(leaf, "held", leaf)
        assert leaf.sharding.mesh == shape


def test_the_table_shows_devices_that_are_not_neighbours():
    devices = np.array(jax.devices())[[1, 3, 4]]
    mesh = jax.sharding.Mesh(devices, ("data",))
    assert report.mesh_cells(mesh) == ("cpu 1,3,4", "data=3")
    assert report.mesh_cells(ONE_DEVICE.make()) == ("cpu 0", "none")
    assert report.cells({"w": jax.ShapeDtypeStruct((2,), "float32")}) == (
        "none",
        "none",
    )
