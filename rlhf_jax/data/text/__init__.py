"""The text contract: what a text is as tokens, and what tokens are as text."""

from rlhf_jax.data.text.contract import Asked, TextContract, Written, asked

__all__ = ["Asked", "TextContract", "Written", "asked"]
