"""Runs on one page: curves, samples token by token, and verdicts on reward hacking."""
