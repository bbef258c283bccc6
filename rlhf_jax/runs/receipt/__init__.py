"""The receipt of a run's data: printed, and kept as data.json."""
