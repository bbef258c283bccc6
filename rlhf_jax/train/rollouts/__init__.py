"""Rollouts that the loop waits for: drawn ahead of it, or by a program outside."""
