"""`--environment`: episodes of several turns instead of one response to a prompt."""
