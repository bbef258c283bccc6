"""Whether a code verifier rewards what is right, and nothing else."""
