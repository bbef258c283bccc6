"""Certificates of gradients and optima, by enumeration of a small world's responses."""
