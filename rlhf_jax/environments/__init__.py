"""Environments: tasks of several turns, run in worker processes."""
