"""Padding goes to no expert: it costs no product, has no gradient and no statistics."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from rlhf_jax import config, decode, decoder
from rlhf_jax.models.experts import (
    OWN,
    balance_loss,
    dispatch,
    grouped,
    router_stats,
    routing,
)

pytestmark = pytest.mark.usefixtures("quick_compilation")
RNG = np.random.default_rng(0)
EXPERTS, WIDTH, INNER, TOKENS = 4, 8, 5, 24
KEPT = RNG.permutation(TOKENS) < TOKENS // 2
CHOSEN = np.argsort(RNG.normal(size=(TOKENS, EXPERTS)))[:, :2].astype(np.int32)
ROUTED = np.where(KEPT[:, None], CHOSEN, EXPERTS).astype(np.int32)
MODEL = dataclasses.replace(tiny.LLAMA, experts=config.Experts(6, 2), mlp_bias=True)


def arrays():
    normal = functools.partial(RNG.normal, size=(EXPERTS, WIDTH, INNER))
    inward = {"kernel": normal(), "bias": normal()[:, 0]}
    outward = {"kernel": normal().swapaxes(1, 2), "bias": normal()[..., 0]}
    weights = {"up": inward, "gate": inward, "down": outward}
    x, shares = RNG.normal(size=(TOKENS, WIDTH)), RNG.uniform(size=(TOKENS, 2))
    return jax.tree.map(jnp.float32, (x, shares, weights))


ARRAYS = arrays()


def mixed(x, shares, weights, chosen):
    def gate(up, gate):
        return up * jax.nn.sigmoid(gate)

    return dispatch.mixed(x, chosen, shares, weights=weights, gate=gate)


def gradient(x, shares, weights, chosen):
    def total(*arguments):
        y = mixed(*arguments, chosen)
        return (jnp.where(KEPT[:, None], y, 0.0) * jnp.sin(ARRAYS[0])).sum()

    return jax.grad(total, argnums=(0, 1, 2))(x, shares, weights)


def both(x, shares, weights, chosen):
    arguments = x, shares, weights, chosen
    # Traced anew in every test, as some replace what is traced.
    return jax.jit(lambda *a: (mixed(*a), gradient(*a)))(*arguments)


def test_a_token_without_an_expert_adds_nothing_and_the_others_keep_their_bits():
    (y, of_routed), (every, of_every) = (both(*ARRAYS, x) for x in (ROUTED, CHOSEN))
    assert (np.asarray(y)[~KEPT] == 0).all()
    np.testing.assert_array_equal(y[KEPT], every[KEPT])
    # A gradient of weights sums other blocks of rows.
    chex.assert_trees_all_close(of_routed, of_every, rtol=1e-5, atol=1e-5)
    for of_tokens in of_routed[:2]:
        assert (np.asarray(of_tokens)[~KEPT] == 0).all()


def test_none_of_its_numbers_matters():
    x, *others = ARRAYS
    spoilt = jnp.where(KEPT[:, None], x, jnp.nan)
    chex.assert_trees_all_equal(both(spoilt, *others, ROUTED), both(x, *others, ROUTED))


def test_rows_of_no_group_are_not_multiplied(monkeypatch):
    counts = []

    def product(x, w, *, sizes, load):
        counts.append(int(sizes.sum()))
        return grouped.grouped_product(x, w, sizes=sizes, load=load)

    monkeypatch.setattr(dispatch, "grouped_product", product)
    mixed(*ARRAYS, ROUTED)
    assert counts == [2 * KEPT.sum()] * 3


@jax.custom_vjp
def unwritten(x, count):
    return jnp.where((jnp.arange(len(x)) < count)[:, None], x, jnp.nan)


unwritten.defvjp(
    lambda x, count: (unwritten(x, count), count),
    lambda count, above: (unwritten(above, count), None),
)


@pytest.mark.slow
def test_their_products_and_gradients_may_hold_anything(monkeypatch):
    """Kernels of TPUs and GPUs leave them unwritten."""

    def product(x, w, *, sizes, load):
        count = sizes.sum()
        x = jnp.where((jnp.arange(len(x)) < count)[:, None], unwritten(x, count), 0.0)
        y = grouped.grouped_product(x, w, sizes=sizes, load=load)
        return unwritten(y, count)

    expected = both(*ARRAYS, ROUTED)
    monkeypatch.setattr(dispatch, "grouped_product", product)
    chex.assert_trees_all_equal(both(*ARRAYS, ROUTED), expected)


# Column 0 of a text is never padding; the last text has one token.
TEXTS = RNG.integers(0, 13, (3, 8)).astype(np.int32)
MASK = np.arange(8)[None] < np.array([8, 4, 1])[:, None]


@functools.partial(jax.jit, static_argnames="model")
def run(params, tokens, mask, *, model=MODEL):
    def total(params):
        hidden, routing = decoder.hidden_and_routing(
            params, model=model, tokens=tokens, mask=mask
        )
        squares = jnp.where(mask[..., None], hidden, 0.0) ** 2
        return squares.sum() + balance_loss(routing), (hidden, routing)

    (_, output), gradient = jax.value_and_grad(total, has_aux=True)(params)
    return *output, gradient


@pytest.mark.slow
def test_more_padding_changes_neither_values_nor_gradients():
    params = tiny.params(MODEL)
    hidden, routing, gradient = run(params, TEXTS, MASK)
    wide = np.pad(TEXTS, ((0, 2), (5, 0))), np.pad(MASK, ((0, 2), (5, 0)))
    padded, other, of_padded = run(params, *wide)
    np.testing.assert_allclose(padded[:3, 5:][MASK], hidden[MASK], atol=1e-5)
    chex.assert_trees_all_close(of_padded, gradient, atol=1e-4, rtol=1e-4)
    chosen = np.asarray(other.chosen)
    np.testing.assert_array_equal(chosen[:3, 5:], routing.chosen)
    assert (chosen[~wide[1]] == OWN).all()
    assert (chosen[wide[1]] >= 0).all()
    chex.assert_trees_all_close(
        *(dataclasses.replace(x, chosen=None) for x in (other, routing)), atol=1e-4
    )


def test_statistics_and_the_balance_loss_are_those_of_tokens():
    """Against float64 NumPy, and a number that transformers 5.19 computed."""
    rng = np.random.default_rng(7)
    logits = rng.normal(size=(1, 15, 6)).astype(np.float32)[0] * 2
    tokens = (np.arange(5)[None] < np.array([5, 2, 3])[:, None]).reshape(-1)
    how = config.Experts(6, 2)
    chosen, _ = routing.choose(jnp.asarray(logits), experts=how)
    own = routing.summed(jnp.asarray(logits), chosen, tokens=jnp.asarray(tokens))
    stacked = jax.tree.map(lambda x: x[None], own)
    p = np.exp(logits.astype(float))
    p = (p / p.sum(axis=1, keepdims=True))[tokens]
    largest = np.argsort(-p, axis=1)[:, :2]
    load = np.bincount(largest.reshape(-1), minlength=6)
    np.testing.assert_array_equal(own.load, load)
    np.testing.assert_array_equal(own.chosen[tokens], largest)
    assert (np.asarray(own.chosen)[~tokens] == OWN).all()
    expected = 6 / 2 * (load / len(p) * p.mean(axis=0)).sum()
    np.testing.assert_allclose(balance_loss(stacked), expected, rtol=1e-6)
    # `load_balancing_loss_func(logits, 6, 2, attention_mask)`, which sums over k.
    np.testing.assert_allclose(2 * balance_loss(stacked), 2.130349636, rtol=1e-6)
    stats = router_stats(stacked)
    means = {name: float(total / weight) for name, (total, weight) in stats.items()}
    assert means == pytest.approx(
        {
            "router/entropy": -(p * np.log(p)).sum() / len(p),
            "router/load_max": load.max() / (2 * len(p) / 6),
            "router/unused": (load == 0).mean(),
        },
        rel=1e-6,
    )


@pytest.mark.slow
def test_finished_rows_go_to_no_expert_while_the_others_are_decoded(monkeypatch):
    """Rows end at different tokens; what they draw does not change."""
    params = tiny.params(MODEL)
    rows = np.arange(3, dtype=np.int32)
    counts = []

    def product(x, w, *, sizes, load):
        jax.debug.callback(lambda n: counts.append(int(n)), sizes.sum())
        return grouped.grouped_product(x, w, sizes=sizes, load=load)

    def draw(**options):
        generate = functools.partial(
            decode.generate, model=MODEL, max_new_tokens=8, stop_ids=(1, 2, 3, 4)
        )
        keys = decode.row_keys(jax.random.key(1), index=rows, sample=rows)
        arguments = {"tokens": TEXTS[:, ::-1].copy(), "mask": MASK[:, ::-1].copy()}
        return jax.jit(functools.partial(generate, **options))(
            params, keys=keys, **arguments
        )

    expected = draw()
    monkeypatch.setattr(dispatch, "grouped_product", product)
    drawn = draw(continuous_batching=3)
    jax.effects_barrier()
    np.testing.assert_array_equal(drawn.tokens, expected.tokens)
    lengths = np.asarray(drawn.response_mask).sum(axis=1)
    assert len({*lengths.tolist()}) > 1
    # Every token runs once, except the last of each row; three products in two layers.
    ran = MASK.sum() + lengths.sum() - 3
    assert sum(counts) == 3 * 2 * 2 * ran
