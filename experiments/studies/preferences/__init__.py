"""From people's preferences to PPO, DPO and best-of-n on a real language model."""
