"""Routing replay: the trainer routes tokens to the experts of an earlier pass.

    sampler   R3: the experts that the sampler recorded, for old and new log-probs
    old       R2: the experts of the policy before the updates, for new log-probs

Each pass weights the replayed experts by its own router, with a gradient. The choice of
experts has none.

The sampler records every token that it runs, in whatever cache it decodes: prompts and
the observations of an episode too, as sampled tokens attend to the states of these. The
last token of a row is drawn, but not run: its router chooses, and no log-prob reads it.
The record takes 4·L·k bytes per token (1.5 kB in Qwen3-30B-A3B), as plans say.

Source: R2 is Zheng et al. 2025, arXiv:2507.18071, section 5.3; R3 Ma et al. 2025,
arXiv:2510.11370, section 4.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Literal, get_args

from rlhf_jax.algorithms import flow
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.packing import SizedPacking

if TYPE_CHECKING:
    from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient

Params = Any
Source = Literal["sampler", "old"]


@dataclasses.dataclass(frozen=True)
class RoutingReplay:
    """The pass whose experts are replayed."""

    source: Source = "sampler"
    """Pass whose experts are replayed."""
    reference: bool = False
    """Whether references replay them too."""

    def __post_init__(self) -> None:
        checks.one_of(source=self.source, among=get_args(Source))


def recorded(
    rollout: Rollout,
    params: Params,
    *,
    recipe: PolicyGradient,
    packing: SizedPacking | None,
) -> Rollout:
    """The rollout with the experts to replay, if the recipe replays any.

    A record that the rollout has already is kept: the trainer records before it runs
    a reference that replays, which may be on devices of its own.

    Raises:
      InputError: the sampler's experts are missing.
    """
    replay = recipe.routing_replay
    if replay is None or rollout.experts is not None:
        return rollout
    if replay.source == "old":
        return flow.rollout.record_experts(
            rollout,
            params,
            model=recipe.model,
            max_new_tokens=recipe.max_new_tokens,
            packing=packing,
            group_size=recipe.rows_per_prompt,
        )
    raise InputError(
        "routing_replay: expected a rollout with the experts that its sampler chose, "
        "got one without; sample with the library's own decoder or with a server that "
        "returns them, or choose old"
    )
