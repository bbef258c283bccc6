"""Advantages: how much better an action was than its critic or its group expects."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Float32

from rlhf_jax.functional import checks

Array = jax.Array


def gae(
    *,
    rewards: Float32[Array, "B S"],
    values: Float32[Array, "B S"],
    mask: Bool[Array, "B S"],
    gamma: checks.Scalar,
    lam: checks.Scalar,
) -> tuple[Float32[Array, "B S"], Float32[Array, "B S"]]:
    """Generalised advantages A_t = δ_t + γλ·A_{t+1}, δ_t = r_t + γ·V_{t+1} - V_t.

    values[:, t] is the value of the state just before tokens[:, t]. The episode ends
    with the response, so the value after its last token is 0:

        column       0    1    2    3    4    5
        tokens       ·   The  cat  sat  EOS   ·
        mask         0    0    1    1    1    0
        δ_2 = r_2 + γ·V_3 - V_2        δ_4 = r_4 - V_4

    Columns outside the mask are not steps. In an episode of several turns, the state
    after a turn's last token is the state before the next sampled token:

        tokens       The  cat  EOS   it   is   sat  EOS      it is: observed
        mask          0    1    1    0    0    1    1
        δ_2 = r_2 + γ·V_5 - V_2        A_2 = δ_2 + γλ·A_5

    Args:
      rewards: f32[B, S], reward units.
      values: f32[B, S], reward units.
      mask: bool[B, S], sampled tokens, EOS included; any number of runs in each row.
      gamma: γ, discount per sampled token, from 0 to 1.
      lam: λ, from 0 to 1; 0 is one-step TD, 1 is the discounted return minus the value.

    Returns:
      f32[B, S] advantages and f32[B, S] returns (advantages + values), reward units,
      both 0 outside the mask.

    Source: Schulman et al. 2015, arXiv:1506.02438, eq. 16.

    >>> rewards = jnp.array([[0.0, 0.0, 1.0, 0.0]])
    >>> values = jnp.array([[9.0, 0.5, 0.75, 9.0]])
    >>> mask = jnp.array([[False, True, True, False]])
    >>> arrays = {"rewards": rewards, "values": values, "mask": mask}
    >>> advantages, returns = gae(**arrays, gamma=1.0, lam=1.0)
    >>> print(advantages, returns)
    [[0.   0.5  0.25 0.  ]] [[0. 1. 1. 0.]]
    >>> print(gae(**arrays, gamma=1.0, lam=0.0)[0])  # one-step TD errors
    [[0.   0.25 0.25 0.  ]]
    """
    checks.shape((None, None), rewards=rewards)
    checks.masked_floats(mask, rewards=rewards, values=values)
    checks.fraction(gamma=gamma, lam=lam)

    # Before any arithmetic: the critic's numbers outside the mask may be anything.
    values = jnp.where(mask, values, 0.0)
    deltas = jnp.where(mask, rewards, 0.0) + gamma * _next(values, mask) - values

    def step(next_advantage: Array, column: tuple[Array, Array]):
        delta, inside = column
        advantage = jnp.where(inside, delta + gamma * lam * next_advantage, 0.0)
        # The carry jumps over observed columns: γλ counts sampled tokens alone.
        return jnp.where(inside, advantage, next_advantage), advantage

    end = jnp.zeros_like(deltas[:, 0])
    # A scan over columns from the last to the first, all rows side by side.
    _, advantages = jax.lax.scan(step, end, (deltas.T, mask.T), reverse=True)
    return advantages.T, advantages.T + values


def _next(values: Array, mask: Array) -> Array:
    """f32[B, S]: the value in the next column of the mask, 0 where there is none.

    mask          0    1    1    0    0    1    1
    values        0    a    b    0    0    c    d
    next          a    b    c    c    c    d    0
    """

    # A scan, not a gather: the compiler would fuse a gather with the sum that follows,
    # which rounds differently and would change recorded runs.
    def fill(following: Array, column: tuple[Array, Array]):
        value, inside = column
        following = jnp.where(inside, value, following)
        return following, following

    end = jnp.zeros_like(values[:, 0])
    _, filled = jax.lax.scan(fill, end, (values.T, mask.T), reverse=True)
    return jnp.pad(filled.T[:, 1:], ((0, 0), (0, 1)))


def group_relative(
    scores: Float32[Array, " B"],
    *,
    group_size: int,
    normalise: bool = True,
    eps: checks.Scalar = 1e-6,
    row_mask: Bool[Array, " B"] | None = None,
) -> Float32[Array, " B"]:
    """A_i = (s_i - mean(s)) / (std(s) + eps) over the responses to one prompt.

        row        0  1  2 | 3  4  5       group_size = 3: rows g·G to g·G + G - 1
        scores     1  0  2 | 4  4  4
        A          0 -1  1 | 0  0  0       equal scores have no advantage

    The mean includes the response's own score, so without the division by std the
    expected policy gradient is (G - 1)/G of the true one. The division biases its
    direction: prompts with nearly equal scores and prompts with very different scores
    contribute equally.

    Both statements assume a loss that sums over each response: aggregation "constant",
    or responses of one length. Where lengths differ, "token_mean" and "sequence_mean"
    divide by lengths that are correlated with scores. The direction is then biased even
    without std: late tokens, which only long responses have, get smaller weights than
    early ones.

    Args:
      normalise: divide by the standard deviation of the group (ddof 1), as published.
      eps: added to the deviation, reward units.
      row_mask: bool[B], responses that count; the others are in neither mean nor
        deviation, and have advantage 0. None keeps all.

    Returns:
      f32[B], in standard deviations, or in reward units if not normalised; 0 for the
      only response of a group that counts.

    Source: Shao et al. 2024, arXiv:2402.03300, section 4.1.2; without the std: Liu et
    al. 2025, arXiv:2503.20783, section 3.2.

    >>> scores = jnp.array([1.0, 0.0, 2.0, 4.0, 4.0, 4.0])
    >>> print(group_relative(scores, group_size=3))
    [ 0. -1.  1.  0.  0.  0.]
    >>> print(group_relative(scores * 10, group_size=3, normalise=False))
    [  0. -10.  10.   0.   0.   0.]
    """
    checks.non_negative(eps=eps)
    groups = _groups(scores, group_size)
    within = _within(scores, row_mask, group_size)
    # Equal scores have advantage 0 exactly, although their mean may be rounded.
    equal = _all_equal(groups, within)
    trained = ~equal
    if within is not None:
        trained &= within
        # The mean of no row and the deviation of one are 0/0, so read all rows there.
        groups, within = jnp.where(within, groups, 0.0), within | equal
    centred = groups - jnp.mean(groups, axis=1, keepdims=True, where=within)
    if normalise:
        # Replace equal scores: the slope of the square root at 0 is infinite.
        others = jnp.arange(group_size, dtype=jnp.float32)
        groups = jnp.where(equal, others, groups)
        std = jnp.std(groups, axis=1, ddof=1, keepdims=True, where=within)
        centred = centred / (std + eps)
    return jnp.where(trained, centred, 0.0).reshape(scores.shape)


def leave_one_out(
    scores: Float32[Array, " B"],
    *,
    group_size: int,
    row_mask: Bool[Array, " B"] | None = None,
) -> Float32[Array, " B"]:
    """A_i = s_i - mean of the other responses' scores to the same prompt.

        row        0     1    2            group_size = 3
        scores     1     0    2
        A          0  -1.5  1.5            0 = 1 - (0 + 2)/2

    The baseline does not include the response's own score, so the expected policy
    gradient is the true one, with aggregation "constant" or responses of one length.
    The advantage is G/(G - 1) times the advantage over the mean of the whole group.

    Args:
      row_mask: bool[B], responses that count; the others are not in the mean, and have
        advantage 0. None keeps all.

    Returns:
      f32[B], reward units; 0 for the only response of a group that counts.

    Source: Kool, van Hoof and Welling 2019; Ahmadian et al. 2024, arXiv:2402.14740,
    eq. 8.

    >>> scores = jnp.array([1.0, 0.0, 2.0, 4.0, 4.0, 4.0])
    >>> print(leave_one_out(scores, group_size=3))
    [ 0.  -1.5  1.5  0.   0.   0. ]
    >>> print(leave_one_out(scores, group_size=2))
    [ 1. -1. -2.  2.  0.  0.]
    >>> row_mask = jnp.array([True, False, True, True, False, False])
    >>> print(leave_one_out(scores, group_size=3, row_mask=row_mask))
    [-1.  0.  1.  0.  0.  0.]
    """
    groups = _groups(scores, group_size)
    within = _within(scores, row_mask, group_size)
    equal = _all_equal(groups, within)
    # Subtracting the largest score changes no advantage, and keeps the digits in which
    # large scores differ.
    level = jnp.max(groups, axis=1, keepdims=True, where=within, initial=-jnp.inf)
    groups = groups - jax.lax.stop_gradient(jnp.where(equal, 0.0, level))
    others = jnp.sum(groups, axis=1, keepdims=True, where=within) - groups
    count, trained = jnp.asarray(group_size, jnp.float32), ~equal
    if within is not None:
        count = within.sum(axis=1, keepdims=True, dtype=jnp.float32)
        trained &= within
    advantages = groups - others / jnp.maximum(count - 1.0, 1.0)
    return jnp.where(trained, advantages, 0.0).reshape(scores.shape)


def length_weighted(
    scores: Float32[Array, " B"],
    *,
    lengths: Float32[Array, " B"],
    group_size: int,
    row_mask: Bool[Array, " B"] | None = None,
) -> Float32[Array, " B"]:
    """A_i = s_i - Σ_j l_j·s_j / Σ_j l_j, over the responses to the same prompt.

        row        0  1  2            group_size = 3
        scores     1  0  2
        lengths    1  1  2
        A        -¼ -5/4 ¾            the baseline is (1 + 0 + 4)/4

    The baseline has the least variance where the squared norm of a response's gradient
    is proportional to its length. It includes the response's own score, weighted by
    length, so the direction of the expected gradient is biased where lengths differ.

    Args:
      lengths: f32[B], response tokens.
      row_mask: bool[B], responses that count; the others are not in the baseline, and
        have advantage 0. None keeps all.

    Returns:
      f32[B], reward units; 0 in a group of equal scores. The gradient reaches `scores`.

    Source: Hao et al. 2025 (OPO), arXiv:2505.23585.

    >>> scores, lengths = jnp.array([1.0, 0.0, 2.0]), jnp.array([1.0, 1.0, 2.0])
    >>> print(length_weighted(scores, lengths=lengths, group_size=3))
    [-0.25 -1.25  0.75]
    >>> row_mask = jnp.array([True, True, False])
    >>> print(
    ...     length_weighted(scores, lengths=lengths, group_size=3, row_mask=row_mask)
    ... )
    [ 0.5 -0.5  0. ]
    """
    checks.same_shape(scores=scores, lengths=lengths)
    groups = _groups(scores, group_size)
    within = _within(scores, row_mask, group_size)
    equal = _all_equal(groups, within)
    trained, weights = ~equal, jax.lax.stop_gradient(_groups(lengths, group_size))
    if within is not None:
        trained &= within
        groups = jnp.where(within, groups, 0.0)
        weights = jnp.where(within, weights, 0.0)
    total = jnp.maximum(weights.sum(axis=1, keepdims=True), 1.0)
    baseline = (weights * groups).sum(axis=1, keepdims=True) / total
    return jnp.where(trained, groups - baseline, 0.0).reshape(scores.shape)


def over_greedy(
    scores: Float32[Array, " B"],
    *,
    group_size: int,
    row_mask: Bool[Array, " B"] | None = None,
) -> Float32[Array, " B"]:
    """A_i = s_i - s_greedy, where the greedy response is the last row of its group.

        row        0  1  2            group_size = 3: two samples, one greedy response
        scores     1  0  2
        A         -1 -2  0

    The baseline does not depend on any sample, so the expected policy gradient is the
    true one, with aggregation "constant" or responses of one length.

    Args:
      row_mask: bool[B], responses that count; the others have advantage 0, and so has
        every response of a group whose greedy response does not count. None keeps all.

    Returns:
      f32[B], reward units. The gradient reaches `scores`.

    Source: Li et al. 2023 (ReMax), arXiv:2310.10505.

    >>> scores = jnp.array([1.0, 0.0, 2.0, 4.0, 4.0, 4.0])
    >>> print(over_greedy(scores, group_size=3))
    [-1. -2.  0.  0.  0.  0.]
    >>> print(over_greedy(scores, group_size=2))
    [ 1.  0. -2.  0.  0.  0.]
    """
    groups = _groups(scores, group_size)
    within = _within(scores, row_mask, group_size)
    if within is None:
        return (groups - groups[:, -1:]).reshape(scores.shape)
    both = within & within[:, -1:]
    # Select before subtracting: a missing score may be NaN.
    groups = jnp.where(both, groups, 0.0)
    return jnp.where(both, groups - groups[:, -1:], 0.0).reshape(scores.shape)


def decoupled(
    rewards: Float32[Array, "K B"],
    *,
    weights: Float32[Array, " K"],
    group_size: int,
    eps: checks.Scalar = 1e-6,
    row_mask: Bool[Array, " B"] | None = None,
) -> Float32[Array, " B"]:
    """A = (S - mean(S))/(std(S) + eps) over the batch, S_i = Σ_k w_k·A_k,i.

    A_k is `group_relative` of reward k alone, divided by its own deviation. So the
    effect of a weight does not depend on the scale of its reward, and two responses
    with equal sums of rewards may have different advantages. The deviations bias the
    direction of the expected gradient.

    Args:
      rewards: f32[K, B], each in its own unit.
      weights: f32[K]; a weight of 0 leaves out its reward.
      eps: added to every deviation (ddof 1).
      row_mask: bool[B], responses that count; the others are in no mean or deviation,
        and have advantage 0. None keeps all.

    Returns:
      f32[B], in standard deviations. The gradient reaches `rewards`, `weights`
      and `eps`.

    Source: Liu et al. 2026 (GDPO), arXiv:2601.05242, as in TRL's "normalize_then_sum".

    >>> rewards = jnp.array([[1.0, 0.0, 1.0, 0.0], [0.0, 9.0, 9.0, 0.0]])
    >>> options = {"group_size": 4, "eps": 0.0}
    >>> print(decoupled(rewards, weights=jnp.ones(2), **options))
    [ 0.     0.     1.225 -1.225]
    >>> print(decoupled(rewards, weights=jnp.array([1.0, 0.0]), **options))
    [ 0.866 -0.866  0.866 -0.866]
    """
    checks.shape((None, None), rewards=rewards)
    checks.same_shape(weights=weights, rewards=rewards[:, 0])
    checks.float32(weights=weights)
    total = jnp.zeros_like(rewards[0])
    for weight, reward in zip(weights, rewards, strict=True):
        own = group_relative(
            jnp.where(weight == 0, 0.0, reward),
            group_size=group_size,
            eps=eps,
            row_mask=row_mask,
        )
        total += weight * own
    # The batch as one group; masked rows have advantage 0 here too.
    return group_relative(total, group_size=total.size, eps=eps, row_mask=row_mask)


def equal_groups(
    scores: Float32[Array, " B"],
    *,
    group_size: int,
    row_mask: Bool[Array, " B"] | None = None,
) -> Bool[Array, " groups"]:
    """True for groups whose scores are all equal: their advantages are 0.

    Args:
      row_mask: bool[B], responses that count; a group with one or none counts as equal.
        None keeps all.

    >>> scores = jnp.array([1.0, 0.0, 2.0, 4.0, 4.0, 4.0])
    >>> print(equal_groups(scores, group_size=3))
    [False  True]
    >>> print(equal_groups(scores, group_size=2))
    [False False  True]
    """
    within = _within(scores, row_mask, group_size)
    return _all_equal(_groups(scores, group_size), within)[:, 0]


def _groups(scores: Array, group_size: int) -> Array:
    checks.shape((None,), scores=scores)
    checks.float32(scores=scores)
    checks.groups(scores.shape[0], group_size=group_size, least=2)
    return scores.reshape(-1, group_size)


def _within(scores: Array, row_mask: Array | None, group_size: int) -> Array | None:
    if row_mask is None:
        return None
    checks.same_shape(scores=scores, row_mask=row_mask)
    checks.boolean(row_mask=row_mask)
    return row_mask.reshape(-1, group_size)


def _all_equal(groups: Array, within: Array | None = None) -> Array:
    """bool[B / G, 1]: groups whose scores are equal, or that count no score."""
    if within is None:
        return (groups == groups[:, :1]).all(axis=1, keepdims=True)
    reduction = {"axis": 1, "keepdims": True, "where": within}
    largest = jnp.max(groups, initial=-jnp.inf, **reduction)
    return largest <= jnp.min(groups, initial=jnp.inf, **reduction)
