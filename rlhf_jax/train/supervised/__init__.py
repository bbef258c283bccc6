"""SFT, reward model and DPO: one loop, and the data of each."""
