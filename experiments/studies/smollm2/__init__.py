"""Rewards that a program verifies, on SmolLM2-135M-Instruct: sums and GSM8K."""
