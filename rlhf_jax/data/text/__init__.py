"""The text contract: what a text is as tokens, and what tokens are as text."""

from rlhf_jax.data.text.contract import TextContract
from rlhf_jax.data.text.messages import Question, Written, read_question

__all__ = ["Question", "TextContract", "Written", "read_question"]
