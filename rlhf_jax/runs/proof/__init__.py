"""Proof that the files of a run are those that it wrote."""
