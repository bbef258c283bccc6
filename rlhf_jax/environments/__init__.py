"""Environments: tasks of several turns, in processes of their own."""
