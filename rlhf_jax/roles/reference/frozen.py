"""Parameters that nothing moves: the reference and the reward model.

A `Frozen` is made by copying, is always an argument (a closure would bake it into the
program), is never donated, and is read under `stop_gradient`. It has digests of its
parameters, as arrays: static fields would retrace every program at a reset.

`FrozenModels` is the one argument for all frozen models of an iteration. Each `Further`
is a reference besides the first one, with a name, a weight and its own KL:

    J(π) = E[r] - β·(KL(π ‖ π_ref) + Σ_i w_i·KL(π ‖ π_i))
    π*   ∝ (π_ref·Π_i π_i^{w_i})^{1/W}·exp(r/(β·W)),  W = 1 + Σ_i w_i

The first reference has weight 1: lifecycles move it, controllers of β read its KL, and
weight drift is measured to it. The others never change.

Source: Aminian et al. 2025, arXiv:2502.01203, section 5.

A role that trains adapters of a frozen base runs with both (`adapted_params`):

    trained                              base     parameters of a forward pass
    parameters                           None     the trained ones
    adapters A, B                        W        W beside A, B
    {"trunk": A, B, "score": s}          W        {"trunk": W beside A, B, "score": s}

Policy, critic and reward model may share one base, which may also be the reference.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.models import axes, leaves
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.lora import LoRA, attach
from rlhf_jax.roles.reference import fingerprint, storage
from rlhf_jax.roles.reference.fingerprint import Fetch

Array = jax.Array
Params = Any
TAKEN = ("k3", "coef", "exact")  # names for which objective/kl_NAME is another metric


class ReferenceMovedError(StopError):
    """A frozen model's parameters are not the ones that were frozen."""


@flax.struct.dataclass
class Frozen:
    """A forward-only model. A pytree: pass it to `jit` as an argument."""

    stored: Params  # from `storage.store`; `read` it for forward passes
    source_digests: Array  # u32[N, 2], of the parameters that were frozen
    stored_digests: Array  # u32[N, 2], of `stored`; the same unless the dtype differs
    model: ModelConfig | None = flax.struct.field(pytree_node=False, default=None)
    """The shape of the model; None is that of the policy."""


def freeze(
    params: Params,
    *,
    dtype: Any = None,
    embeddings: Any = None,
    memory: storage.Memory | None = None,
    sharding: Any = None,
    model: ModelConfig | None = None,
) -> Frozen:
    """Copies parameters into a frozen model.

    Args:
      params: pytree of arrays; may be donated or overwritten afterwards.
      dtype, embeddings, memory, sharding: of the copy, as in `storage.store`.
      model: the shape of the model, which must read the policy's tokens; None is the
        policy's.

    Raises:
      InputError: the tree is empty, or `storage.store` rejects an argument; names the
        leaf.
    """
    if not jax.tree.leaves(params):
        raise InputError(
            "expected parameters to freeze, got an empty tree; pass a model's params"
        )
    stored = storage.store(
        params, dtype=dtype, embeddings=embeddings, memory=memory, sharding=sharding
    )
    return Frozen(
        stored=stored,
        # The source's digests tell whether the policy starts as this reference, those
        # of the stored form whether anything has written to it.
        source_digests=fingerprint.digests(params),
        stored_digests=fingerprint.digests(stored),
        model=model,
    )


def shape_of(frozen: Frozen, *, policy: ModelConfig) -> ModelConfig:
    """The shape of a frozen model: its own, or the policy's."""
    return policy if frozen.model is None else frozen.model


def read(frozen: Frozen) -> Params:
    """The parameters for a forward pass; no gradient flows into them."""
    # On the parameters, before any arithmetic: the model has no gradient, and XLA keeps
    # no residuals for one.
    return jax.lax.stop_gradient(frozen.stored)


def beside(
    frozen: Frozen, batch: Any, *, put: Callable[[Any, Any], Any] = jax.device_put
) -> Any:
    """Copies a batch to the devices of a frozen model; asynchronous.

    For a reference on the CPU, or on devices of its own, whose program the caller
    compiles on `sharding.on(frozen.mesh_of(reference), ...)`:

        copy = frozen.beside(reference, rollout)
        ref_logprobs = program(reference, rollout=copy)     runs beside the policy
        ref_logprobs = jax.device_put(ref_logprobs, rollout.old_logprobs.sharding)

    Args:
      put: (array, sharding) -> array; `devices.moving.move` if the devices belong to
        several processes.

    Returns:
      The batch, with rows over the row axes of a mesh; arrays that are on this mesh
      already are returned as they are.
    """
    sharding = jax.tree.leaves(frozen.stored)[0].sharding

    def placed(leaf: Array) -> Array:
        if not isinstance(sharding, NamedSharding):
            return put(leaf, sharding.with_memory_kind("device"))
        if isinstance(leaf, Array):
            now = leaf.sharding
            # Already on the mesh: no copy is needed.
            if isinstance(now, NamedSharding) and now.mesh == sharding.mesh:
                return leaf
        spec = PartitionSpec()
        if np.ndim(leaf):
            sizes = dict(sharding.mesh.shape)
            spec = PartitionSpec(axes.row_axes(sizes, rows=np.shape(leaf)[0]))
        return put(leaf, NamedSharding(sharding.mesh, spec))

    return jax.tree.map(placed, batch)


