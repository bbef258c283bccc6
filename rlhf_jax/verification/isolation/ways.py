"""The ways to isolate a process that runs untrusted code.

    bubblewrap   own namespaces, by the program `bwrap`: the process sees its folder
                 and, read-only, what Python needs; no network, no other processes
    landlock     access to the same files only, by Landlock (`py-landlock`)
    none         resource limits alone, which are no security boundary

The first two add a seccomp filter (`pyseccomp`): no network, no new process, no signal
to another process. The first way that works is chosen; `none` only on request. Both
work on Linux 5.13, whereas `sandlock` needs 6.12. `py-landlock` confines the thread
that starts the process, which is faster than importing the package in the process.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import tempfile

WAYS = ("bubblewrap", "landlock", "none")
PACKAGE = "/code/rlhf_jax"  # where bubblewrap mounts the package
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INSIDE = "/box"  # where bubblewrap mounts the code's folder
# Files and folders that an interpreter reads.
SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
SYSTEM += ("/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/urandom")

CLONE_THREAD, F_SETOWN, F_SETOWN_EX = 0x10000, 8, 15
FIOSETOWN, SIOCSPGRP = 0x8901, 0x8902
# System calls that the filter refuses, as Landlock does not restrict them.
PROCESSES = "fork vfork execve execveat kill tkill tgkill rt_sigqueueinfo setpriority"
PROCESSES += " rt_tgsigqueueinfo pidfd_open pidfd_getfd pidfd_send_signal ptrace kcmp"
PROCESSES += " process_vm_readv process_vm_writev process_madvise process_mrelease"
PROCESSES += " sched_setscheduler sched_setattr sched_setparam sched_setaffinity"
PROCESSES += " ioprio_set migrate_pages move_pages get_robust_list"
NETWORK = "socket connect bind listen accept accept4 sendto io_uring_setup"
NETWORK += " io_uring_enter io_uring_register"
SHARED = "shmget shmat msgget msgsnd msgrcv semget semop mq_open mq_unlink mq_notify"
SHARED += " add_key request_key keyctl"
FILES = "chmod fchmod fchmodat fchmodat2 chown fchown lchown fchownat utime utimes"
FILES += " utimensat futimesat setxattr lsetxattr fsetxattr removexattr lremovexattr"
FILES += " fremovexattr setxattrat removexattrat truncate mknod mknodat chroot flock"
FILES += " name_to_handle_at open_by_handle_at fanotify_init file_setattr"
SYSTEMS = "mount umount2 pivot_root unshare setns open_tree move_mount fsopen fsmount"
SYSTEMS += " fsconfig fspick mount_setattr bpf perf_event_open userfaultfd quotactl"
SYSTEMS += " quotactl_fd acct swapon swapoff reboot sethostname setdomainname syslog"
SYSTEMS += " init_module finit_module delete_module kexec_load kexec_file_load iopl"
SYSTEMS += " ioperm modify_ldt settimeofday clock_settime clock_adjtime adjtimex"
SYSTEMS += " vhangup"
REFUSED = f"{PROCESSES} {NETWORK} {SHARED} {FILES} {SYSTEMS}".split()


def numpy_folder() -> str:
    """Returns the folder of the installed package numpy, "" if there is none."""
    spec = importlib.util.find_spec("numpy")
    origin = spec and spec.origin
    return os.path.dirname(os.path.realpath(origin)) if origin else ""


def python() -> str:
    """Returns the path of the interpreter outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def readable() -> list[str]:
    """Lists the paths that the process may read; no path is within another."""
    base, library = os.path.realpath(sys.base_prefix), os.path.dirname(os.__file__)
    numpy, libraries = numpy_folder(), [f"{base}/lib", f"{base}/lib64"]
    paths = [*SYSTEM, *libraries, python(), os.path.realpath(library)]
    paths += [numpy, f"{numpy}.libs"] if numpy else []
    needed: list[str] = []
    for path in sorted(filter(os.path.exists, paths)):
        if not any(path.startswith(f"{folder}/") for folder in needed):
            needed.append(path)
    return needed


def bubblewrap(folder: str) -> list[str]:
    """Returns the words that precede the command.

    Raises:
      OSError: the program `bwrap` is not installed.
    """
    program = shutil.which("bwrap", path="/usr/local/bin:/usr/bin:/bin")
    if program is None:
        raise OSError("there is no program bwrap")
    options = ["--unshare-all", "--die-with-parent", "--new-session"]
    options += ["--unshare-user", "--uid", "1000", "--gid", "1000", "--cap-drop", "ALL"]
    for path in readable():
        if os.path.islink(path):
            options += ["--symlink", os.readlink(path), path]
        else:
            options += ["--ro-bind", path, path]
    for device in DEVICES:
        options += ["--dev-bind", device, device]
    options += ["--ro-bind", f"{OURS}", f"{PACKAGE}/verification"]
    options += ["--bind", folder, INSIDE, "--remount-ro", "/"]
    return [program, *options, "--chdir", INSIDE, "--"]


def landlock(folder: str) -> None:
    """Confines this thread and the processes that it starts.

    They may write to `folder` and read the interpreter's files.

    Raises:
      OSError: the system has no Landlock. ImportError: `py-landlock` is not installed.
    """
    import py_landlock as library  # pyright: ignore[reportMissingImports]

    rights = library.AccessFs
    read = rights.READ_FILE | rights.EXECUTE  # which the filter forbids soon after
    try:
        rules = library.Landlock(strict=False)
        rules.add_path_rule(os.path.dirname(OURS), access=rights.READ_DIR)
        for path in [*readable(), OURS]:
            own = rights.READ_DIR if os.path.isdir(path) else rights(0)
            rules.add_path_rule(path, access=read | own)
        rules.add_path_rule(*DEVICES, access=rights.READ_FILE | rights.WRITE_FILE)
        rules.add_path_rule(folder, access=~rights(0))
        rules.apply()
    except library.LandlockError as error:
        raise OSError(f"{error}") from None


@functools.cache
def seccomp() -> bytes:
    """Returns the filter of system calls as a BPF program.

    Raises:
      OSError: libseccomp is missing. ImportError: `pyseccomp` is not installed.
    """
    try:
        import pyseccomp as library  # pyright: ignore[reportMissingImports]
    except RuntimeError as error:
        raise OSError(f"{error}") from None
    made = library.SyscallFilter(library.ALLOW)
    refused, lacks = library.ERRNO(1), library.ERRNO(38)
    for name in REFUSED:
        if library.resolve_syscall(library.Arch.NATIVE, name) >= 0:
            made.add_rule(refused, name)
    thread = library.Arg(0, library.MASKED_EQ, CLONE_THREAD, 0)
    made.add_rule(refused, "clone", thread)
    made.add_rule(lacks, "clone3")  # its flags cannot be read; libraries try clone next
    made.add_rule(refused, "prlimit64", library.Arg(0, library.NE, 0))
    for which in (F_SETOWN, F_SETOWN_EX):
        made.add_rule(refused, "fcntl", library.Arg(1, library.EQ, which))
    for which in (FIOSETOWN, SIOCSPGRP):
        made.add_rule(refused, "ioctl", library.Arg(1, library.EQ, which))
    with tempfile.TemporaryFile() as file:
        made.export_bpf(file)
        file.seek(0)
        return file.read()
