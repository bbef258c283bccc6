"""Samplers with one protocol: our decoder, here or in a process, and servers."""

TIMEOUT = 600.0  # seconds per call
TRIES = 5  # attempts of a call that fails, including the first
