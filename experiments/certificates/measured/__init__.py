"""Gradients and optima as the real code has them, against what is claimed."""
