"""References beside the first: `--references`, and the program of each."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Rollout, RolloutPacking
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.checkpoints.frozen_models import Storage
from rlhf_jax.checkpoints.further_references import FurtherReference
from rlhf_jax.devices import sharding
from rlhf_jax.devices.placement import WITH_POLICY, Place, PolicyPlacement
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.roles.reference.further import Further
from rlhf_jax.train.start import StartConfig

Array = jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReferencesConfig(StartConfig):
    """Options of the references beside the first."""

    references: tuple[str, ...] = ()
    """Further references, each NAME=CHECKPOINT,weight=W: a KL to it is penalised with W
    times --kl-coef and logged as objective/kl_NAME; dtype=, embeddings= and place=
    may follow."""

    @property
    def further(self) -> tuple[FurtherReference, ...]:
        """What `references` says."""
        return tuple(map(FurtherReference.parse, self.references))

    def policy_mesh(self, placement: PolicyPlacement) -> Mesh:
        """The policy's mesh, which leaves the devices of every reference free."""
        return placement.policy_mesh(
            further={each.option: each.place for each in self.further}
        )

    def check_references(self, penalty: Penalty, *, first: str | None) -> None:
        """Raises InputError for references that cannot be had together.

        Args:
          penalty: of the run.
          first: the option that leaves the first reference out; None where there is
            one.
        """
        names = [each.name for each in self.further]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InputError(
                f"--references: expected each name once, got {', '.join(twice)} twice; "
                f"rename one"
            )
        if first is not None and names:
            raise InputError(
                f"--references: expected none with {first}, as weights are over the "
                f"KL coefficient of the first reference, got {', '.join(names)}; leave "
                f"one of them out"
            )
        for each in self.further:
            if penalty.needs_logits and each.place.apart:
                raise InputError(
                    f"{each.option}: expected place=policy for exact KL, which needs "
                    f"the hidden states of both in one program, got {each.place}; "
                    f"leave it out, or choose k1, k2 or k3"
                )


def refuse_unused(role: str, storage: Storage, place: Place) -> None:
    """InputError for the storage or place of a frozen model that a run has not."""
    for option, value, default in (
        (f"--{role}-storage", storage, frozen_models.COPY),
        (f"--placement.{role}", place, WITH_POLICY),
    ):
        if value != default:
            raise InputError(
                f"{option}: expected none in a run without such a model, got {value}; "
                f"leave it out"
            )


class FurtherPrograms:
    """Log-probs of the references beside the first, each on its own devices."""

    def __init__(
        self,
        models: Mapping[str, Frozen],
        *,
        options: ReferencesConfig,
        recipe: PolicyGradient,
    ) -> None:
        """Compiles nothing yet.

        Args:
          models: the frozen models by name.
          options: their weights.
          recipe: static.
        """
        self._models = dict(models)
        self._weights = {each.name: each.weight for each in options.further}
        self._inside = recipe.penalty.needs_logits
        shape: dict[str, Any] = {
            "model": recipe.model,
            "max_new_tokens": recipe.max_new_tokens,
            "temperature": recipe.temperature,
        }
        self._logprobs = {
            name: jax.jit(
                functools.partial(
                    sharding.on(frozen.mesh_of(model), score.reference_logprobs),
                    **shape,
                )
            )
            for name, model in self._models.items()
        }

    def __call__(
        self, rollout: Rollout, packing: RolloutPacking | None
    ) -> dict[str, Further]:
        """What `learn` takes of them for a rollout.

        Args:
          rollout: Rollout[B, S], on the policy's devices.
          packing: how models read it packed; None reads it padded.

        Returns:
          Log-probs and weights by name, and for exact KL the models.
        """
        of_batch = None if packing is None else packing.batch

        def logprobs(name: str) -> Array:
            model, program = self._models[name], self._logprobs[name]
            return frozen_models.run_beside(
                lambda there: program(model, rollout=there, packing=of_batch),
                model,
                rollout,
            )

        return {
            name: Further(
                frozen=model if self._inside else None,
                logprobs=logprobs(name),
                weight=self._weights[name],
            )
            for name, model in self._models.items()
        }
