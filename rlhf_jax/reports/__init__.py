"""Runs on one page: curves, samples token by token, and who hacked its reward."""
