"""The whole of RLHF in a minute or two, by the commands that a user types."""
