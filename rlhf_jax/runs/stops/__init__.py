"""Stops by signals: in time, and never lost."""
