"""One file for each family of checkpoints, and what they share."""
