"""What a run measures but does not train on, for any method."""
