"""From files of the user to batches of tokens."""
