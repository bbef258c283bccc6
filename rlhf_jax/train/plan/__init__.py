"""`rlhf-jax plan`: whether a run fits absent chips, and how fast it can be."""
