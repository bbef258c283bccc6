"""`rlhf-jax plan`: whether a run fits chips that are not there, and how fast it is."""
