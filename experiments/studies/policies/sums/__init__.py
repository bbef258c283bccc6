"""Trains a small decoder to add, and measures it."""
