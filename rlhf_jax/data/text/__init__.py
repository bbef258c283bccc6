"""The text contract: how text becomes tokens and tokens become text."""

from rlhf_jax.data.text.contract import TextContract
from rlhf_jax.data.text.messages import Question, Written, read_question

__all__ = ["Question", "TextContract", "Written", "read_question"]
