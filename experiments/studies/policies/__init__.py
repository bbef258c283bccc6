"""One policy trained in one world: what the sweeps of the studies start."""
