"""Rollouts drawn ahead of the loop, in an environment, or outside the trainer."""
