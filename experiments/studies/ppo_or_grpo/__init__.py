"""PPO and GRPO on the quickstart's language, in runs that differ only in the method."""
