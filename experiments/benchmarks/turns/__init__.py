"""Benchmark of episodes of several turns against a loop that re-reads conversations."""
