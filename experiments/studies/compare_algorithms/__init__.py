"""PPO, GRPO, RLOO, DPO and best-of-n on one language: gold score against KL."""
