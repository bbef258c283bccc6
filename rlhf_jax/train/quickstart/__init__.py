"""The whole of RLHF in about a minute, by the commands that a user types."""
