"""Sampling on the chips of a plan: its mesh, and how the policy gets there."""
