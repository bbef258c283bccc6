"""Mixtures of experts in place of a layer's MLP or beside it: routing, dispatch.

p = softmax(router x);  y = Σ over the k largest p_e of  w_e · MLP_e(x)

The module itself, `block.Mixture`, is imported only by models that have it.
"""

from rlhf_jax.models.experts.routing import (
    NOTHING,
    OWN,
    Given,
    Routing,
    balance_loss,
    router_stats,
    routing_faults,
)

__all__ = [
    "NOTHING",
    "OWN",
    "Given",
    "Routing",
    "balance_loss",
    "router_stats",
    "routing_faults",
]
