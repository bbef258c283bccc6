"""Features that cannot be combined across groups: {(feature, feature): reason}.

The table makes the check, its message, the matrix in the README and the tests. Within a
group `exclude` refuses options that exclude each other, and `need` an option without
another one. `Choices` map an option, as it is written, to whether it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from rlhf_jax.algorithms.policy_gradient.corrections import Recompute
from rlhf_jax.algorithms.policy_gradient.options import TopEntropy
from rlhf_jax.checkpoints.frozen_models import COPY
from rlhf_jax.devices.placement import WITH_POLICY
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.reference.lifecycle import FROZEN
from rlhf_jax.train.config.optimizer import POLICY, REWARD_MODEL
from rlhf_jax.train.config.sampler import Here, Server

if TYPE_CHECKING:
    from rlhf_jax.train.config.config import PolicyGradientConfig

Config: TypeAlias = "PolicyGradientConfig"
STALE = "a stale sampler (--max-staleness, --placement.sampler last or hosts)"
Choices = Mapping[str, bool]


def _kl_options(c: Config) -> dict[str, bool]:
    return {
        f"--kl-coef {c.kl_coef:g}": c.kl_coef > 0,
        "--kl-control": c.kl.kl_control != type(c.kl)().kl_control,
    }


def _asks_for_reference(c: Config) -> dict[str, bool]:
    chosen = c.reference
    stored = chosen.reference_storage != type(chosen)().reference_storage
    return {
        **_kl_options(c),
        "--references": bool(chosen.references),
        "--lifecycle": chosen.lifecycle != FROZEN,
        "--placement.reference": c.placement.reference != WITH_POLICY,
        "exact --penalty": c.method.penalty.needs_logits,
        "--penalty.reference-share": c.method.penalty.reference_share is not None,
        "--kl-to-go": getattr(c.method, "kl_to_go", False),
        "--surrogate dar": c.method.reads_reference,
        "--reference-storage": stored and c.start.lora is None,
        f"rlhf-jax {c.name}": c.name in ("online-dpo", "nash-md", "distill"),
    }


def _first_apart(c: Config) -> dict[str, bool]:
    """A place of the first reference that no base under adapters can have."""
    place, is_start = c.placement.reference, c.reference.checkpoint is None
    elsewhere = place.apart or (is_start and place != WITH_POLICY)
    return {"--placement.reference": elsewhere}


def _drawn_here(c: Config) -> dict[str, bool]:
    """Features that only the decoder beside the trainer has."""
    return {
        "--environment": c.sampler.environment is not None,
        "--placement.sampler": c.placement.sampler.apart,
        **_centred(c),
    }


def _centred(c: Config) -> dict[str, bool]:
    return {"--surrogate centred": c.method.recorded_top_k is not None}


def _of_critic(c: Config, *, own: bool = False, apart: bool = False) -> dict[str, bool]:
    start = POLICY if c.critic is None else c.critic.start
    return {
        f"--critic.start {start}": own and start != POLICY,
        "--placement.critic": apart and c.critic_place.apart,
    }


# {feature: config -> {option that chooses it: whether the config does}}
CHOICES: Mapping[str, Callable[[Config], Mapping[str, bool]]] = {
    "no reference": lambda c: {"--reference none": not c.reference.has_reference},
    "asks for a reference": _asks_for_reference,
    "unplaced penalty": lambda c: {
        "--penalty.placement None": c.method.penalty.placement is None
        and c.name != "distill"
    },
    "KL coefficient": _kl_options,
    "further references or steps without one": lambda c: {
        "--references": bool(c.reference.references),
        "--lifecycle.kl-every": c.reference.lifecycle.kl_every > 1,
    },
    "one reference": lambda c: {
        f"rlhf-jax {c.name}": c.name in ("online-dpo", "distill"),
        "--surrogate dar": c.method.reads_reference,
    },
    "exact KL": lambda c: {"exact --penalty": c.method.penalty.needs_logits},
    "reference apart": lambda c: {
        "--placement.reference": c.placement.reference.apart,
        "place= of --references": any(x.place.apart for x in c.reference.references),
    },
    "first reference apart": _first_apart,
    "adapters": lambda c: {"--lora": c.start.lora is not None},
    "mixed reference": lambda c: {"--lifecycle.move mix": c.reference.lifecycle.mixes},
    "moving adapters": lambda c: {
        "--lora and --lifecycle": c.start.lora is not None
        and c.reference.lifecycle.moves
    },
    "exact KL or another reference": lambda c: {
        f"--reference {c.reference.checkpoint}": c.reference.checkpoint is not None,
        "exact --penalty": c.method.penalty.needs_logits,
        f"rlhf-jax {c.name}": c.reads_hidden_states,
    },
    "critic of its own": lambda c: _of_critic(c, own=True),
    "critic apart": lambda c: _of_critic(c, apart=True),
    "critic elsewhere": lambda c: _of_critic(c, own=True, apart=True),
    "shared trunk": lambda c: {
        "--shared-trunk": getattr(c.method, "shared_trunk", False)
    },
    "joint guards": lambda c: {
        "--stop-approxkl": c.method.stop_approxkl is not None,
        "--max-ratio-mean": c.method.max_ratio_mean is not None,
    },
    "critic of a reward model": lambda c: {
        "--critic.start reward_model": c.critic is not None
        and c.critic.start == REWARD_MODEL
    },
    "not one reward model": lambda c: {
        "a run without a reward model": not c.rewards.models,
        "several reward models": len(c.rewards.models) > 1,
    },
    "rounded sampler": lambda c: {
        "a --sampler dtype": getattr(c.sampler.sampler, "dtype", "float32") != "float32"
    },
    "options of reward models": lambda c: {
        "--placement.reward": c.placement.reward != WITH_POLICY,
        "--reward-storage": c.rewards.reward_storage != COPY,
    },
    "no reward model": lambda c: {"a run without a reward model": not c.rewards.models},
    "sampler outside": lambda c: {"--sampler": c.sampler.is_outside},
    "drawn here": _drawn_here,
    "mixture apart": lambda c: {
        **_drawn_here(c),
        "--sampler": c.sampler.is_outside,
        "--max-staleness": c.staleness > 0,
        "--placement.reference": c.name == "nash-md" and c.placement.reference.apart,
    },
    "server": lambda c: {"--sampler http://...": isinstance(c.sampler.sampler, Server)},
    "known to the decoder": lambda c: {
        "--continuous-batching": c.method.continuous_batching is not None,
        "--fixed-length": c.method.fixed_length is not None,
        # A server returns no entropy; -log μ of the drawn token would choose by chance.
        "--token-choice top_entropy": isinstance(c.method.token_choice, TopEntropy),
    },
    "how prompts are written": lambda c: {
        str(c.data.writing_option): c.data.writing_option is not None,
        "--success-score": c.success_score is not None,
    },
    "environment": lambda c: {"--environment": c.sampler.environment is not None},
    "decoder options": lambda c: {
        "options of --sampler here": isinstance(c.sampler.sampler, Here)
        and c.sampler.sampler != Here(),
        "--fixed-length": c.method.fixed_length is not None,
        **_centred(c),
    },
    "one width": lambda c: {
        "--environment": c.sampler.environment is not None,
        STALE: c.staleness > 0,
    },
    "buckets": lambda c: {"--buckets": c.data.buckets is not None},
    "redraws": lambda c: {"--max-redraws": c.sampler.max_redraws > 0},
    "no known groups": lambda c: {
        f"rlhf-jax {c.name}, whose prompts have one response": (
            c.method.rows_per_prompt == 1 or c.name == "nash-md"
        ),
        f"rlhf-jax {c.name}, whose groups of equal rewards teach something": (
            c.name == "distill"
        ),
        "--normalise each, where groups of equal sums teach something": (
            getattr(c.method, "normalise", None) == "each"
        ),
        STALE: c.staleness > 0,
    },
    "other sampler": lambda c: {
        STALE: c.staleness > 0,
        "a --sampler that rounds": c.sampler_tolerance > 0,
        "--sampler http://...": isinstance(c.sampler.sampler, Server),
    },
    "uncorrected": lambda c: {
        "--sampler-correction recompute": isinstance(
            c.recipe.sampler_correction, Recompute
        )
    },
    "draws beside": lambda c: {
        f"rlhf-jax {c.name}": c.name == "nash-md",
        "--baseline greedy": getattr(c.method, "baseline", None) == "greedy",
    },
    "packing": lambda c: {"--packing": c.batch.packing is not None},
    "context": lambda c: {
        "--placement.policy context=N": c.placement.policy.context > 1
    },
    "padded loss": lambda c: {
        f"rlhf-jax {c.name}": c.name in ("online-dpo", "distill"),
        **_centred(c),
    },
    "alternatives": lambda c: {"--num-alternatives": c.watch.num_alternatives > 0},
    "stale sampler": lambda c: {STALE: c.staleness > 0},
    "reference's samples": lambda c: {
        "--sample-reference": c.watch.sample_reference,
        "--num-alternatives": c.watch.num_alternatives > 0,
    },
    "not the start": lambda c: {
        f"--reference {c.reference.reference}": c.reference.reference != "start",
        "--lora": c.start.lora is not None,
        "--placement.reference": c.placement.reference.apart,
    },
}


TABLE: Mapping[tuple[str, str], str] = {
    ("no reference", "asks for a reference"): (
        "the latter needs a reference, such as --reference start"
    ),
    ("unplaced penalty", "KL coefficient"): "the KL is then only measured",
    ("further references or steps without one", "one reference"): (
        "its loss reads one reference, in every step"
    ),
    ("exact KL", "reference apart"): (
        "exact KL needs the hidden states of both in one program; choose k1, k2 or k3"
    ),
    ("adapters", "first reference apart"): (
        "the reference runs where the policy's base is"
    ),
    ("adapters", "mixed reference"): (
        "mixing adapters does not mix the weights that they stand for; reset instead"
    ),
    ("moving adapters", "exact KL or another reference"): (
        "a reset makes the reference adapters of the policy's base, without a head of "
        "its own; choose k1 to k3 and --reference start"
    ),
    ("adapters", "critic of its own"): (
        "the critic's adapters are over the policy's base"
    ),
    ("shared trunk", "critic elsewhere"): "the critic is then a head on the policy",
    ("critic apart", "joint guards"): "a guard skips a step of both",
    ("critic of a reward model", "not one reward model"): (
        "the critic starts from exactly one"
    ),
    ("options of reward models", "no reward model"): "no model is placed or stored",
    ("adapters", "rounded sampler"): (
        "the dtype of its base is that of --reference-storage"
    ),
    ("sampler outside", "drawn here"): (
        "only the decoder beside the trainer draws these, and records likeliest tokens"
    ),
    ("server", "known to the decoder"): (
        "a server chooses which rows it runs together and where they end, and returns "
        "no entropies"
    ),
    ("environment", "how prompts are written"): "it writes its prompts from the rows",
    ("environment", "decoder options"): (
        "episodes have a cache of their own, record no likeliest tokens, and end their "
        "turns at a stop token"
    ),
    ("one width", "buckets"): "all of its batches have one width",
    ("redraws", "no known groups"): (
        "groups of equal rewards are drawn again, but there are no groups, or they are "
        "known too late"
    ),
    ("other sampler", "uncorrected"): (
        "recompute does not correct for the sampler's distance; truncate does"
    ),
    ("draws beside", "mixture apart"): (
        "its mixture or greedy responses are drawn beside the policy's samples, in one "
        "program"
    ),
    ("packing", "context"): "a head reads packed states from any column",
    ("packing", "padded loss"): "its loss reads padded rows",
    ("alternatives", "stale sampler"): "an older policy drew the responses",
    ("reference's samples", "not the start"): (
        "the reference is sampled by the policy's own program"
    ),
}
"""The reason why two features cannot be combined, to follow "because"."""


def check(config: Config) -> None:
    """Raises InputError if a config combines two features of a pair of the table."""
    for (one, other), reason in TABLE.items():
        exclude(CHOICES[one](config), CHOICES[other](config), reason=reason)


def first(choices: Choices) -> str | None:
    """Returns the first option that is chosen, or None."""
    return next((option for option, chosen in choices.items() if chosen), None)


def exclude(choices: Choices, others: Choices, *, reason: str) -> None:
    """Raises InputError if an option of `choices` and one of `others` are chosen.

    Args:
      reason: why they exclude each other, to follow "because".
    """
    option, other = first(choices), first(others)
    if option is not None and other is not None:
        raise InputError(
            f"{option} cannot be combined with {other}, because {reason}; leave one of "
            f"them out"
        )


def need(choices: Choices, other: str, *, has: bool) -> None:
    """Raises InputError if an option is chosen without another one that it needs.

    Args:
      other: the option that is needed; `has` says whether it is set.
    """
    option = first(choices)
    if option is not None and not has:
        raise InputError(
            f"{option}: expected {other} with it, got none; give both, or leave it out"
        )
