"""Starts the process for generated code, apart from the system as far as that allows.

    namespaces   its own files, network, process numbers and shared memory: it sees what
                 Python needs, read-only, and a folder in memory with a limited size
    bubblewrap   the same by the program `bwrap`, but a folder on disk, which is watched
    none         resource limits, the audit hook and a watched folder alone

The first that works is taken. Namespaces are set up by system calls in a process that
is replaced by a fresh interpreter before any generated code is there.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys

from rlhf_jax.verification.code import values

TYPE_CHECKING = False  # as typing's, which takes long to import
if TYPE_CHECKING:
    from typing import Any, NoReturn

WAYS = ("namespaces", "bubblewrap", "none")
HERE = os.path.dirname(os.path.abspath(__file__))
BWRAP = ("/usr/local/bin/bwrap", "/usr/bin/bwrap", "/bin/bwrap")
# Runs the `main` of one of our modules, without what the package loads besides. The
# folder of the package is the first argument.
START = (
    "import sys; sys.modules['rlhf_jax'] = package = type(sys)('rlhf_jax'); "
    "package.__path__ = [sys.argv.pop(1)]; "
    "from {0} import main; main()"
)
INSIDE = "/work"  # the folder of the code, as it sees it
PACKAGE = "/code"  # where our own files are, as it sees them
FILES = 10_000  # files and folders that it may have at once
NOBODY = 65534
SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
OTHERS = ("/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/urandom")

# Numbers of the Linux interface, the same on all of its machines.
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 0x1000, 0x4000, 0x40000, 2
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
ALL = CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNET
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
READ_ONLY, NO_SUID, NO_DEVICES = 1, 2, 4
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_NO_NEW_PRIVS = 1, 4, 38


class Candidate:
    """A process that waits for generated code."""

    def __init__(self, requests: int, replies: int, way: str, why: str) -> None:
        self.requests, self.replies = requests, replies  # pipes to it, and from it
        self.way, self.why = way, why  # one of WAYS, and why it is none before that


class NotStarted(Exception):
    """Why there is no process."""


def start(settings: dict[str, Any]) -> Candidate:
    """A process, started the first way that works.

    Args:
      settings: `folder`, an empty one that the caller removes; `disk`, MiB; `ways` to
        try; `start`, what the interpreter runs; and what `runner` takes.

    Raises:
      NotStarted: not even the last way works.
    """
    reasons = []
    for way in settings["ways"]:
        to_read, requests = os.pipe()
        replies, to_write = os.pipe()
        if os.fork() == 0:
            _become(way, settings, to_read, to_write)
        os.close(to_read)
        os.close(to_write)
        try:
            answer = values.receive(replies)
        except EOFError:
            answer = "no interpreter starts there"
        if answer == "ready":
            return Candidate(requests, replies, way, "; ".join(reasons))
        os.close(requests)
        os.close(replies)
        reasons.append(f"{way}: {answer}")
    raise NotStarted("; ".join(reasons))


def hide_memory() -> None:
    """Other processes of this user may not read this one's memory."""
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        _call("prctl", PR_SET_DUMPABLE, 0, 0, 0, 0)


