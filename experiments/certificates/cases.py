"""Test cases of the certificates: a policy, an older policy and a reference."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from fnmatch import fnmatch
from typing import Any, NamedTuple, Protocol, TypeVar

import jax
import numpy as np
import optax
from worlds import enumerable
from worlds.enumerable import Float64

from rlhf_jax import critic, frozen
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference.frozen import Frozen

Params = Any
OPTIMIZER = optax.sgd(1.0)  # a recipe needs one, but no step is taken


class Case(NamedTuple):
    """A policy, an older one and a reference over the same responses."""

    policy: Params
    older: Params
    critic: Params  # its values are noise
    reference: Frozen
    model: ModelConfig
    stop_ids: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the functions that compute log-probs."""
        return {"model": self.model, "stop_ids": self.stop_ids}


def draw(seed: int, *, hidden_size: int = 16, stop_ids: tuple[int, ...] = ()) -> Case:
    """Draws random decoders whose KLs to each other are a nat or two.

    Args:
      stop_ids: () for the 256 responses of 4 tokens, `enumerable.STOPS` for the 121 of
        1 to 4.
    """
    model = enumerable.model(hidden_size=hidden_size)
    keys = jax.random.split(jax.random.key(seed), 5)
    init = jax.jit(functools.partial(enumerable.init, model=model))
    now, older, trunk, start = (init(key) for key in keys[:4])
    values = critic.from_policy(trunk, model=model)
    kernel = jax.random.normal(keys[4], values["score"]["kernel"].shape)
    values["score"] = values["score"] | {"kernel": kernel}
    return Case(now, older, values, frozen.freeze(start), model, stop_ids)


class _Named(Protocol):
    @property
    def name(self) -> str: ...


Named = TypeVar("Named", bound=_Named)


def chosen(claims: Sequence[Named], *, only: Sequence[str]) -> list[Named]:
    """Returns the claims whose name matches a pattern of `only`, all if it is empty.

    Raises:
      InputError: a pattern matches no claim.
    """
    for pattern in only:
        if not any(fnmatch(claim.name, pattern) for claim in claims):
            known = "; ".join(claim.name for claim in claims)
            raise InputError(f"--only: expected some of {known}, got {pattern!r}")
    return [
        claim
        for claim in claims
        if not only or any(fnmatch(claim.name, pattern) for pattern in only)
    ]


def flat(gradient: Params) -> Float64:
    leaves = [
        np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(gradient)
    ]
    return np.concatenate(leaves)
