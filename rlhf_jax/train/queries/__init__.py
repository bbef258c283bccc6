"""What `rlhf-jax` answers about runs and models without training."""
