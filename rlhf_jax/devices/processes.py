"""Several processes as one run, each with its own devices (`jax.distributed`).

    rlhf-jax ppo ... --placement.policy data=4 \\
        --coordinator HOST:PORT --num-processes 2 --process-id 0      and 1 elsewhere

On TPU pods and under Slurm or Open MPI `--coordinator auto` replaces the other options.
All processes run the same program over the same files: each reads the whole data and
takes its own rows of every batch, all of them write a snapshot together, and only the
first one writes the rest of the run folder and prints. Without `--coordinator` there is
one process, and the functions here do nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import StopError, refuse

Array = jax.Array
AUTO = "auto"
LAST_WORDS = (
    "import sys; sys.stdin.buffer.read(1) or print(sys.argv[1], file=sys.stderr)"
)
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")  # of Linux, new at every start
ENDED = 10  # most seconds that a process that ends waits for the others to end


@dataclasses.dataclass(frozen=True)
class Group:
    """How the processes of a run find each other."""

    coordinator: str  # HOST:PORT of the first process, or AUTO
    num_processes: int | None = None
    process_id: int | None = None  # from 0
    join_timeout: int = 120  # seconds that the first process waits for the others
    heartbeat: int = 20  # seconds without a sign of life after which a process is lost

    def __post_init__(self) -> None:
        seconds = {"--join-timeout": self.join_timeout, "--heartbeat": self.heartbeat}
        checks.within(least=1, advice="give whole seconds", **seconds)
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        count, number = self.num_processes, self.process_id
        auto = self.coordinator == AUTO
        host, _, port = self.coordinator.rpartition(":")
        if not auto and (not host or not port.isdecimal()):
            yield (
                f"--coordinator: expected HOST:PORT of the first process, or auto, got "
                f"{self.coordinator!r}"
            )
        if (count is None) is not auto or (number is None) is not auto:
            yield (
                f"--coordinator {self.coordinator}: expected --num-processes and "
                f"--process-id with HOST:PORT, and neither with auto, which finds them "
                f"out on a TPU pod or Slurm; got {count} and {number}"
            )
        if count is not None and number is not None and not 0 <= number < count:
            yield (
                f"--process-id: expected 0 to {count - 1}, got {number}; number the "
                f"processes from 0"
            )

    def join(self) -> None:
        """Waits for the other processes; call it before any other use of JAX.

        If they do not start in time, JAX itself may end the process with its message.

        Raises:
          InputError: JAX cannot find or join the other processes.
        """
        try:
            jax.distributed.initialize(
                None if self.coordinator == AUTO else self.coordinator,
                self.num_processes,
                self.process_id,
                [] if _alone_on_host() else None,
                heartbeat_timeout_seconds=self.heartbeat,
                initialization_timeout=self.join_timeout,
            )
        except (RuntimeError, ValueError) as error:
            raise InputError(
                f"--coordinator {self.coordinator}: expected all processes to come "
                f"within {self.join_timeout} s (--join-timeout), got: "
                f"{str(error).splitlines()[0]}; start them all, or name HOST:PORT "
                f"where auto finds nothing"
            ) from error


def _alone_on_host() -> bool:
    """Whether Slurm or Open MPI has started one process per host.

    JAX gives each of their processes the one GPU with its number on the host. A single
    process should have all GPUs, which an empty list of device ids means.
    """
    names = ("SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")
    counts = [os.environ[name] for name in names if name in os.environ]
    chosen = "JAX_LOCAL_DEVICE_IDS" in os.environ  # by the user
    return not chosen and any(re.fullmatch(r"1(\(x\d+\))?", one) for one in counts)


def check_platform() -> None:
    """Starts JAX, with a short error message if its platform cannot be used.

    Raises:
      InputError: JAX_PLATFORMS names a missing platform, or no device of the default
        platform can be used.
    """
    try:
        jax.devices()
    except RuntimeError as error:
        message = next(iter(str(error).splitlines()), type(error).__name__)
        if platforms := os.environ.get("JAX_PLATFORMS"):
            raise InputError(
                f"JAX_PLATFORMS: expected platforms that JAX has here (cpu always), "
                f"got {platforms!r:.80} ({message:.200}); correct it, or unset it"
            ) from None
        raise InputError(
            f"expected a device that JAX can use, got: {message:.300}; free its memory "
            f"where another program has it, or set JAX_PLATFORMS=cpu"
        ) from None


def is_first() -> bool:
    """Whether this process writes the run folder and prints; True for a single one."""
    return jax.process_index() == 0


def gathered(value: Any) -> list[Any]:
    """A JSON value of every process, in all of them, in the order of their numbers."""
    if jax.process_count() == 1:
        return [value]
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    # The lengths first, as gathered arrays have one shape in all processes.
    sizes = np.asarray(multihost_utils.process_allgather(np.int32(len(data))))
    padded = np.pad(data, (0, int(sizes.max()) - len(data)))
    rows = np.asarray(multihost_utils.process_allgather(padded))
    return [json.loads(bytes(row[:n])) for row, n in zip(rows, sizes, strict=True)]


def from_first(text: str) -> str:
    """The text of the first process, in all of them."""
    return gathered(text if is_first() else "")[0]


def on_first(check: Callable[[], None]) -> None:
    """Runs a check in the first process; raises its InputError in all of them."""
    if jax.process_count() == 1:
        check()
        return
    message = ""
    if is_first():
        try:
            check()
        except Exception as error:  # any error must reach the others, which wait
            message = str(error) or type(error).__name__
    if message := from_first(message):
        raise InputError(message)


def on_each(check: Callable[[], None]) -> None:
    """Runs a check in every process; raises the first error in all of them.

    Raises:
      InputError, StopError: of the first process whose check raised one.
    """
    if jax.process_count() == 1:
        check()
        return
    failure = None
    try:
        check()
    except (InputError, StopError) as error:
        failure = isinstance(error, StopError), str(error)
    for stops, message in filter(None, gathered(failure)):
        raise (StopError if stops else InputError)(message)


def computed_by_first(compute: Callable[[], Any]) -> Any:
    """The result of the first process, in all of them: a user's function runs once.

    Args:
      compute: returns a JSON value; its errors are InputErrors in all processes.
    """
    if jax.process_count() == 1:
        return compute()
    results: list[Any] = []
    on_first(lambda: results.append(compute()))
    return gathered(results)[0][0]


def machines() -> list[int]:
    """A number for every process: those of one machine, in containers too, share it."""
    return gathered(zlib.crc32(BOOT_ID.read_bytes()))


def owners(where: NamedSharding | Mesh) -> set[int]:
    """The processes that have devices of a mesh."""
    mesh: Any = where if isinstance(where, Mesh) else where.mesh
    return {device.process_index for device in mesh.devices.flat}


@dataclasses.dataclass(frozen=True)
class Owned:
    """A NumPy array that some processes have; a leaf of `from_owners`."""

    value: Any  # None in the others
    owners: set[int]
    shape: tuple[int, ...]  # of the first owner's
    dtype: Any


def from_owners(tree: Any) -> Any:
    """The tree with values in place of `Owned`: elsewhere, that of the first owner.

    Every process calls this. What one process is the first to own travels together;
    nothing is sent where all processes are owners.
    """
    here, (leaves, structure) = jax.process_index(), jax.tree.flatten(tree)
    values = [leaf.value if isinstance(leaf, Owned) else leaf for leaf in leaves]
    sent: dict[int, dict[int, Owned]] = {}  # by first owner, by number of the leaf
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, Owned) and len(leaf.owners) < jax.process_count():
            sent.setdefault(min(leaf.owners), {})[number] = leaf
    for first, owned in sorted(sent.items()):
        own = {
            number: leaf.value if first == here else np.zeros(leaf.shape, leaf.dtype)
            for number, leaf in owned.items()
        }
        received = multihost_utils.broadcast_one_to_all(own, is_source=first == here)
        for number, leaf in owned.items():
            if here not in leaf.owners:
                values[number] = np.asarray(received[number])
    return jax.tree.unflatten(structure, values)


def agree(what: str, value: str) -> None:
    """Checks that every process has the same value.

    Raises:
      InputError: in all processes; lists those that differ from the first.
    """
    # A digest: processes exchange a few bytes, however long the config is.
    first, *digests = gathered(hashlib.sha256(value.encode()).hexdigest())
    others = [number for number, one in enumerate(digests, 1) if one != first]
    if others:
        raise InputError(
            f"expected {what} to be the same in every process, got another in process "
            f"{', '.join(map(str, others))} than in process 0; start all with the same "
            f"command and the same files"
        )


def wait() -> None:
    """Waits for every process; files that the first one wrote can then be read."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices("rlhf_jax")


