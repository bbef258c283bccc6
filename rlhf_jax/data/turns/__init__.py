"""Conversations of several turns as token ids: what stands between the turns."""

from rlhf_jax.data.encoding import encode_episodes
from rlhf_jax.data.turns.encoder import TurnEncoder

__all__ = ["TurnEncoder", "encode_episodes"]
