"""The effect of the choice of the KL penalty: two sweeps and their figures."""
