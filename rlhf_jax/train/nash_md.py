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
from rlhf_jax.devices import sharding
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
    "Start": ("model",),
    "Training": (
        *("num_steps", "batch_size", "nash_md.mixture", "learning_rate"),
        *("nash_md.micro_batch_size", "dtype"),
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

    batch_size: int = 128
    """Responses per iteration, half of them the mixture's, which are not trained on."""
    reference: str = "start"
    """Reference of the mixture and of the KL: start, the policy before any update."""
    nash_md: Annotated[NashMDRecipe, tyro.conf.arg(name="")] = RECIPE
    """Coefficients and choices of Nash-MD, options without a prefix."""

    def __post_init__(self) -> None:
        if self.reference != "start":
            raise InputError(
                f"--reference: expected start, as the mixture is of the policy and its "
                f"own start, got {self.reference}; leave it out"
            )
        plain = {
            "--sampler-storage.dtype": (self.sampler_storage.dtype, "float32"),
            "--sampler-cache-pages": (self.sampler_cache_pages, None),
        }
        for option, (value, default) in plain.items():
            if value != default:
                raise InputError(
                    f"{option}: expected none for Nash-MD, whose mixture is sampled "
                    f"without it, got {value}; leave it out"
                )
        if self.batch_size % 2:
            raise InputError(
                f"--batch-size: expected an even number, for a response of the policy "
                f"and one of the mixture to each question, got {self.batch_size}; "
                f"change it"
            )
        if self.staleness:
            raise InputError(
                f"--max-staleness: expected 0 for Nash-MD, whose mixture is of "
                f"the policy as it is, got {self.staleness}; leave it out"
            )
        if self.environment is not None:
            raise InputError(
                f"--environment: expected none for Nash-MD, whose mixture draws single "
                f"responses, got {self.environment}; leave it out, or use rlhf-jax grpo"
            )
        if self.samples_outside:
            raise InputError(
                f"--sampler: expected here for Nash-MD, whose mixture is sampled by "
                f"policy and reference together, got {self.sampler}; leave it out"
            )
        super().__post_init__()
        for role in ("sampler", "reference"):
            place = getattr(self.placement, role)
            if place.apart:
                raise InputError(
                    f"--placement.{role}: expected policy for Nash-MD, whose mixture "
                    f"runs policy and reference in one program, got {place}; leave it "
                    f"out"
                )

    @property
    def sampler_tolerance(self) -> float:
        """What rounding of sampler and reference adds to the distance to the trainer.

        Nats per token.
        """
        return super().sampler_tolerance + self.reference_tolerance

    @property
    def trained_share(self) -> float:
        """The policy's own responses, not the mixture's."""
        return 0.5

    @property
    def recipe(self) -> NashMDRecipe:
        """The coefficients and choices of Nash-MD."""
        return self.nash_md

    def algorithm(self, **shapes: Any) -> NashMD:
        """The recipe with what a run knows: shapes, optimizer and stop tokens."""
        return NashMD(**vars(self.nash_md), **shapes)

    def make_sampler(
        self, algorithm: PolicyGradient, *, mesh: Mesh, reference: Frozen | None
    ) -> MixtureSampler:
        """The compiled sampler of a run, in which the reference takes part."""
        assert isinstance(algorithm, NashMD)  # of `algorithm`
        assert reference is not None  # it is start
        model = dataclasses.replace(
            algorithm.model,
            cache=self.sampler_cache,
            prefill_chunk=self.prefill_chunk,
        )
        sampled = dataclasses.replace(algorithm, model=model)
        return MixtureSampler(sampled, mesh=mesh, reference=reference)


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
