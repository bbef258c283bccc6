"""What a run measures and does not train on, for any method."""
