import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys

from rlhf_jax import critic, frozen
from rlhf_jax.algorithms.flow import score, shaping
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.roles.rewards import no_moments

SCORES = jnp.asarray([1.0, -0.5, 0.25, 2.0], jnp.float32)
POLICY = toys.params()
REFERENCE = toys.freeze(toys.params(seed=5))
CRITIC = toys.scorer(seed=6)

scored_by = functools.partial(
    score.score,
    scores=SCORES,
    model=toys.GPT2,
    max_new_tokens=toys.SIZE,
    temperature=0.7,
)


valued = functools.partial(
    toys.jit(
        functools.partial(
            score.response_values,
            model=toys.GPT2,
            max_new_tokens=toys.SIZE,
            after_stop=False,
        )
    ),
    CRITIC,
)


@pytest.fixture(scope="module")
def rollout():
    return toys.sampled(POLICY)


@pytest.fixture(scope="module")
def scored(rollout):
    return toys.jit(scored_by)(
        rollout, reference=REFERENCE, values=valued(rollout=rollout)
    )


def test_every_number_of_a_scored_rollout(scored, rollout):
    response, tokens = np.asarray(rollout.response_mask), np.asarray(rollout.tokens)
    logits = toys.logits(
        REFERENCE.stored, model=toys.GPT2, tokens=rollout.tokens, mask=rollout.mask
    )
    expected = oracles.token_logprobs(np.asarray(logits, np.float64), tokens, 0.7)
    expected = np.where(response, expected, 0.0)
    np.testing.assert_allclose(scored.ref_logprobs, expected, atol=1e-5)
    for b, t in oracles.entries(response):  # k1 by hand
        np.testing.assert_allclose(
            scored.kl[b, t],
            float(rollout.old_logprobs[b, t]) - expected[b, t],
            atol=1e-5,
        )
    assert np.abs(scored.kl).max() > 0.1
    np.testing.assert_array_equal(np.where(response, 0.0, scored.kl), 0.0)
    # The value at a token has seen what is to its left.
    tail = dataclasses.replace(
        rollout, tokens=rollout.tokens.at[:, -1].set(12), mask=rollout.mask
    )
    moved = valued(rollout=tail)
    np.testing.assert_allclose(moved, scored.values, atol=1e-6)
    np.testing.assert_array_equal(scored.scores, SCORES)
    assert scored.rollout.tokens.shape == rollout.tokens.shape


@pytest.mark.slow
def test_a_reference_of_another_shape(rollout):
    """Log-probs and exact KL with a wider reference of another family, soft-capped."""
    model = dataclasses.replace(toys.LLAMA, hidden_size=32, logit_softcap=3.0)
    reference = frozen.freeze(toys.params(model, seed=7), model=model)
    output = toys.jit(
        functools.partial(scored_by, penalty=Penalty(value_estimator="exact"))
    )(rollout, reference=reference, policy=POLICY)
    tokens, response = np.asarray(rollout.tokens), np.asarray(rollout.response_mask)
    logits, ref_logits = (
        np.asarray(
            toys.logits(params, model=shape, tokens=tokens, mask=rollout.mask),
            np.float64,
        )
        for params, shape in ((POLICY, toys.GPT2), (reference.stored, model))
    )
    assert np.abs(ref_logits).max() > 2  # where a cap of 3 bends
    ref_logprobs = oracles.token_logprobs(ref_logits, tokens, 0.7)
    np.testing.assert_allclose(
        output.ref_logprobs, np.where(response, ref_logprobs, 0.0), atol=1e-5
    )
    exact = np.zeros(tokens.shape)
    exact[:, 1:] = oracles.exact_kl(logits, ref_logits, 0.7)[:, :-1]
    np.testing.assert_allclose(output.kl, np.where(response, exact, 0.0), atol=1e-5)
    assert output.kl.max() > 0.1
    total, rows = output.kl_stats["objective/kl_exact"]
    assert float(total / rows) == pytest.approx(exact[response].sum() / 4, rel=1e-5)


def test_values_are_the_critics_and_masked(scored, rollout):
    values = critic.values(
        CRITIC, model=toys.GPT2, tokens=rollout.tokens, mask=rollout.mask
    )
    response = np.asarray(rollout.response_mask)
    assert np.abs(values)[~response].max() > 0.01  # there was something to mask
    expected = np.where(response, values, 0.0)
    np.testing.assert_allclose(scored.values, expected, atol=1e-5)


@pytest.mark.parametrize(
    "temperature",
    [0.3, *(pytest.param(t, marks=pytest.mark.slow) for t in (0.7, 1.0, 1.5))],
)
def test_kl_of_a_policy_to_itself_is_zero_at_every_temperature(temperature):
    """Uses cached decoding and then the reference's full forward pass."""
    rollout = toys.sampled(POLICY, temperature=temperature)
    scored = toys.jit(functools.partial(scored_by, temperature=temperature))(
        rollout, reference=toys.freeze(POLICY)
    )
    np.testing.assert_allclose(scored.kl, 0.0, atol=2e-5)
    assert int(rollout.response_mask.sum()) > 4


