"""The effect of aggregations on a policy gradient with different lengths.

The world has two tokens, one of which stops; a response has 1 to 3 tokens:

    response     S     aS    aaS   aaa
    tokens       1     2     3     3

One logit per depth gives the probability of S. NumPy in float64 computes the gradient
of E[r], and of the same with each response's share divided by a number of tokens.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import advantages, kl_penalty, losses
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.penalty import Penalty

STOPS = np.array([0.65, 0.45, 0.38])  # chance of S at depths 0, 1 and 2
REF_STOPS = np.array([0.3, 0.6, 0.5])
REWARDS = np.array([1.6, 0.2, 2.14, 1.01])
LENGTHS = np.array([1, 2, 3, 3])
TAKEN = np.array([[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 0]])  # 1 where it is S
MASK = np.arange(3)[None, :] < LENGTHS[:, None]
AGGREGATIONS = ("token_mean", "sequence_mean", "constant")
# Of the issue that asked for this: token_mean and sequence_mean, groups of 2.
RATIOS = {"token_mean": (0.65, 0.59, 0.45), "sequence_mean": (0.69, 0.49, 0.33)}


def logprobs_of(stops):
    """f64[4, 3], log-probs of the tokens of each response, 0 after its end."""
    return np.where(MASK, np.where(TAKEN, np.log(stops), np.log1p(-stops)), 0.0)


CHANCES = np.exp(logprobs_of(STOPS).sum(axis=1))
SCORES = np.where(MASK, TAKEN - STOPS, 0.0)  # ∂ log π(token) / ∂ logit of its depth
TRUE = (CHANCES * REWARDS) @ SCORES


def expected(baseline, aggregation, constant=3.0):
    """f64[3]: the expected ascent direction over pairs of responses, by hand."""
    total = np.zeros(3)
    for i, j in np.ndindex(4, 4):
        mean = {"group": (REWARDS[i] + REWARDS[j]) / 2, "others": REWARDS[j]}[baseline]
        divisor = {
            "token_mean": LENGTHS[i] + LENGTHS[j],
            "sequence_mean": 2 * LENGTHS[i],
            "constant": 2 * constant,
        }[aggregation]
        # (j, i) is a pair as likely: the second row is added by symmetry.
        share = 2 * CHANCES[i] * CHANCES[j]
        total += share * (REWARDS[i] - mean) / divisor * SCORES[i]
    return total


def gradient_of(baseline, aggregation, constant=3.0):
    """f64[3]: the library's expected ascent direction, with pairs as minibatches."""
    form = {"group": advantages.group_relative, "others": advantages.leave_one_out}
    options = {"normalise": False} if baseline == "group" else {}
    scale = constant if aggregation == "constant" else None

    def loss(logits, rows):
        stop, go = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
        mask = jnp.asarray(MASK)[rows]
        taken = jnp.asarray(TAKEN, bool)[rows]
        logprobs = jnp.where(mask, jnp.where(taken, stop[None], go[None]), 0.0)
        scores = jnp.asarray(REWARDS, jnp.float32)[rows]
        of_rows = form[baseline](scores, group_size=2, **options)
        return losses.policy_loss(
            logprobs=logprobs,
            old_logprobs=jax.lax.stop_gradient(logprobs),
            advantages=jnp.broadcast_to(of_rows[:, None], mask.shape),
            mask=mask,
            clip_range=0.2,
            aggregation=aggregation,
            loss_scale_factor=scale,
        )[0]

    logits = jnp.asarray(np.log(STOPS) - np.log1p(-STOPS), jnp.float32)
    pairs = np.array([*np.ndindex(4, 4)])
    gradients = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(logits, pairs)
    chances = CHANCES[pairs].prod(axis=1)
    return -(chances @ np.asarray(gradients, np.float64))


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize(("baseline", "share"), [("others", 1.0), ("group", 0.5)])
def test_only_the_constant_keeps_the_direction(baseline, share, aggregation):
    gradient = gradient_of(baseline, aggregation)
    np.testing.assert_allclose(gradient, expected(baseline, aggregation), rtol=2e-5)
    ratios = gradient / (share * TRUE)
    if aggregation == "constant":
        np.testing.assert_allclose(ratios, 1 / 3, rtol=2e-5)
    else:
        np.testing.assert_allclose(ratios, RATIOS[aggregation], atol=0.006)


@pytest.mark.slow
def test_a_constant_of_1_gives_the_gradient_itself():
    np.testing.assert_allclose(gradient_of("others", "constant", 1.0), TRUE, rtol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_names_of_kl_gradients_hold_for_the_constant(aggregation):
    """k1 in the loss has gradient zero, and k2 of responses the full reverse KL's."""
    x = logprobs_of(STOPS) - logprobs_of(REF_STOPS)
    full = (CHANCES * x.sum(axis=1)) @ SCORES

    def gradient(penalty):
        def loss(logits, rows):
            stop, go = jax.nn.log_sigmoid(logits), jax.nn.log_sigmoid(-logits)
            mask = jnp.asarray(MASK)[rows]
            taken = jnp.asarray(TAKEN, bool)[rows]
            logprobs = jnp.where(mask, jnp.where(taken, stop[None], go[None]), 0.0)
            return kl_penalty.kl_loss(
                penalty=penalty,
                logprobs=logprobs,
                old_logprobs=jax.lax.stop_gradient(logprobs),
                ref_logprobs=jnp.asarray(logprobs_of(REF_STOPS), jnp.float32)[rows],
                mask=mask,
                weights=losses.token_weights(
                    mask,
                    aggregation=aggregation,
                    loss_scale_factor=1.0 if aggregation == "constant" else None,
                ),
            )[0]

        logits = jnp.asarray(np.log(STOPS) - np.log1p(-STOPS), jnp.float32)
        pairs = np.array([*np.ndindex(4, 4)])
        of_pairs = jax.jit(jax.vmap(jax.grad(loss), in_axes=(None, 0)))(logits, pairs)
        return CHANCES[pairs].prod(axis=1) @ np.asarray(of_pairs, np.float64)

    zero = gradient(Penalty(placement="loss"))
    reverse = gradient(Penalty(value_estimator="k2", placement="loss", per="response"))
    if aggregation == "constant":
        np.testing.assert_allclose(zero, 0, atol=1e-6)
        np.testing.assert_allclose(reverse, full, rtol=2e-5)
    else:
        assert np.abs(zero).max() > 0.02
        ratios = reverse / full
        assert np.ptp(ratios) > 0.1


def test_a_constant_needs_its_number_and_a_mean_has_none():
    mask = jnp.asarray(MASK)
    with pytest.raises(checks.InputError, match=r"loss_scale_factor: .* got None; giv"):
        losses.token_weights(mask, aggregation="constant")
    with pytest.raises(checks.InputError, match=r"factor: .* 'token_mean'.* got 3.0; "):
        losses.token_weights(mask, loss_scale_factor=3.0)
    with pytest.raises(checks.InputError, match=r"loss_scale_factor: expected .* abov"):
        losses.token_weights(mask, aggregation="constant", loss_scale_factor=0.0)