def exit_with_others(status: int) -> NoReturn:
    """Ends this process, after waiting at most ENDED seconds for the others.

    JAX kills every process as soon as the first one is gone. So processes that end for
    the same reason each report it and end with their own status, the first one last.
    """
    from orbax.checkpoint import multihost  # takes 2 s to import

    meet = multihost.get_barrier_sync_fn()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another one still runs
        meet(key="exit", timeout_ms=1000 * ENDED)
    if is_first():
        time.sleep(1)
    os._exit(status)  # `sys.exit` would wait for the others


@contextlib.contextmanager
def last_words(text: str) -> Iterator[None]:
    """Prints the text if this process is killed inside the context.

    JAX kills a process that has lost another one, from its own thread and with a stack
    trace. A small helper process, whose input then ends, prints the explanation. A
    single process needs none.
    """
    if jax.process_count() == 1:
        yield
        return
    beside = subprocess.Popen(
        (sys.executable, "-S", "-c", LAST_WORDS, text),
        stdin=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C must not reach it
    )
    try:
        yield
    finally:
        beside.communicate(b"-")  # this process lives: the helper prints nothing


def local_devices(mesh: Mesh) -> list[Any]:
    """This process's devices of a mesh, in the mesh's order."""
    here = jax.process_index()
    return [device for device in mesh.devices.flat if device.process_index == here]


