"""Rollouts that are drawn ahead of the loop, or by a program outside the trainer."""
