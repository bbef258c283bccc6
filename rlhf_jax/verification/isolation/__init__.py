"""Processes for untrusted code: their limits, files and system calls."""
