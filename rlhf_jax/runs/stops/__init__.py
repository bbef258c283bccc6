"""Stops by signals: within a time limit, and never dropped."""
