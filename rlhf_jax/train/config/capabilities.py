"""What cannot be combined across groups: one table, {(feature, feature): reason}.

It makes the check, its message, the matrix in the README and the tests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rlhf_jax.algorithms.policy_gradient.corrections import Recompute
from rlhf_jax.checkpoints.frozen_models import COPY
from rlhf_jax.devices.placement import WITH_POLICY
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.lifecycle import FROZEN
from rlhf_jax.train.config.critic import POLICY, REWARD_MODEL
from rlhf_jax.train.config.sampler import Here, Server

if TYPE_CHECKING:
    from rlhf_jax.train.config.config import PolicyGradientConfig

# The option that a config chooses a feature by, or None where it does not.
Feature = Callable[["PolicyGradientConfig"], str | None]


def _of(*methods: str) -> Feature:
    return lambda c: f"rlhf-jax {c.name}" if c.name in methods else None


def _first(choices: Mapping[str, bool]) -> str | None:
    """The first option that is chosen."""
    return next((option for option, chosen in choices.items() if chosen), None)


def _asks_for_reference(c: PolicyGradientConfig) -> str | None:
    return _first(
        {
            f"--kl-coef {c.kl_coef:g}": c.kl_coef > 0,
            "--kl-control": c.kl.kl_control != type(c.kl)().kl_control,
            "--references": bool(c.reference.references),
            "--lifecycle": c.reference.lifecycle != FROZEN,
            "--placement.reference": c.placement.reference != WITH_POLICY,
            "exact --penalty": c.method.penalty.needs_logits,
            "--reference-storage": c.reference.reference_storage
            != type(c.reference)().reference_storage
            and c.start.lora is None,
            f"rlhf-jax {c.name}": c.name in ("online-dpo", "nash-md", "distill"),
        }
    )


def _apart(c: PolicyGradientConfig) -> str | None:
    return _first(
        {
            "--placement.reference": c.placement.reference.apart,
            "place= of --references": any(
                x.place.apart for x in c.reference.references
            ),
        }
    )


def _first_apart(c: PolicyGradientConfig) -> str | None:
    """A place that the base under adapters, where that is the reference, has not."""
    place, is_start = c.placement.reference, c.reference.checkpoint is None
    elsewhere = place.apart or (is_start and place != WITH_POLICY)
    return "--placement.reference" if elsewhere else None


def _here(c: PolicyGradientConfig) -> str | None:
    """What only our decoder beside the trainer does."""
    return _first(
        {
            "--environment": c.sampler.environment is not None,
            "--placement.sampler": c.placement.sampler.apart,
        }
    )


def _elsewhere(c: PolicyGradientConfig) -> str | None:
    """What draws without the policy that learns."""
    return _here(c) or _first(
        {
            "--sampler": c.sampler.is_outside,
            "--max-staleness": c.staleness > 0,
        }
    )


def _decoder_options(c: PolicyGradientConfig) -> str | None:
    sampler = c.sampler.sampler
    return _first(
        {
            "options of --sampler here": isinstance(sampler, Here)
            and sampler != Here(),
            "--fixed-length": c.method.fixed_length is not None,
        }
    )


def _one_width(c: PolicyGradientConfig) -> str | None:
    return _first(
        {
            "--environment": c.sampler.environment is not None,
            "--max-staleness or --placement.sampler last": c.staleness > 0,
        }
    )


def _other_sampler(c: PolicyGradientConfig) -> str | None:
    return _first(
        {
            "--max-staleness or --placement.sampler last": c.staleness > 0,
            "a --sampler that rounds": c.sampler_tolerance > 0,
            "--sampler http://...": isinstance(c.sampler.sampler, Server),
        }
    )


def _uncorrected(c: PolicyGradientConfig) -> str | None:
    bare = isinstance(c.recipe.sampler_correction, Recompute)
    return "--sampler-correction recompute" if bare else None


def _critic(c: PolicyGradientConfig, **chosen: bool) -> str | None:
    options = {
        "own": f"--critic.start {c.critic.start}" if c.critic is not None else "",
        "apart": "--placement.critic",
    }
    if c.critic is None:
        return None
    is_so = {
        "own": c.critic.start != POLICY,
        "apart": c.critic_place.apart,
    }
    return _first({options[name]: is_so[name] for name in chosen})


def _reference_samples(c: PolicyGradientConfig) -> str | None:
    return _first(
        {
            "--sample-reference": c.watch.sample_reference,
            "--num-alternatives": c.watch.num_alternatives > 0,
        }
    )


def _not_the_start(c: PolicyGradientConfig) -> str | None:
    return _first(
        {
            f"--reference {c.reference.reference}": c.reference.reference != "start",
            "--lora": c.start.lora is not None,
            "--placement.reference": c.placement.reference.apart,
        }
    )


def _moving_adapters(c: PolicyGradientConfig) -> str | None:
    moves = c.start.lora is not None and c.reference.lifecycle.moves
    return "--lora and --lifecycle" if moves else None


FEATURES: Mapping[str, Feature] = {
    "no reference": lambda c: None if c.reference.has_reference else "--reference none",
    "asks for a reference": _asks_for_reference,
    "unplaced penalty": lambda c: (
        "--penalty.placement None"
        if c.method.penalty.placement is None and c.name != "distill"
        else None
    ),
    "KL coefficient": lambda c: _first(
        {
            f"--kl-coef {c.kl_coef:g}": c.kl_coef > 0,
            "--kl-control": c.kl.kl_control != type(c.kl)().kl_control,
        }
    ),
    "further references or steps without one": lambda c: _first(
        {
            "--references": bool(c.reference.references),
            "--lifecycle.kl-every": c.reference.lifecycle.kl_every > 1,
        }
    ),
    "one reference": _of("online-dpo", "distill"),
    "exact KL": lambda c: "exact --penalty" if c.method.penalty.needs_logits else None,
    "reference apart": _apart,
    "first reference apart": _first_apart,
    "adapters": lambda c: None if c.start.lora is None else "--lora",
    "mixed reference": lambda c: (
        "--lifecycle.move mix" if c.reference.lifecycle.mixes else None
    ),
    "moving adapters": _moving_adapters,
    "exact KL or another reference": lambda c: _first(
        {
            f"--reference {c.reference.checkpoint}": c.reference.checkpoint is not None,
            "exact --penalty": c.method.penalty.needs_logits,
        }
    ),
    "critic of its own": lambda c: _critic(c, own=True),
    "critic apart": lambda c: _critic(c, apart=True),
    "critic elsewhere": lambda c: _critic(c, own=True, apart=True),
    "shared trunk": lambda c: (
        "--shared-trunk" if getattr(c.method, "shared_trunk", False) else None
    ),
    "joint guards": lambda c: _first(
        {
            "--stop-approxkl": c.method.stop_approxkl is not None,
            "--max-ratio-mean": c.method.max_ratio_mean is not None,
        }
    ),
    "critic of a reward model": lambda c: (
        "--critic.start reward_model"
        if c.critic is not None and c.critic.start == REWARD_MODEL
        else None
    ),
    "not one reward model": lambda c: {
        0: "no reward model",
        1: None,
    }.get(len(c.rewards.models), "several reward models"),
    "rounded sampler": lambda c: (
        "a --sampler dtype"
        if getattr(c.sampler.sampler, "dtype", "float32") != "float32"
        else None
    ),
    "options of reward models": lambda c: _first(
        {
            "--placement.reward": c.placement.reward != WITH_POLICY,
            "--reward-storage": c.rewards.reward_storage != COPY,
        }
    ),
    "no reward model": lambda c: None if c.rewards.models else "no reward model",
    "sampler outside": lambda c: "--sampler" if c.sampler.is_outside else None,
    "drawn here": _here,
    "mixture apart": lambda c: (
        _elsewhere(c)
        or ("--placement.reference" if c.placement.reference.apart else None)
    ),
    "server": lambda c: (
        "--sampler http://..." if isinstance(c.sampler.sampler, Server) else None
    ),
    "order of the decoder": lambda c: _first(
        {
            "--continuous-batching": c.method.continuous_batching is not None,
            "--fixed-length": c.method.fixed_length is not None,
        }
    ),
    "how prompts are written": lambda c: c.data.writing_option,
    "environment": lambda c: None if c.sampler.environment is None else "--environment",
    "decoder options": _decoder_options,
    "one width": _one_width,
    "buckets": lambda c: None if c.data.buckets is None else "--buckets",
    "redraws": lambda c: "--max-redraws" if c.sampler.max_redraws else None,
    "no known groups": lambda c: _first(
        {
            f"rlhf-jax {c.name}, whose prompts have one response": (
                c.rows_per_prompt == 1 or c.name == "nash-md"
            ),
            "--max-staleness or --placement.sampler last": c.staleness > 0,
        }
    ),
    "other sampler": _other_sampler,
    "uncorrected": _uncorrected,
    "nash-md": _of("nash-md"),
    "packing": lambda c: None if c.batch.packing is None else "--packing",
    "context": lambda c: (
        "--placement.policy context=N" if c.placement.policy.context > 1 else None
    ),
    "padded loss": _of("online-dpo", "distill"),
    "alternatives": lambda c: (
        "--num-alternatives" if c.watch.num_alternatives else None
    ),
    "stale sampler": lambda c: (
        "--max-staleness or --placement.sampler last" if c.staleness > 0 else None
    ),
    "reference's samples": _reference_samples,
    "not the start": _not_the_start,
}

TABLE: Mapping[tuple[str, str], str] = {
    ("no reference", "asks for a reference"): (
        "there is none to measure a KL to (--reference start takes one)"
    ),
    ("unplaced penalty", "KL coefficient"): "the KL is measured then and acts nowhere",
    ("further references or steps without one", "one reference"): (
        "its loss reads one reference, in every step"
    ),
    ("exact KL", "reference apart"): (
        "exact KL needs the hidden states of both in one program; choose k1, k2 or k3"
    ),
    ("adapters", "first reference apart"): (
        "the reference is the policy's base, and runs with it"
    ),
    ("adapters", "mixed reference"): (
        "mixing adapters does not mix the weights that they stand for; reset instead"
    ),
    ("moving adapters", "exact KL or another reference"): (
        "a reset makes the reference adapters of the policy's base, without a head of "
        "its own; choose k1 to k3 and --reference start"
    ),
    (
        "adapters",
        "critic of its own",
    ): "the critic's adapters are over the policy's base",
    ("shared trunk", "critic elsewhere"): "the critic is a head on the policy then",
    ("critic apart", "joint guards"): "a guard leaves out a step of both",
    ("critic of a reward model", "not one reward model"): (
        "the critic starts from exactly one"
    ),
    ("options of reward models", "no reward model"): "there is none to place or store",
    ("adapters", "rounded sampler"): (
        "its base is sampled with as --reference-storage has it"
    ),
    ("sampler outside", "drawn here"): "our decoder beside the trainer draws these",
    ("server", "order of the decoder"): "a server has an order of its own",
    ("environment", "how prompts are written"): "it writes its prompts from the rows",
    ("environment", "decoder options"): (
        "episodes have places and a cache of their own, and turns end at a stop token"
    ),
    ("one width", "buckets"): "all of its batches have one width",
    ("redraws", "no known groups"): (
        "a batch is drawn again for groups whose rewards are known to be equal"
    ),
    ("other sampler", "uncorrected"): (
        "nothing corrects for the distance of the sampler then; truncate does"
    ),
    ("nash-md", "mixture apart"): (
        "its mixture draws beside the policy, and runs with the reference in one "
        "program"
    ),
    ("packing", "context"): "a head reads packed states from any column",
    ("packing", "padded loss"): "its loss reads rows padded",
    ("alternatives", "stale sampler"): (
        "the responses are of an older policy than the one that is asked"
    ),
    ("reference's samples", "not the start"): (
        "the reference is sampled by the policy's own program"
    ),
}
"""Why two features cannot be combined, as the end of a sentence."""


def check(config: PolicyGradientConfig) -> None:
    """Refuses a config with a pair of features of the table.

    Raises:
      InputError: names both options and the reason.
    """
    for (one, other), reason in TABLE.items():
        first, second = FEATURES[one](config), FEATURES[other](config)
        if first is not None and second is not None:
            raise InputError(
                f"{first}: expected none with {second}, as {reason}; leave one of them "
                f"out"
            )
