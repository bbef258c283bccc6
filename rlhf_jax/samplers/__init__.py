"""Samplers behind one protocol: our decoder, here or in a process, and servers."""

TIMEOUT = 600.0  # seconds of a call
TRIES = 5  # of a call that fails, the first included
