"""Languages small enough to know everything about."""
