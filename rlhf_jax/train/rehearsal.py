"""The rehearsal of a policy gradient: its first iteration up to the update.

It runs before there is a run folder, so that a reward that fails, shapes that do not
fit and log-probs that contradict each other cost nothing but the start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.devices import processes


def rehearse(
    rollout: Rollout,
    *,
    score: Callable[[Rollout], dict[str, Any]],
    learn: Callable[..., Any],
    measure: Callable[..., self_check.Measured],
    dtype: str,
    sampler_tolerance: float = 0.0,
    storage_tolerance: float = 0.0,
    expect_equal: bool,
) -> None:
    """Scores the first rollout, traces the update on it, and checks the log-probs.

    Args:
      rollout: of the first step, with the policy before any update.
      score: what the rollout gives `learn`, by the name of the argument; "ref_logprobs"
        is one of them, and None without a reference.
      learn: traced with `rollout` and what `score` returned, and not run.
      measure: `self_check.measure` of a rollout and its `ref_logprobs`.
      dtype: the policy's compute dtype, which sets the tolerance.
      sampler_tolerance: what the storage of the sampler's parameters adds to it, nats
        per token.
      storage_tolerance: what the reference's storage adds to it, nats per token.
      expect_equal: the policy must start as the reference.

    Raises:
      SelfCheckError: the policy's log-probs are not the sampler's, or the KL to the
        reference does not start at 0.
    """
    scored = score(rollout)
    jax.eval_shape(learn, rollout=rollout, **scored)
    self_check.require(
        processes.whole(measure(rollout=rollout, ref_logprobs=scored["ref_logprobs"])),
        tolerance=self_check.TOLERANCE[dtype],
        sampler_tolerance=sampler_tolerance,
        storage_tolerance=storage_tolerance,
        expect_equal=expect_equal,
    )
