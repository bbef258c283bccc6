"""What a role trains, and the parameters it runs with: with LoRA they differ.

    trained                              base     run with
    parameters                           None     themselves
    adapters A, B                        W        W beside A, B
    {"trunk": A, B, "score": s}          W        {"trunk": W beside A, B, "score": s}

Policy, critic and reward model may share one base, which is also the reference.
"""

from __future__ import annotations

from typing import Any

from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.lora import LoRA, attach, init
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen

__all__ = ["init", "params"]

Params = Any


def params(trained: Params, *, base: Frozen | None, lora: LoRA | None) -> Params:
    """The parameters for a forward pass; no gradient flows into the base."""
    if base is None and lora is None:
        return trained
    if base is None or lora is None:
        missing = "base" if base is None else "lora"
        raise InputError(
            f"expected base and lora together, got no {missing}: with LoRA the trained "
            f"parameters are adapters of a frozen base. Give both, or neither to train "
            f"every parameter"
        )
    return attach(frozen.read(base), trained, lora=lora)
