"""Families of mixtures of experts."""
