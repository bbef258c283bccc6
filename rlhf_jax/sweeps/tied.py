"""A command that is killed when the process that started it is.

    python -m rlhf_jax.sweeps.tied PARENT COMMAND...

The tie is Linux's (prctl) and holds beyond exec; elsewhere there is none.
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
        if os.getppid() != int(parent):  # it is gone already
            sys.exit(1)
    os.execv(command[0], command)


if __name__ == "__main__":
    main()
