"""Shaping of a reward's scores, before they become rewards of tokens."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.flow.score import ended
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.errors import refuse
from rlhf_jax.roles.rewards.scores import RunningMoments, update_moments

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class ScoreShaping:
    """Options for shaping a reward's scores."""

    normalise: bool = False
    """Whether scores are normalised: the running mean of all scores is subtracted, then
    they are divided by the running standard deviation."""
    clip: float | None = None
    """Largest absolute score after normalising, reward units; None does not clip."""
    length_penalty: float = 0.0
    """Penalty subtracted from the score per response token, reward units."""
    overlong_penalty: float = 0.0
    """Largest penalty for a long response, reward units: it rises linearly over the
    overlong_buffer tokens after the first overlong_after (DAPO: 1)."""
    overlong_after: int = 0
    """With overlong_penalty: number of tokens without a penalty (DAPO: 16384)."""
    overlong_buffer: int = 0
    """With overlong_penalty: number of tokens over which the penalty rises to its
    largest value (DAPO: 4096)."""
    missing_stop_score: float | None = None
    """Score of a response without a stop token, in place of the reward's score (n-plus:
    -1); None keeps the reward's score."""
    missing_stop_penalty: float = 0.0
    """Penalty subtracted from the score of a response without a stop token, reward
    units (TRL)."""

    def __post_init__(self) -> None:
        checks.non_negative(
            length_penalty=self.length_penalty,
            missing_stop_penalty=self.missing_stop_penalty,
            overlong_penalty=self.overlong_penalty,
            overlong_after=self.overlong_after,
            overlong_buffer=self.overlong_buffer,
        )
        checks.positive(clip=self.clip)
        checks.finite(missing_stop_score=self.missing_stop_score)
        refuse(self._faults())

    def _faults(self) -> Iterator[str]:
        if bool(self.overlong_penalty) != bool(self.overlong_buffer):
            yield (
                f"expected overlong_penalty and overlong_buffer together, got "
                f"{self.overlong_penalty:g} and {self.overlong_buffer}; give both, or "
                f"neither"
            )
        if self.overlong_after and not self.overlong_penalty:
            yield (
                f"overlong_after: expected an overlong_penalty with it, got only "
                f"{self.overlong_after}; give overlong_penalty, or leave it out"
            )
        if self.missing_stop_score is not None and self.missing_stop_penalty:
            yield (
                f"expected one of missing_stop_score and missing_stop_penalty, got "
                f"{self.missing_stop_score} and {self.missing_stop_penalty}; replace "
                f"the score or subtract from it"
            )

    @property
    def reads_stops(self) -> bool:
        """True if an option depends on whether a response ended with a stop token."""
        return self.missing_stop_score is not None or bool(self.missing_stop_penalty)


AS_THEY_ARE = ScoreShaping()


def shape(
    scores: Array,
    *,
    moments: RunningMoments,
    rollout: Rollout,
    stop_ids: tuple[int, ...],
    shaping: ScoreShaping,
) -> Array:
    """s' = clip((s - mean) / std, ±c) - a·length - p·over, then the "EOS trick".

    The soft overlong penalty is over = clip((length - overlong_after)/overlong_buffer,
    0, 1).

    Args:
      scores: f32[B], reward units, one per response.
      moments: of all scores so far, these included; read by `shaping.normalise`.

    Returns:
      f32[B], reward units (standard deviations where normalised).

    Source: Huang et al. 2024, arXiv:2403.17031, detail 7, for the EOS trick; Yu et al.
    2025 (DAPO), arXiv:2503.14476, eq. 13, for the overlong penalty.
    """
    scores = _normalised(scores, moments=moments, shaping=shaping)
    if shaping.clip is not None:
        scores = jnp.clip(scores, -shaping.clip, shaping.clip)
    # After the clip: penalties for length and a missing stop must not be clipped away.
    if shaping.length_penalty:
        length = rollout.response_mask.sum(axis=1, dtype=jnp.float32)
        scores = scores - shaping.length_penalty * length
    if shaping.overlong_penalty:
        length = rollout.response_mask.sum(axis=1, dtype=jnp.float32)
        over = (length - shaping.overlong_after) / shaping.overlong_buffer
        scores = scores - shaping.overlong_penalty * jnp.clip(over, 0.0, 1.0)
    if shaping.missing_stop_penalty:
        missing = ~ended(rollout, stop_ids=stop_ids)
        scores = jnp.where(missing, scores - shaping.missing_stop_penalty, scores)
    if shaping.missing_stop_score is not None:
        stopped = ended(rollout, stop_ids=stop_ids)
        # Last: it replaces the result of the steps above.
        scores = jnp.where(stopped, scores, shaping.missing_stop_score)
    return scores


def shape_turns(
    turns: Array,
    *,
    ends: Array | None,
    scores: Array,
    moments: RunningMoments,
    rollout: Rollout,
    stop_ids: tuple[int, ...],
    shaping: ScoreShaping,
) -> Array:
    """The rewards of earlier turns in the unit of `shape`: r'_k = f·(r_k - mean/n)/std.

    n is the number of turns. f = c/|s| where the clip acts on the score s of the whole
    episode, 0 where `missing_stop_score` replaces it, else 1. So each turn keeps its
    share of the shaped score. The last turn gets the rest, penalties included.

    Args:
      turns, ends: f32[B, S] and bool[B, S], as `Scores.turns` and `Scores.turn_ends`.
      scores: f32[B], reward units, before shaping.
      the others: as in `shape`.

    Returns:
      f32[B, S], reward units (standard deviations where normalised).

    Raises:
      InputError: scores are normalised and `ends` is None.
    """
    if shaping.normalise:
        if ends is None:
            raise InputError(
                "turn_ends: expected the last token of every turn with rewards of "
                "turns, as normalising subtracts a share of the mean from each, got "
                "None; give Scores.turn_ends, or leave scores.normalise out"
            )
        # Turns that end at this column or later: 1 for the last turn, n for the first.
        later = jnp.cumsum(ends[:, ::-1], axis=1, dtype=jnp.int32)[:, ::-1]
        number = jnp.maximum(later[:, :1], 1).astype(jnp.float32)
        mean = (moments.mean + moments.mean_rest) / number
        centred = jnp.where(ends & (later > 1), turns - mean, 0.0)
        turns = centred * jax.lax.rsqrt(moments.variance + 1e-8)
        scores = _normalised(scores, moments=moments, shaping=shaping)
    if shaping.clip is not None:
        # 1 where the clip does not act; never a division by a score of 0.
        share = shaping.clip / jnp.maximum(jnp.abs(scores), shaping.clip)
        turns = turns * share[:, None]
    if shaping.missing_stop_score is not None:
        stopped = ended(rollout, stop_ids=stop_ids)
        turns = jnp.where(stopped[:, None], turns, 0.0)
    return turns


def _normalised(
    scores: Array, *, moments: RunningMoments, shaping: ScoreShaping
) -> Array:
    if not shaping.normalise:
        return scores
    # In this order: mean + rest would round the rest away.
    centred = (scores - moments.mean) - moments.mean_rest
    return centred * jax.lax.rsqrt(moments.variance + 1e-8)


def next_moments(
    moments: RunningMoments, scores: Array, *, row_mask: Array | None = None
) -> RunningMoments:
    """Adds a batch's scores to the moments, unless one of them is not finite."""
    return jax.tree.map(
        lambda new, old: jnp.where(jnp.isfinite(scores).all(), new, old),
        update_moments(moments, scores, row_mask=row_mask),
        moments,
    )
