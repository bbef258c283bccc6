"""What does a loss really penalise? Its expected gradient by enumeration.

from rlhf_jax import audit

def loss(batch: audit.Batch):
    k1 = batch.logprobs - batch.ref_logprobs
    return jnp.sum(jnp.where(batch.mask, k1, 0.0))

[finding.verdict for finding in audit.of_loss(loss)]  # zero, where it is on-policy
"""

from rlhf_jax.audit.expected import Batch, Loss, expected_gradient, targets
from rlhf_jax.audit.findings import (
    NONE,
    ZERO,
    Finding,
    by_length,
    by_log_ratio,
    example,
    of_gradient,
    of_loss,
)
from rlhf_jax.audit.from_torch import from_torch
from rlhf_jax.audit.worlds import World, every

__all__ = [
    "NONE",
    "ZERO",
    "Batch",
    "Finding",
    "Loss",
    "World",
    "by_length",
    "by_log_ratio",
    "every",
    "example",
    "expected_gradient",
    "from_torch",
    "of_gradient",
    "of_loss",
    "targets",
]
