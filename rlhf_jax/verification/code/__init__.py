"""Unit tests run on generated Python code."""
