"""Mixtures of experts in place of a layer's MLP: routing, dispatch, exchange.

p = softmax(router x);  y = Σ over the k largest p_e of  w_e · MLP_e(x)
"""

from rlhf_jax.models.experts.block import Mixture
from rlhf_jax.models.experts.grouped import grouped_product
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
    "Mixture",
    "Routing",
    "balance_loss",
    "grouped_product",
    "router_stats",
    "routing_faults",
]
