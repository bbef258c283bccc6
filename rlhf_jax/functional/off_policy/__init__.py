"""Tokens that another policy drew: importance weights, and how far that policy is."""
