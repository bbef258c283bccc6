"""Supervised fine-tuning."""

from rlhf_jax.algorithms.sft.update import loss, predicted, update

__all__ = ["loss", "predicted", "update"]
