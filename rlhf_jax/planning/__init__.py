"""Memory, work and time of a run, before it starts."""
