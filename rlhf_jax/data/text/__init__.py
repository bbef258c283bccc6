"""The text contract: what a text is as tokens, and what tokens are as text."""

from rlhf_jax.data.text.asked import Asked, Written, asked
from rlhf_jax.data.text.contract import TextContract

__all__ = ["Asked", "TextContract", "Written", "asked"]
