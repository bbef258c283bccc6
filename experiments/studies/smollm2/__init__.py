"""Verifiable rewards on SmolLM2-135M-Instruct: sums and GSM8K."""
