"""Tokens drawn from a model: plain batches and continuous batching."""
