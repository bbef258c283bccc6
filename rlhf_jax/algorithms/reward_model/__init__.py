"""Training of a reward model on pairs of responses."""

from rlhf_jax.algorithms.reward_model.update import loss, update

__all__ = ["loss", "update"]
