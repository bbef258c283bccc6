"""Commands that answer questions about runs, losses and models."""
