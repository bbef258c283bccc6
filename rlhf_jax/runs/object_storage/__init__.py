"""Runs, data and checkpoints at gs:// and s3:// addresses."""
