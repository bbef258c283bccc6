"""Proof that the files of a run are what it wrote."""
