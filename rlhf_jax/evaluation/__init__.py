"""Computes the figures of an evaluation from scored responses, with intervals."""
