"""Sweeps: runs over a grid of options and seeds that answer one question."""
