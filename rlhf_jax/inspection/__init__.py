"""The KL of a text, token by token."""
