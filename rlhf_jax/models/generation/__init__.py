"""Sampling from a model: plain batches, continuous batching and episodes."""
