"""Languages small enough for exact probabilities and rewards."""
