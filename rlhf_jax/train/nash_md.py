"""Nash-MD on your own model and questions, with a verifier or judge of responses.

    rlhf-jax nash-md --model MODEL --data train.jsonl --held-out test.jsonl --out OUT

It is `rlhf-jax grpo` with another recipe: to each question the policy gives one
response and the mixture of policy and reference another, and the policy learns what is
preferred to the mixture's, less --kl-coef times the KL. The reference is --model as it
starts. --verifier module:function is any judge of one response. Data, verifier and run
folder are the same.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import tyro
from jax.sharding import Mesh

from rlhf_jax.algorithms import nash_md
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.nash_md import NashMD, NashMDRecipe
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints import frozen_models
from rlhf_jax.devices import sharding
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs import command_line
from rlhf_jax.train.grpo.options import VERIFIED_SCREEN, VerifiedConfig
from rlhf_jax.train.grpo.trainer import main

Array = jax.Array
Params = Any
RECIPE = NashMDRecipe(temperature=1.0)
SCREEN = {
    **VERIFIED_SCREEN,
    "Training": (
        *("num_steps", "batch_size", "nash_md.mixture", "nash_md.labels"),
        *("learning_rate", "dtype"),
    ),
    "Run": ("out", "resume"),
}
"""The options of --help."""


class MixtureSampler:
    """The compiled `nash_md.sample` of a recipe, with the reference of the mixture."""

    def __init__(self, recipe: NashMD, *, mesh: Mesh, reference: Frozen) -> None:
        """Compiles nothing yet.

        Args:
          recipe: static.
          mesh: where policy and reference are, and where they sample.
          reference: the frozen model of the mixture.
        """
        self._sample = jax.jit(
            functools.partial(sharding.on(mesh, nash_md.sample), recipe=recipe)
        )
        self._reference = reference

    def __call__(
        self,
        policy: Params,
        *,
        prompts: Prompts,
        key: Array,
        version: Array | None = None,
    ) -> Rollout:
        """Responses of the policy and of the mixture, in turn.

        Args:
          policy: on the mesh.
          prompts: Prompts[B, P], each prompt in two neighbouring rows.
          key: of this step.
          version: i32[], of the policy, `TrainState.step`; None stamps no token.

        Raises:
          InputError: sizes do not divide.
        """
        return self._sample(
            policy, self._reference, prompts=prompts, key=key, version=version
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(VerifiedConfig):
    """The options of `rlhf-jax nash-md`."""

    nash_md: Annotated[NashMDRecipe, tyro.conf.arg(name="")] = RECIPE
    """Coefficients and choices of Nash-MD, options without a prefix."""

    def __post_init__(self) -> None:
        if self.reference != "start":
            raise InputError(
                f"--reference: expected start, the policy before any update, which the "
                f"mixture is of, got {self.reference}; leave it out"
            )
        super().__post_init__()
        checks.groups(self.batch_size, group_size=2)
        plain = {
            "--sampler-storage.dtype": (self.sampler_storage, frozen_models.COPY),
            "--sampler-cache": (self.sampler_cache, "same"),
            "--prefill-chunk": (self.prefill_chunk, None),
        }
        for option, (value, default) in plain.items():
            if value != default:
                raise InputError(
                    f"{option}: expected none for Nash-MD, whose mixture is sampled "
                    f"without it, got {value}; leave it out"
                )
        for role in ("sampler", "reference"):
            place = getattr(self.placement, role)
            if place.apart:
                raise InputError(
                    f"--placement.{role}: expected policy for Nash-MD, whose mixture "
                    f"runs policy and reference in one program, got {place}; leave it "
                    f"out"
                )

    @property
    def recipe(self) -> NashMDRecipe:
        """The coefficients and choices of Nash-MD."""
        return self.nash_md

    def algorithm(self, **shapes: Any) -> NashMD:
        """The recipe with what a run knows: shapes, optimizer and stop tokens."""
        return NashMD(**vars(self.nash_md), **shapes)

    def sampler(
        self, algorithm: PolicyGradient, *, mesh: Mesh, reference: Frozen | None
    ) -> MixtureSampler:
        """The compiled sampler of a run, in which the reference takes part."""
        assert isinstance(algorithm, NashMD)  # of `algorithm`
        assert reference is not None  # it is start
        return MixtureSampler(algorithm, mesh=mesh, reference=reference)


def command(argv: Sequence[str] | None = None) -> None:
    """`rlhf-jax nash-md`: from a command line to a run."""
    command_line.main(
        main,
        Config,
        description=__doc__,
        screen=SCREEN,
        prog="rlhf-jax nash-md",
        argv=argv,
    )
