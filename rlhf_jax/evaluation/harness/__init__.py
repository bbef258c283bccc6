"""A policy as a model of the LM Evaluation Harness (extra `lm-eval`)."""
