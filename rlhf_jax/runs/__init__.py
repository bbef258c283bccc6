"""A run folder: its record, its metrics, its command line."""
