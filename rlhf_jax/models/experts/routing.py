"""Which experts a token goes to, their weights, and the statistics of routers."""

from __future__ import annotations

from collections.abc import Iterator

import flax.struct
import jax
import jax.numpy as jnp

from rlhf_jax.functional import masked
from rlhf_jax.models import axes
from rlhf_jax.models.config import Experts, ModelConfig

Array = jax.Array
OWN = -1  # in a record of experts: none recorded, the router chooses
ROUTING, REPLAY = "routing", "replay"  # Linen's collections of a mixture
NAME = "experts"  # of the mixture's module in a block


@flax.struct.dataclass
class Routing:
    """The decisions of the routers of all L layers, each token to k of E experts."""

    # i32[L, ..., k], experts by decreasing probability; `OWN` at padding.
    chosen: Array
    # Sums over tokens that are not padding.
    entropy: Array  # f32[L], nats, of the router's distribution
    probability: Array  # f32[L, E], of the router's distribution
    load: Array  # f32[L, E], tokens that went to each expert
    tokens: Array  # f32[L], number of tokens


@flax.struct.dataclass
class Given:
    """What a forward pass tells its mixtures about the tokens."""

    # bool[B, S], False at padding, which goes to no expert; None: all are tokens.
    tokens: Array | None = None
    # i32[L, B, S, k], or [B, S, k] of one layer, experts to replay; None lets the
    # routers choose.
    chosen: Array | None = None
    record: bool = flax.struct.field(pytree_node=False, default=False)


NOTHING = Given()


def choose(
    logits: Array, *, experts: Experts, replayed: Array | None = None
) -> tuple[Array, Array]:
    """The experts of every token, and their weights.

        w_e = exp(l_e) / Σ_{j in chosen} exp(l_j)      if normalised
        w_e = exp(l_e) / Σ_j exp(l_j)                  otherwise

    Args:
      logits: f32[N, E], of the router.
      replayed: i32[N, k], experts that another pass chose; a token with `OWN`
        throughout is routed by its logits. The weights always come from the logits,
        and the gradient reaches these (Ma et al. 2025, arXiv:2510.11370, section 4.1).

    Returns:
      i32[N, k] and f32[N, k]. The choice of experts has no gradient. Ties go to the
      expert with the lower number.

    Source: Shazeer et al. 2017, arXiv:1701.06538, section 2.1.
    """

    def largest(logits: Array) -> Array:
        return jax.lax.top_k(logits, experts.per_token)[1].astype(jnp.int32)

    chosen = axes.of_own_rows(largest, jax.lax.stop_gradient(logits))
    if replayed is not None:
        chosen = jnp.where(replayed == OWN, chosen, replayed)
    taken = jnp.take_along_axis(logits, chosen, axis=1)
    over = taken if experts.normalised else logits
    normaliser = jax.nn.logsumexp(over, axis=1, keepdims=True)
    return chosen, jnp.exp(taken - normaliser)


def summed(logits: Array, chosen: Array, *, tokens: Array) -> Routing:
    """The `Routing` of one layer, without the dimension L.

    Args:
      tokens: bool[N], False at padding.
    """
    logprobs = jax.nn.log_softmax(logits)
    probability = jnp.exp(logprobs)
    counted = tokens[:, None]
    load = jax.nn.one_hot(chosen, logits.shape[1], dtype=jnp.float32).sum(axis=1)
    return Routing(
        chosen=jnp.where(counted, chosen, OWN),
        entropy=-jnp.where(counted, probability * logprobs, 0.0).sum(),
        probability=jnp.where(counted, probability, 0.0).sum(axis=0),
        load=jnp.where(counted, load, 0.0).sum(axis=0),
        tokens=tokens.sum(dtype=jnp.float32),
    )


def balance_loss(routing: Routing) -> Array:
    """f32[]: the mean over layers of (E / k) Σ_e f_e P_e, 1 if the load is even.

    f_e is the share of tokens that went to expert e and P_e its mean probability, over
    the tokens of this batch: a micro-batch balances its own tokens. The gradient
    reaches the routers through P_e only.

    Source: Fedus et al. 2021, arXiv:2101.03961, eq. 4 to 6, for k experts.
    """
    count = jnp.maximum(routing.tokens, 1.0)[:, None]
    load = jax.lax.stop_gradient(routing.load / count)
    experts, per_token = routing.load.shape[1], routing.chosen.shape[-1]
    even = experts / per_token * (load * routing.probability / count).sum(axis=1)
    return even.mean()


def router_stats(routing: Routing) -> masked.Stats:
    """Statistics of the routers, means over tokens or layers as (sum, weight).

    `router/entropy` is in nats; `router/load_max` is the load of a layer's busiest
    expert over an even load; `router/unused` is the share of experts without a token.
    """
    experts, per_token = routing.load.shape[1], routing.chosen.shape[-1]
    even = jnp.maximum(routing.tokens * per_token / experts, 1e-9)
    layers = jnp.asarray(routing.tokens.shape[0], jnp.float32)
    unused = (routing.load == 0).mean(axis=1, dtype=jnp.float32)
    return {
        "router/entropy": (routing.entropy.sum(), routing.tokens.sum()),
        "router/load_max": ((routing.load.max(axis=1) / even).sum(), layers),
        "router/unused": (unused.sum(), layers),
    }


def routing_faults(
    model: ModelConfig, chosen: Array | None, *, tokens: Array, record: bool = False
) -> Iterator[str]:
    """Describes why a record of experts does not fit the tokens and the model.

    Args:
      chosen: the record, of any shape and dtype; None: nothing is replayed.
      tokens: i32[B, S].
      record: whether the pass is to record its own routing.
    """
    experts = model.experts
    if experts is None:
        if record or chosen is not None:
            yield (
                f"expected a mixture of experts to record or replay the routing of, "
                f"got a dense {model.family}; leave the replay out"
            )
        return
    if chosen is None:
        return
    shape = (*tokens.shape, model.num_layers, experts.per_token)
    if chosen.shape != shape or chosen.dtype != jnp.int32:
        yield (
            f"expected a routing record int32{list(shape)}, of [rows, columns, layers, "
            f"experts per token] of this {model.family}, got {chosen.dtype}"
            f"{list(chosen.shape)}; record it with the model and the rows that it is "
            f"replayed in"
        )
