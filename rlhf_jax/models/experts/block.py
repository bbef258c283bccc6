"""The Linen module of a mixture: a router, and E experts; a token goes to k of them.

    {"router": {"weight": [D, E], "bias": [E]},
     "up": {"kernel": [E, D, F], "bias": [E, F]}, "gate": as up,
     "down": {"kernel": [E, F, D], "bias": [E, D]}}         of one layer

and beside an MLP "scale" [E], and "scale" [D] of the router.

`dispatch.py` multiplies the tokens of all experts in one product (`grouped.py`); no
token is dropped, whatever the load. Experts to replay, and the recorded routing, go
through Linen's collections, as do the tokens that are not padding:

    "replay"     experts: {"chosen": i32[B, S, k], "tokens": bool[B, S]}      input
    "routing"    experts: {"layer": (Routing,)}                               output
"""

from __future__ import annotations

from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp

from rlhf_jax.models.config import Experts, ModelConfig
from rlhf_jax.models.experts import routing
from rlhf_jax.models.experts.dispatch import mixed
from rlhf_jax.models.experts.routing import REPLAY, ROUTING

Array = jax.Array


class Linear(nn.Module):
    """The parameters of one linear layer of every expert."""

    features: int
    experts: int
    use_bias: bool
    init_std: float

    @nn.compact
    def __call__(self, size_in: int, dtype: jnp.dtype) -> dict[str, Array]:
        normal, zeros = nn.initializers.normal(self.init_std), nn.initializers.zeros
        shape = (self.experts, size_in, self.features)
        leaves = {"kernel": self.param("kernel", normal, shape, jnp.float32)}
        if self.use_bias:
            leaves["bias"] = self.param("bias", zeros, shape[::2], jnp.float32)
        for name in ("lora_a", "lora_b"):  # put there by `lora.attach`
            if self.has_variable("params", name):
                leaves[name] = self.get_variable("params", name)
        return {name: leaf.astype(dtype) for name, leaf in leaves.items()}


class Mixture(nn.Module):
    """y = Σ_e w_e · down_e(act(gate_e x) · up_e x) over the k experts of a token.

    Args of a call:
      x: [N, D], the tokens of all rows.
      routed: [N, D], what the router reads; None is x.

    Returns:
      [N, D] of x's dtype; 0 for padding, which goes to no expert.
    """

    model: ModelConfig
    activation: Callable[[Array], Array]
    init_std: float
    output_std: float

    @nn.compact
    def __call__(self, x: Array, routed: Array | None = None) -> Array:
        experts = self.model.experts
        assert experts is not None
        tokens = self._given("tokens")
        routed = x if routed is None else routed
        chosen, shares = self._route(routed, experts, tokens=tokens)
        model, width = self.model, self.model.expert_width
        if experts.beside_width is not None:
            ones = nn.initializers.ones
            scale = self.param("scale", ones, (experts.count,), jnp.float32)
            shares = shares * scale.astype(jnp.float32)[chosen]
        if tokens is not None:
            chosen = jnp.where(tokens[:, None], chosen, experts.count)
        widths = {
            "up": (x.shape[1], width, self.init_std),
            "gate": (x.shape[1], width, self.init_std),
            "down": (width, x.shape[1], self.output_std),
        }
        weights = {
            name: Linear(size_out, experts.count, model.mlp_bias, std, name=name)(
                size_in, x.dtype
            )
            for name, (size_in, size_out, std) in widths.items()
        }

        def hidden(up: Array, gate: Array) -> Array:
            if experts.gate_limit is None:
                return self.activation(gate) * up
            limit = experts.gate_limit
            gate = jnp.minimum(gate, limit)
            up = jnp.clip(up, -limit, limit)
            return (up + 1) * gate * jax.nn.sigmoid(gate * experts.gate_scale)

        between = jax.checkpoint(hidden, prevent_cse=model.unroll)
        return mixed(x, chosen, shares, weights=weights, gate=between)

    def _route(
        self, x: Array, experts: Experts, *, tokens: Array | None
    ) -> tuple[Array, Array]:
        logits = Router(experts, name="router")(x)
        replayed = self._given("chosen")
        chosen, weights = routing.choose(logits, experts=experts, replayed=replayed)
        if self.is_mutable_collection(ROUTING):
            counted = jnp.ones(x.shape[:1], bool) if tokens is None else tokens
            self.sow(ROUTING, "layer", routing.summed(logits, chosen, tokens=counted))
        return chosen, weights

    def _given(self, name: str) -> Array | None:
        """An input with a number, or k of them, per token, [N] or [N, k]."""
        array = self.get_variable(REPLAY, name)
        return None if array is None else array.reshape(-1, *array.shape[2:])


class Router(nn.Module):
    """f32[N, E]: x W (+ b), summed in float32, which near ties need.

    Beside an MLP x is multiplied by scale / sqrt(D).
    """

    experts: Experts

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (x.shape[-1], self.experts.count)
        if self.experts.beside_width is not None:
            scale = self.param("scale", nn.initializers.ones, shape[:1], jnp.float32)
            x = x * (scale * shape[0] ** -0.5).astype(x.dtype)[None]
        # Not called "kernel", so that LoRA's patterns of linear layers skip it.
        weight = self.param("weight", nn.initializers.normal(0.02), shape, jnp.float32)
        logits = jnp.matmul(
            x, weight.astype(x.dtype), preferred_element_type=jnp.float32
        )
        if not self.experts.router_bias:
            return logits
        bias = self.param("bias", nn.initializers.zeros, shape[1:], jnp.float32)
        return logits + bias.astype(jnp.float32)[None]
