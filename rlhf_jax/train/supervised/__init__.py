"""SFT, reward model and DPO: one loop, and the task of each."""
