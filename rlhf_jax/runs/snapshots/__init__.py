"""What a run continues from, and the proof that it is whole."""
