import dataclasses
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax import batch, masked, rewards, state
from rlhf_jax.algorithms import reward_model
from rlhf_jax.functional import checks

OPTIMIZER = optax.adam(1e-2)
PARAMS = toys.scorer(seed=2)
LENGTHS = ([6, 3, 5, 4], [4, 6, 2, 5])
update = toys.jit(
    reward_model.update, static_argnames=("model", "optimizer", "micro_batch_size")
)


def side(lengths, seed: int) -> batch.Sequences:
    mask = masked.lengths_to_mask(jnp.asarray(lengths, jnp.int32), size=6)
    tokens = np.random.default_rng(seed).integers(0, 13, mask.shape)
    return batch.Sequences(
        tokens=jnp.asarray(tokens, jnp.int32), mask=mask, response_mask=mask
    )


@pytest.fixture(scope="module")
def pairs():
    return batch.Preferences(chosen=side(LENGTHS[0], 1), rejected=side(LENGTHS[1], 2))


@toys.jit
def loss(params, pairs, num_pairs=4.0):
    return reward_model.loss(params, pairs, model=toys.GPT2, num_pairs=num_pairs)


def scores_of(texts: batch.Sequences) -> np.ndarray:
    score = toys.jit(rewards.sequence_scores, static_argnames=("model",))
    return np.array(
        score(PARAMS, model=toys.GPT2, tokens=texts.tokens, mask=texts.mask)
    )


@pytest.mark.parametrize("margin", [None, [0.0, 0.5, 2.0, 1.0]])
def test_the_loss_is_bradley_terrys(pairs, margin):
    """With the margin: -log σ(chosen - rejected - margin)."""
    chosen, rejected = scores_of(pairs.chosen), scores_of(pairs.rejected)
    margins = None if margin is None else jnp.asarray(margin, jnp.float32)
    value, stats = loss(PARAMS, dataclasses.replace(pairs, margin=margins))
    expected = oracles.pairwise_losses(
        chosen, rejected, np.zeros(4) if margin is None else margin
    )
    np.testing.assert_allclose(value, np.mean(expected), rtol=1e-5)
    part, _ = loss(PARAMS, dataclasses.replace(pairs, margin=margins), 16.0)
    np.testing.assert_allclose(part, np.sum(expected) / 16, rtol=1e-5)
    means = masked.mean_stats(stats)
    np.testing.assert_allclose(means["pairwise/accuracy"], (chosen > rejected).mean())
    np.testing.assert_allclose(
        means["pairwise/lead"], (chosen - rejected).mean(), rtol=1e-4
    )


def test_an_update_divides_by_the_pairs(pairs, monkeypatch):
    def loss_of_part(params, part, *, model, num_pairs):
        return params["w"] * num_pairs, {"pairs": (num_pairs, jnp.ones(()))}

    module = import_module(reward_model.update.__module__)
    monkeypatch.setattr(module, "loss", loss_of_part)
    optimizer = optax.sgd(0.5)
    after, stats = reward_model.update(
        state.supervised_state({"w": jnp.ones(())}, optimizer=optimizer),
        batch=pairs,
        model=toys.GPT2,
        optimizer=optimizer,
    )
    assert masked.mean_stats(stats)["pairs"] == 4  # of 6 columns
    assert after.params["w"] == 1 - 0.5 * 4


@pytest.mark.slow
def test_it_learns_its_pairs_and_the_margin_asked_for(pairs):
    """Without a margin the lead stays smaller."""

    def trained(margin):
        with_margin = dataclasses.replace(pairs, margin=jnp.full(4, margin))
        current = state.supervised_state(PARAMS, optimizer=OPTIMIZER)
        for _ in range(25):
            current, stats = update(
                current, batch=with_margin, model=toys.GPT2, optimizer=OPTIMIZER
            )
        return masked.mean_stats(stats)

    plain, wide = trained(0.0), trained(6.0)
    assert plain["pairwise/accuracy"] == wide["pairwise/accuracy"] == 1
    assert plain["loss/pairwise"] < 0.1
    assert wide["pairwise/lead"] > plain["pairwise/lead"] + 1


@pytest.mark.slow
def test_padding_changes_nothing(pairs):
    value, _ = loss(PARAMS, pairs)

    def filled(texts):
        return dataclasses.replace(
            texts, tokens=jnp.where(texts.mask, texts.tokens, 12)
        )

    def wider(texts, before, after):
        return jax.tree.map(
            lambda leaf: jnp.pad(leaf, ((0, 0), (before, after))), texts
        )

    def of(change):
        both = change(pairs.chosen), change(pairs.rejected)
        return loss(PARAMS, batch.Preferences(*both))[0]

    np.testing.assert_array_equal(of(filled), value)
    np.testing.assert_allclose(of(lambda texts: wider(texts, 0, 3)), value, rtol=1e-5)
    np.testing.assert_allclose(of(lambda texts: wider(texts, 2, 1)), value, rtol=1e-5)


def test_sides_of_two_widths(pairs):
    wide = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (0, 1))), pairs.rejected)
    with pytest.raises(ValueError, match=r"chosen \(4, 6\), rejected \(4, 7\)"):
        loss(PARAMS, dataclasses.replace(pairs, rejected=wide))


def test_a_micro_batch_size_that_does_not_divide(pairs):
    with pytest.raises(checks.InputError, match="divide the 4 rows of an update"):
        update(
            state.supervised_state(PARAMS, optimizer=OPTIMIZER),
            batch=pairs,
            model=toys.GPT2,
            optimizer=OPTIMIZER,
            micro_batch_size=3,
        )
