"""PPO, DPO and best-of-n from people's preferences, on a real language model."""
