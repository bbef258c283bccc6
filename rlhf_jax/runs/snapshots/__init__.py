"""Snapshots that a run resumes from, and the proof that they are whole."""
