"""How a process for code that is not trusted is set apart from the system.

    bubblewrap   namespaces of its own by the program `bwrap`: it sees what Python
                 needs, read-only, and its folder; no network, no other processes
    landlock     the same files by Landlock (`py-landlock`)
    none         limits of the system alone, which are no security boundary

Either has a seccomp filter (`pyseccomp`): no network, no new process, no signal to
another. The first that works is taken, and `none` only where it is asked for. Both need
Linux 5.13, where `sandlock` needs 6.12. `py-landlock` confines the thread that starts
the process, which starts faster than if it loaded the package itself.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import shutil
import sys
import tempfile

WAYS = ("bubblewrap", "landlock", "none")
PACKAGE = "/code/rlhf_jax"  # where our own files are, as bubblewrap shows them
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INSIDE = "/box"  # the folder of the code, as bubblewrap shows it
# Files and folders that an interpreter reads.
SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
SYSTEM += ("/etc/ld.so.cache", "/usr/share/zoneinfo")
DEVICES = ("/dev/null", "/dev/urandom")

CLONE_THREAD, F_SETOWN, F_SETOWN_EX = 0x10000, 8, 15
FIOSETOWN, SIOCSPGRP = 0x8901, 0x8902
# System calls that fail; what Landlock does not restrict.
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
    """Of the package."""
    spec = importlib.util.find_spec("numpy")
    origin = spec and spec.origin
    return os.path.dirname(os.path.realpath(origin)) if origin else ""


def python() -> str:
    """The interpreter itself, outside any virtual environment."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


@functools.cache
def readable() -> list[str]:
    """What the process may read; no path is within another."""
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
    """The words before the command.

    Raises:
      OSError: there is no program `bwrap`.
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
    """Holds for this thread, and for processes that it starts.

    `folder` may be written, the interpreter's files be read.

    Raises:
      OSError: the system has no Landlock. ImportError: there is no `py-landlock`.
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
    """A filter of system calls, as the kernel takes it.

    Raises:
      OSError: there is no libseccomp. ImportError: there is no `pyseccomp`.
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
    made.add_rule(lacks, "clone3")  # its flags are in memory; libraries use clone then
    made.add_rule(refused, "prlimit64", library.Arg(0, library.NE, 0))
    for which in (F_SETOWN, F_SETOWN_EX):
        made.add_rule(refused, "fcntl", library.Arg(1, library.EQ, which))
    for which in (FIOSETOWN, SIOCSPGRP):
        made.add_rule(refused, "ioctl", library.Arg(1, library.EQ, which))
    with tempfile.TemporaryFile() as file:
        made.export_bpf(file)
        file.seek(0)
        return file.read()
