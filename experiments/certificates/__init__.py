"""Proofs by enumeration: gradients and optima, over all responses of a small world."""
