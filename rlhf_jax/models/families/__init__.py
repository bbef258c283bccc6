"""One file per family of checkpoints, and the code that they share."""