def _become(
    way: str, settings: dict[str, Any], requests: int, replies: int
) -> NoReturn:
    """In the new process: what was forked becomes the one for the code."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        for open_file in range(3, 256):
            if open_file not in (requests, replies):
                with contextlib.suppress(OSError):
                    os.close(open_file)
        os.set_inheritable(requests, True)
        os.set_inheritable(replies, True)
        _die_with_parent()
        package = os.path.dirname(os.path.dirname(HERE))  # the folder of rlhf_jax
        if way == "namespaces":
            _enter_namespaces(settings["disk"])
            _fork_inside(requests, replies)
            package = PACKAGE
        elif way == "bubblewrap":
            program = next(filter(os.path.exists, BWRAP), None)
            if program is None:
                raise OSError("there is no program bwrap")
            start = _interpreter(PACKAGE, requests, replies, settings)
            os.execve(program, [program, *_bubblewrap(settings["folder"]), *start], {})
        else:
            os.chdir(settings["folder"])
            _leave_the_network()
        start = _interpreter(package, requests, replies, settings)
        os.execve(start[0], start, {})
    except BaseException as error:
        with contextlib.suppress(BaseException):
            values.send(replies, f"{error}"[:200])
    finally:
        os._exit(1)


def _interpreter(
    package: str, requests: int, replies: int, settings: dict[str, Any]
) -> list[str]:
    numbers = [requests, replies, *(settings[n] for n in ("seconds", "memory"))]
    words = [package, *map(str, numbers), str(settings["file_size"])]
    return [_python(), "-I", "-S", "-B", "-X", "utf8", "-c", settings["start"], *words]


def _python() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def _needed() -> list[str]:
    """Files and folders that an interpreter reads; none is within another."""
    base = os.path.realpath(sys.base_prefix)
    paths = [*SYSTEM, *OTHERS, f"{base}/lib", f"{base}/lib64", _python()]
    paths.append(os.path.realpath(os.path.dirname(os.__file__)))
    needed: list[str] = []
    for path in sorted(filter(os.path.exists, paths)):
        if not any(path.startswith(f"{folder}/") for folder in needed):
            needed.append(path)
    return needed


def _bubblewrap(folder: str) -> list[str]:
    options = ["--unshare-all", "--die-with-parent", "--new-session"]
    options += ["--unshare-user", "--uid", "1000", "--gid", "1000"]
    options += ["--cap-drop", "ALL"]
    for path in _needed():
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--ro-bind", path, path]
    for device in DEVICES:
        options += ["--dev-bind", device, device]
    options += ["--ro-bind", HERE, f"{PACKAGE}/verification/code"]
    options += ["--bind", folder, INSIDE, "--remount-ro", "/"]
    return [*options, "--chdir", INSIDE, "--"]


@functools.cache
def _libc() -> Any:
    import ctypes  # not before the fork: the judge has no use for it by then

    return ctypes.CDLL(None, use_errno=True)


def _call(name: str, *args: Any) -> None:
    """A function of the C library; OSError with its name if it fails."""
    import ctypes

    argv = [arg.encode() if isinstance(arg, str) else arg for arg in args]
    whole = [ctypes.c_ulong(a) if isinstance(a, int) and a >= 0 else a for a in argv]
    if getattr(_libc(), name)(*whole) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not on Linux
        _call("prctl", PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _leave_the_network() -> None:
    for flags in (CLONE_NEWNET, CLONE_NEWNET | CLONE_NEWUSER):
        with contextlib.suppress(OSError, AttributeError):
            _call("unshare", flags)
            break


def _enter_namespaces(disk: int) -> None:
    """This process, in a file system of its own; what it forks is the first of its own.

    As root it needs no user namespace, and the code becomes `NOBODY` instead.
    """
    user = os.geteuid()
    try:
        if user != 0:
            raise PermissionError
        _call("unshare", ALL)
    except OSError:
        group = os.getegid()
        _call("unshare", ALL | CLONE_NEWUSER)
        _write("/proc/self/setgroups", b"deny")
        _write("/proc/self/uid_map", f"1000 {user} 1".encode())
        _write("/proc/self/gid_map", f"1000 {group} 1".encode())
    _call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
    # All that is to be seen, opened before the new root hides it.
    paths = _needed()
    needed = {path: os.open(path, os.O_PATH) for path in paths if _is_real(path)}
    devices = {path: os.open(path, os.O_PATH) for path in DEVICES}
    ours = os.open(HERE, os.O_PATH)
    links = {path: os.readlink(path) for path in paths if not _is_real(path)}
    root = "/tmp"
    _call("mount", "none", root, "tmpfs", NO_SUID, "size=4m,mode=755")
    for path, opened in (*needed.items(), *devices.items()):
        _bind(opened, root + path, devices=path in devices)
    for path, target in links.items():
        os.makedirs(os.path.dirname(root + path), exist_ok=True)
        os.symlink(target, root + path)
    _bind(ours, f"{root}{PACKAGE}/verification/code", devices=False)
    os.mkdir(root + INSIDE)
    size = f"size={int(disk * 2**20)},nr_inodes={FILES},mode=1777"
    _call("mount", "none", root + INSIDE, "tmpfs", NO_SUID | NO_DEVICES, size)
    os.chdir(root)
    _call("pivot_root", ".", ".")
    _call("umount2", ".", MNT_DETACH)
    _attributes("/", READ_ONLY | NO_SUID, deep=False)
    os.chdir(INSIDE)


def _write(path: str, content: bytes) -> None:
    with open(path, "wb") as file:
        file.write(content)


def _is_real(path: str) -> bool:
    return not os.path.islink(path)


def _bind(opened: int, to: str, *, devices: bool) -> None:
    os.makedirs(os.path.dirname(to), exist_ok=True)
    if os.path.isdir(f"/proc/self/fd/{opened}"):
        os.mkdir(to)
    else:
        _write(to, b"")
    _call("mount", f"/proc/self/fd/{opened}", to, None, MS_BIND | MS_REC, None)
    os.close(opened)
    if not devices:
        _attributes(to, READ_ONLY | NO_SUID | NO_DEVICES, deep=True)


def _attributes(path: str, attributes: int, *, deep: bool) -> None:
    """mount_setattr(2), of Linux 5.12: for all that is mounted below as well."""
    import ctypes

    changed = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    flags = AT_RECURSIVE if deep else 0
    size = ctypes.sizeof(changed)
    _call("syscall", MOUNT_SETATTR, AT_FDCWD, path, flags, changed, size)


def _fork_inside(requests: int, replies: int) -> None:
    """Returns in the first process of the new namespace, without any privilege."""
    first = os.fork()
    if first != 0:
        os.close(requests)
        os.close(replies)
        os.waitpid(first, 0)
        os._exit(0)
    os.setsid()
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    _die_with_parent()  # again: a change of user forgets it
    _call("prctl", PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
