"""Families whose layers are of several kinds."""
