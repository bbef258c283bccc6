"""Benchmarks of speed and memory, compared with peers and with the machine's limits."""