def in_turn(tree: Any) -> Any:
    """Returns the tree; with several processes on CPUs, waits until it is computed.

    For leaves that are computed one by one with collectives. XLA:CPU has few threads,
    and programs that wait for another process may take all of them, different programs
    in each process: a deadlock. Other devices run programs one after another, and this
    does not wait.
    """
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        return jax.block_until_ready(tree)
    return tree


def whole(tree: Any) -> Any:
    """Arrays as NumPy arrays with all elements in every process; waits for them.

    With several processes, every process calls this. Devices replicate one leaf at a
    time.
    """

    def read(leaf: Any) -> Any:
        where: Any = getattr(leaf, "sharding", None)
        if jax.process_count() == 1 or not isinstance(where, NamedSharding):
            return leaf
        if not leaf.is_fully_addressable and not leaf.is_fully_replicated:
            # Devices replicate it, as no host can read another's shards.
            leaf = jax.device_put(leaf, NamedSharding(where.mesh, PartitionSpec()))
        mine = None
        if leaf.is_fully_addressable:
            mine = np.asarray(leaf)
        elif leaf.addressable_shards:
            mine = np.asarray(leaf.addressable_data(0))
        return Owned(mine, owners(where), leaf.shape, leaf.dtype)

    return jax.device_get(from_owners(jax.tree.map(read, tree)))


class Vote:
    """Whether any process wants to stop: the same answer in all of them, a call late.

    The devices compute the answer after the current step, and it is read in the next
    call, like metrics: no step waits for it.
    """

    def __init__(self) -> None:
        self._pending: Array | None = None
        devices = np.array(jax.devices())
        self._rows = NamedSharding(Mesh(devices, ("device",)), PartitionSpec("device"))
        everywhere = NamedSharding(self._rows.mesh, PartitionSpec())
        self._any = jax.jit(lambda votes: votes.any(), out_shardings=everywhere)

    def __call__(self, vote: bool) -> bool:
        """Returns the answer of the last call; with one process, of this call."""
        if jax.process_count() == 1:
            return vote
        mine = np.full(jax.local_device_count(), vote)
        answer = self._any(jax.make_array_from_process_local_data(self._rows, mine))
        # Read a call later, when it is computed: stopping costs one step, waiting none.
        before, self._pending = self._pending, answer
        return before is not None and bool(np.asarray(before))
