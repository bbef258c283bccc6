"""PPO and GRPO on the quickstart's language: runs that differ by their method alone."""
