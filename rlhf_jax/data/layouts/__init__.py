"""Packs responses of different lengths into rows, on the host."""

from rlhf_jax.data.layouts.packer import Packer, spans

__all__ = ["Packer", "spans"]
