"""Benchmarks of a queue of rollouts, with sampling that waits for the host."""
