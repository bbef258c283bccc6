"""Every family, with rows packed, padded, and read token by token."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from places import FIXTURES
from test_families import NAMES
from tiers import one_in

from rlhf_jax import decode, hf, policy
from rlhf_jax.models import caches

pytestmark = pytest.mark.usefixtures("quick_compilation")
LENGTHS, WIDTH = (11, 4, 8), 11  # windows are of 5
RNG = np.random.default_rng(3)
TEXTS = [RNG.integers(0, 97, length).astype(np.int32) for length in LENGTHS]
WEIGHTS = [RNG.normal(size=length).astype(np.float32) for length in LENGTHS]
# Quick with windows and layers without a rotation; the others' logits are in
# test_families.py.
SOON = one_in(len(NAMES), ["smollm3", *(name for name in NAMES if name != "smollm3")])
each_family = pytest.mark.parametrize("name", SOON)


@functools.cache
def loaded(name):
    return hf.load(FIXTURES / name, dtype="float32")


@functools.partial(jax.jit, static_argnames="model")
def value_and_gradient(params, *, model, tokens, mask, segments, weights):
    """Σ w·(log-prob + entropy) over tokens: the summands and the gradient."""

    def total(params):
        logprobs, entropy = policy.logprobs_and_entropy(
            params, model=model, tokens=tokens, mask=mask, segments=segments
        )
        return (weights * (logprobs + entropy)).sum(), logprobs + entropy

    (_, summed), gradient = jax.value_and_grad(total, has_aux=True)(params)
    return summed, gradient


def padded(texts):
    rows = [np.pad(text, (0, WIDTH - len(text))) for text in texts]
    return np.stack(rows)


MASK = np.arange(WIDTH)[None] < np.array(LENGTHS)[:, None]


def of_padded_rows(name, texts):
    model, params = loaded(name)
    return value_and_gradient(
        params,
        model=model,
        tokens=padded(texts),
        mask=MASK,
        segments=None,
        weights=padded(WEIGHTS),
    )


@each_family
def test_packed_rows_are_padded_rows_with_their_gradients(name):
    model, params = loaded(name)
    expected, expected_gradient = of_padded_rows(name, TEXTS)
    segments = np.repeat(np.arange(1, 4, dtype=np.int32), LENGTHS)[None]
    summed, gradient = value_and_gradient(
        params,
        model=model,
        tokens=np.concatenate(TEXTS)[None],
        mask=segments > 0,
        segments=segments,
        weights=np.concatenate(WEIGHTS)[None],
    )
    np.testing.assert_allclose(summed[0], np.asarray(expected)[MASK], atol=1e-5)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected_gradient))
    jax.tree.map(
        lambda mine, other: np.testing.assert_allclose(
            mine, other, atol=1e-5 * max(1.0, largest)
        ),
        gradient,
        expected_gradient,
    )
    assert all(np.abs(x).max() > 0 for x in jax.tree.leaves(gradient))


@each_family
def test_a_row_that_is_changed_moves_no_bit_of_another(name):
    before, _ = of_padded_rows(name, TEXTS)
    after, _ = of_padded_rows(name, [TEXTS[0], (TEXTS[1] + 1) % 97, TEXTS[2]])
    moved = np.asarray(before) != np.asarray(after)
    np.testing.assert_array_equal(moved.any(axis=1), [False, True, False])


@pytest.mark.cases(quick=1)
@each_family
@pytest.mark.parametrize("options", [{}, {"prefill_chunk": 3}], ids=["all", "chunks"])
def test_log_probs_of_a_token_at_a_time_are_those_of_a_whole_pass(
    name, options, monkeypatch
):
    """Far beyond the window, in growing caches, from prompts read in chunks."""
    monkeypatch.setattr(caches, "FIRST_WIDTH", 1)
    model, params = loaded(name)
    run = dataclasses.replace(model, **options)
    rows = np.arange(len(LENGTHS), dtype=np.int32)
    keys = decode.row_keys(jax.random.key(0), index=rows, sample=rows)
    draw = functools.partial(
        decode.generate, model=run, max_new_tokens=14, stop_ids=(1, 2, 3)
    )
    # Prompts are padded on the left.
    tokens, mask = padded(TEXTS)[:, ::-1].copy(), MASK[:, ::-1].copy()
    samples = jax.jit(draw)(params, tokens=tokens, mask=mask, keys=keys)
    assert np.asarray(samples.response_mask).sum(axis=1).max() > 8
    expected = jax.jit(functools.partial(policy.logprobs_and_entropy, model=model))(
        params, tokens=samples.tokens, mask=samples.mask
    )
    drawn = np.asarray(samples.response_mask)
    for mine, other in zip((samples.logprobs, samples.entropy), expected, strict=True):
        np.testing.assert_allclose(mine, np.where(drawn, other, 0.0), atol=1e-5)
