"""Runs a command that is killed when its parent process is.

    python -m rlhf_jax.sweeps.tied PARENT COMMAND...

This uses prctl of Linux, which persists over exec; other systems have no such tie.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ties this process to its parent, and becomes the command."""
    _, parent, *command = sys.argv
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != int(parent):  # the parent has already ended
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