def mesh_of(frozen: Frozen) -> Mesh | None:
    """The mesh of a frozen model; None for one device."""
    sharding = jax.tree.leaves(frozen.stored)[0].sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        return None
    return sharding.mesh


def fingerprint_of(
    frozen: Frozen, *, fetch: Fetch = jax.device_get
) -> fingerprint.Fingerprint:
    """The fingerprint of the stored form, recorded when the model was frozen."""
    return fingerprint.named(frozen.stored, frozen.stored_digests, fetch=fetch)


def source_fingerprint_of(
    frozen: Frozen, *, fetch: Fetch = jax.device_get
) -> fingerprint.Fingerprint:
    """The fingerprint of the parameters that were frozen, before they were stored.

    Leaves are numbered if they had another structure, as those of a stored model.
    """
    tree = jax.tree.map(lambda leaf: 0, frozen.stored, is_leaf=leaves.is_stored)
    count = len(frozen.source_digests)
    if len(jax.tree.leaves(tree)) != count:
        tree = [0] * count
    return fingerprint.named(tree, frozen.source_digests, fetch=fetch)


def verify(frozen: Frozen, *, fetch: Fetch = jax.device_get) -> None:
    """Computes the digests again and compares them with those recorded at freezing.

    Raises:
      ReferenceMovedError: they differ; names the leaves.
    """
    digests = fetch(fingerprint.digests(frozen.stored))
    expected = fetch(frozen.stored_digests)
    if digests.shape != expected.shape:
        raise ReferenceMovedError(
            f"expected the {len(expected)} leaves that were frozen, got "
            f"{len(digests)}; start again from the last verified snapshot"
        )
    moved = (digests != expected).any(axis=1)
    if moved.any():
        names = np.asarray(fingerprint.paths(frozen.stored))[moved]
        raise ReferenceMovedError(
            f"expected the parameters that were frozen (fingerprint "
            f"{fingerprint_of(frozen, fetch=fetch).root}), got others in "
            f"{', '.join(names)}. Something wrote to them: start again from the last "
            f"verified snapshot"
        )


def verify_all(models: Mapping[str, Frozen], *, fetch: Fetch = jax.device_get) -> None:
    """Calls `verify` on several models; a ReferenceMovedError begins with the name."""
    for name, model in models.items():
        try:
            verify(model, fetch=fetch)
        except ReferenceMovedError as error:
            raise ReferenceMovedError(f"{name}: {error}") from None


@flax.struct.dataclass
class Further:
    """One reference besides the first; programs take {name: Further}."""

    frozen: Frozen | None  # None if its log-probs are given and suffice
    logprobs: Array | None = None  # f32[B, S], nats; None computes them
    weight: float = flax.struct.field(pytree_node=False, default=1.0)
    """w, dimensionless: its KL coefficient is w·β. At 0 its KL is only measured."""


References = Mapping[str, Further]


def check_further(name: str, *, weight: float) -> None:
    """Raises InputError for an invalid name or weight of a further reference."""
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", name) or name in TAKEN:
        raise InputError(
            f"expected a name of letters, digits, _, - and ., and none of "
            f"{', '.join(TAKEN)}, which name other metrics objective/kl_NAME, got "
            f"{name!r}; choose another"
        )
    checks.within(
        least=0,
        advice="a negative one would push the policy away from the reference without "
        "bound, and 0 only measures its KL",
        **{f"weight of reference {name}": weight},
    )


@flax.struct.dataclass
class FrozenModels:
    """The models that an iteration reads and never trains; a pytree.

    It is an argument of every program and never donated, and no gradient reaches it.
    Each function reads the part that it needs: sampling reads the base, the loss also
    the reference.
    """

    # π_ref of the KL and of a sampled mixture, or the teacher. Programs run it if no
    # `ReferenceOutput` is passed, and for exact KL. None computes no KL, unless such an
    # output is passed; if that has hidden states, only the head is read.
    reference: Frozen | None = None
    base: Frozen | None = None  # the model that adapters adapt, with `recipe.lora`
    # References besides the first, by name, with their log-probs if computed before.
    further: References = flax.struct.field(default_factory=dict)


NO_MODELS = FrozenModels()


def adapted_params(
    trained: Params, *, base: Frozen | None, lora: LoRA | None
) -> Params:
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
    # Only the base is under stop_gradient: gradients have the adapters' shapes.
    return attach(read(base), trained, lora=lora)