def test_without_a_reference_nothing_runs(rollout):
    """The program has no matrix products, which only models would have."""

    def operations(reference):
        jaxpr = jax.make_jaxpr(scored_by)(rollout, reference=reference)
        return str(jaxpr).count("dot_general")

    assert operations(None) == 0
    assert operations(REFERENCE) > 0
    bare = scored_by(rollout, reference=None)
    assert (bare.ref_logprobs, bare.kl, bare.values) == (None, None, None)


def test_no_gradient_reaches_the_reference(rollout):
    def total(stored):
        reference = dataclasses.replace(REFERENCE, stored=stored)
        scored = scored_by(rollout, reference=reference)
        return (scored.ref_logprobs * scored.kl).sum()

    grads = toys.jit(jax.grad(total))(REFERENCE.stored)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(grads))


def test_the_estimator_is_the_callers(scored, rollout):
    cubed = toys.jit(
        functools.partial(
            scored_by, penalty=Penalty(value_estimator="k3", placement="both")
        )
    )(rollout, reference=REFERENCE)
    expected = oracles.k3(rollout.old_logprobs, scored.ref_logprobs)
    np.testing.assert_allclose(cubed.kl, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_a_penalty_that_acts_nowhere_is_measured(rollout):
    def under(placement):
        penalty = Penalty(value_estimator="exact", placement=placement, clip=0.1)
        return toys.jit(functools.partial(scored_by, penalty=penalty))(
            rollout, reference=REFERENCE, policy=POLICY
        )

    acting, idle = under("reward"), under(None)
    assert acting.kl is not None
    assert idle.kl is None
    assert set(idle.kl_stats) == {"objective/kl_exact", "penalty/clipfrac"}
    for name, (total, weight) in idle.kl_stats.items():
        np.testing.assert_array_equal((total, weight), acting.kl_stats[name])
        assert total > 0
    np.testing.assert_array_equal(idle.ref_logprobs, acting.ref_logprobs)


def test_a_missing_stop_is_penalised(rollout):
    tokens, response = np.asarray(rollout.tokens), np.asarray(rollout.response_mask)
    stopped = [bool(set(tokens[b][response[b]]) & set(toys.STOP)) for b in range(4)]
    assert True in stopped
    assert False in stopped
    ended = score.ended(rollout, stop_ids=toys.STOP)
    np.testing.assert_array_equal(ended, stopped)
    penalised = shaping.shape(
        SCORES,
        moments=no_moments(),
        rollout=rollout,
        stop_ids=toys.STOP,
        shaping=shaping.ScoreShaping(missing_stop_score=-1.0),
    )
    np.testing.assert_array_equal(penalised, np.where(stopped, SCORES, -1.0))
    assert not score.ended(rollout, stop_ids=()).any()


def test_a_stop_token_in_the_prompt_or_the_padding_ends_nothing(rollout):
    everywhere = jnp.where(rollout.response_mask, 5, toys.STOP[0]).astype(jnp.int32)
    none = rollout.response_mask.at[0].set(False)  # row 0 has no response at all
    rollout = dataclasses.replace(rollout, tokens=everywhere, response_mask=none)
    assert not score.ended(rollout, stop_ids=toys.STOP).any()


@pytest.mark.parametrize("shape", [(4, 1), (3,), ()])
def test_scores_of_another_shape(rollout, shape):
    with pytest.raises(ValueError, match=r"scores: expected shape \(4\), got"):
        scored_by(rollout, scores=jnp.zeros(shape), reference=None)


def test_scores_cut_to_integers(rollout):
    with pytest.raises(TypeError, match="scores: expected float32, got int32"):
        scored_by(rollout, scores=SCORES.astype(jnp.int32), reference=None)


def test_exact_kl_is_told_as_a_sum_over_responses(rollout, monkeypatch):
    mask = rollout.response_mask
    exact = jnp.where(mask, jnp.float32(0.25), 0.0)
    monkeypatch.setattr(score, "_exact_kl", lambda *_, **__: (exact, 2 * exact))
    output = scored_by(
        rollout,
        reference=REFERENCE,
        policy=POLICY,
        penalty=Penalty("exact"),
    )
    total, rows = output.kl_stats["objective/kl_exact"]
    assert (float(total), float(rows)) == (0.25 * int(mask.sum()), mask.shape[0])
    np.testing.assert_array_equal(output.ref_logprobs, 2 * exact)
    np.testing.assert_array_equal(output.kl, exact)
    least = scored_by(  # of the top k it is a lower bound, and not told as exact
        rollout,
        reference=REFERENCE,
        policy=POLICY,
        penalty=Penalty("exact", top_k=3),
    )
    assert "objective/kl_exact" not in least.kl_stats
