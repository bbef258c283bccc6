"""Tokens that another policy drew: weights for them, and how far that policy is."""
