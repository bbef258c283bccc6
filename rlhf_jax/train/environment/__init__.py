"""`--environment`: episodes of several turns instead of single responses."""
