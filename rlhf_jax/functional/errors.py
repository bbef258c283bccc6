"""The two errors whose message alone is printed; this module loads no JAX."""


class InputError(ValueError):
    """An input of the user is wrong: a file, an option or an argument.

    The command line prints the message alone and exits with status 2. Any other
    exception is a defect of the program and keeps its traceback.
    """


class StopError(RuntimeError):
    """The run has to stop: a frozen model moved, a self-check failed, or it diverged.

    The command line prints the message alone and exits with status 1.
    """
