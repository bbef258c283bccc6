"""Ids without a token: their ranges, and distributions that leave them out."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiers import one_in

from rlhf_jax import kl, logprobs
from rlhf_jax.functional import unused_ids
from rlhf_jax.functional.checks import InputError

pytestmark = pytest.mark.usefixtures("strict_dtypes")

B, S, D, V, PADDED = 2, 5, 4, 29, 48
RNG = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RNG.normal(0, 1, shape).astype(np.float32)


HIDDEN, REF_HIDDEN = normal(B, S, D), normal(B, S, D)
HEAD, REF_HEAD = normal(PADDED, D), normal(PADDED, D)
LEFT_OUT = {  # by where they are: a tail, holes, the first chunks, more than compared
    "tail": ((20, V),),
    "holes": ((3, 4), (11, 19)),
    "first": ((0, 12), (28, V)),
    "many": tuple((i, i + 1) for i in range(1, V, 2)),
}
ONE, TEN, ALL = 1, 2 * B * S * 10, 2**24  # logits at a time: one id, ten, all
ids_used = st.integers(1, 60).flatmap(
    lambda size: st.tuples(
        st.just(size), st.sets(st.integers(0, size - 1), min_size=1, max_size=size)
    )
)


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(ids_used)
def test_ranges_hold_the_other_ids(case):
    size, used = case
    ranges = unused_ids.beside(used, vocab_size=size)
    unused_ids.check(ranges, vocab_size=size)
    assert unused_ids.listed(ranges) == [i for i in range(size) if i not in used]
    assert unused_ids.count(ranges) == size - len(used)
    ids = np.arange(-1, size + 2, dtype=np.int32)
    expected = [0 <= i < size and i not in used for i in ids]
    np.testing.assert_array_equal(unused_ids.contain(ranges, ids), expected)
    masked = unused_ids.masked(jnp.zeros((2, size)), ranges)
    np.testing.assert_array_equal(np.isneginf(masked), [expected[1:-2]] * 2)


def test_ids_of_tokens_beyond_the_model_are_no_part_of_the_ranges():
    assert unused_ids.beside([0, 2, 7, -1], vocab_size=4) == ((1, 2), (3, 4))


@pytest.mark.parametrize(
    "ranges",
    [((2, 2),), ((3, 2),), ((0, 2), (2, 3)), ((4, 5), (1, 2)), ((5, 7),), ((-1, 2),)],
)
def test_ranges_that_cannot_be(ranges):
    with pytest.raises(InputError, match=r"expected ranges .* make them with"):
        unused_ids.check(ranges, vocab_size=6)
    with pytest.raises(InputError, match="unused_ids"):
        logprobs.token_logprobs_from_hidden(
            HIDDEN, HEAD[:6], np.zeros((B, S), np.int32), unused=ranges
        )


def compact(head: np.ndarray, ranges) -> np.ndarray:
    """The head without the rows of these ids."""
    return np.delete(head[:V], unused_ids.listed(ranges), axis=0)


def with_garbage(head: np.ndarray, ranges, value: float) -> np.ndarray:
    spoilt = head.copy()
    spoilt[[*unused_ids.listed(ranges), *range(V, PADDED)]] = value
    return spoilt


def used(ranges) -> np.ndarray:
    return np.delete(np.arange(V), unused_ids.listed(ranges))


@pytest.mark.cases(quick=2, slow=2)
@pytest.mark.parametrize("max_logits", [ONE, ALL])
@pytest.mark.parametrize("where", LEFT_OUT)
def test_logprobs_are_those_of_a_vocabulary_without_the_ids(where, max_logits):
    ranges = LEFT_OUT[where]
    places = RNG.integers(0, len(used(ranges)), (B, S)).astype(np.int32)
    tokens = used(ranges)[places].astype(np.int32)
    logits = oracles.logits_from_hidden(HIDDEN, compact(HEAD, ranges))
    program = jax.jit(
        functools.partial(
            logprobs.token_logprobs_from_hidden,
            temperature=0.7,
            vocab_size=V,
            max_logits=max_logits,
            unused=ranges,
        )
    )
    output, entropy = program(HIDDEN, with_garbage(HEAD, ranges, np.nan), tokens)
    expected = oracles.token_logprobs(logits, places, 0.7)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    expected = oracles.entropy(logits, 0.7)[:, :-1]
    np.testing.assert_allclose(entropy[:, 1:], expected, rtol=1e-5, atol=1e-5)
    absent = np.full((B, S), unused_ids.listed(ranges)[0], np.int32)
    assert np.all(np.isneginf(program(HIDDEN, HEAD, absent)[0][:, 1:]))


def weighted(values, weights):
    return sum(jnp.sum(x * w) for x, w in zip(values, weights, strict=True))


@pytest.mark.cases(quick=1, slow=2)
@pytest.mark.parametrize("max_logits", one_in(2, [ONE, ALL]))
@pytest.mark.parametrize("where", LEFT_OUT)
def test_no_gradient_of_logprobs_reaches_their_rows(where, max_logits):
    ranges, weights = LEFT_OUT[where], (normal(B, S), normal(B, S))
    tokens = RNG.choice(used(ranges), (B, S)).astype(np.int32)

    def chunked(hidden, head):
        results = logprobs.token_logprobs_from_hidden(
            *(hidden, head, tokens),
            vocab_size=V,
            max_logits=max_logits,
            unused=ranges,
        )
        return weighted(results, weights)

    def whole(hidden, head):
        logits = jnp.einsum("bsd,vd->bsv", hidden, head[:V])
        logits = unused_ids.masked(logits, ranges)
        entropy = jnp.pad(logprobs.entropy(logits)[:, :-1], ((0, 0), (1, 0)))
        return weighted((logprobs.token_logprobs(logits, tokens), entropy), weights)

    expected = jax.jit(jax.grad(whole, (0, 1)))(HIDDEN, HEAD)
    spoilt = with_garbage(HEAD, ranges, np.nan)
    for head in (HEAD, spoilt):
        gradients = jax.jit(jax.grad(chunked, (0, 1)))(HIDDEN, head)
        for a, b in zip(gradients, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5)
        assert not np.any(np.asarray(gradients[1])[unused_ids.listed(ranges)])


KINDS = {
    "reverse": kl.exact_from_hidden,
    "forward": functools.partial(kl.exact_from_hidden, direction="forward"),
    "top_k": functools.partial(kl.exact_from_hidden, k=3),
    "top_k of all": functools.partial(kl.exact_from_hidden, k=V),
    "jensen_shannon": functools.partial(kl.jensen_shannon_from_hidden, beta=0.3),
    "jensen_shannon of top_k": functools.partial(
        kl.jensen_shannon_from_hidden, beta=0.3, k=3
    ),
}


def values(kind: str, ranges) -> np.ndarray:
    """Values by float64 loops over a vocabulary without the ids."""
    logits, ref_logits = (
        oracles.logits_from_hidden(*arrays)[:, :-1]
        for arrays in (
            (HIDDEN, compact(HEAD, ranges)),
            (REF_HIDDEN, compact(REF_HEAD, ranges)),
        )
    )
    values = np.zeros((B, S))
    for b, t in np.ndindex(B, S - 1):
        p, q = logits[b, t], ref_logits[b, t]
        if kind.startswith("jensen"):
            own, ref = (np.array(oracles.log_softmax(logits, 0.7)) for logits in (p, q))
            k = 3 if "top_k" in kind else None
            values[b, t + 1] = oracles.jensen_shannon(own, ref, beta=0.3, k=k)
        else:
            pair = (q, p) if kind == "forward" else (p, q)
            values[b, t + 1] = oracles.exact_kl(*pair, 0.7)
    return values


@pytest.mark.cases(quick=1, slow=8)
@pytest.mark.parametrize(
    ("kind", "where", "max_logits"),
    one_in(5, [*itertools.product(KINDS, LEFT_OUT, [ONE, TEN, ALL])]),
)
def test_divergences_are_those_of_a_vocabulary_without_the_ids(kind, where, max_logits):
    ranges, weights = LEFT_OUT[where], normal(B, S)
    options = {"temperature": 0.7, "max_logits": max_logits}

    def loss(hidden, head, ref_hidden, ref_head, **more):
        output = KINDS[kind](hidden, head, ref_hidden, ref_head, **options, **more)
        return jnp.sum(output * weights), output

    def gradient(**more):
        return jax.jit(jax.grad(functools.partial(loss, **more), (0, 1), has_aux=True))

    spoilt, ref_spoilt = (with_garbage(head, ranges, 1e4) for head in (HEAD, REF_HEAD))
    left_out = gradient(vocab_size=V, unused=ranges)
    output = left_out(HIDDEN, spoilt, REF_HIDDEN, ref_spoilt)
    (for_hidden, for_head), value = output
    if kind == "top_k of all":  # no k of the compact vocabulary is as many
        (of_hidden, of_head), expected = gradient(vocab_size=V, unused=ranges)(
            HIDDEN, HEAD, REF_HIDDEN, REF_HEAD
        )
        np.testing.assert_allclose(
            expected, values("reverse", ranges), rtol=1e-4, atol=1e-5
        )
        of_head = np.asarray(of_head)[used(ranges)]
    else:
        head, ref_head = (compact(head, ranges) for head in (HEAD, REF_HEAD))
        (of_hidden, of_head), expected = gradient()(HIDDEN, head, REF_HIDDEN, ref_head)
        if kind != "top_k":
            np.testing.assert_allclose(
                value, values(kind, ranges), rtol=1e-4, atol=1e-5
            )
    np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(for_hidden, of_hidden, rtol=2e-4, atol=2e-5)
    for_head = np.asarray(for_head)
    np.testing.assert_allclose(for_head[used(ranges)], of_head, rtol=2e-4, atol=2e-5)
    assert not np.any(for_head[unused_ids.listed(ranges)])
    nan = with_garbage(HEAD, ranges, np.nan)
    (for_hidden, for_head), value = left_out(HIDDEN, nan, REF_HIDDEN, ref_spoilt)
    np.testing.assert_allclose(for_hidden, of_hidden, rtol=2e-4, atol=2e-5)
    assert np.all(np.isfinite(for_head))
    own, equal = left_out(HIDDEN, HEAD, HIDDEN, HEAD)
    np.testing.assert_allclose(equal, 0, atol=1e-6)
    assert all(np.abs(x).max() < 1e-5 for x in own)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.sets(st.integers(0, V - 1), min_size=1, max_size=V - 1), st.integers(1, 2 * V)
)
def test_any_ranges_in_any_chunks(absent, chunk):
    ranges = unused_ids.beside(set(range(V)) - absent, vocab_size=V)
    some = sorted(set(range(V)) - absent)
    places = np.arange(B * S, dtype=np.int32).reshape(B, S) % len(some)
    tokens = np.array(some, np.int32)[places]
    options = {"vocab_size": V, "unused": ranges, "max_logits": 2 * B * S * chunk}
    output, entropy = logprobs.token_logprobs_from_hidden(
        HIDDEN, HEAD, tokens, **options
    )
    logits = oracles.logits_from_hidden(HIDDEN, HEAD[some])
    expected = oracles.token_logprobs(logits, places)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    expected = oracles.entropy(logits)[:, :-1]
    np.testing.assert_allclose(entropy[:, 1:], expected, rtol=1e-5, atol=1e-5)
    exact = kl.exact_from_hidden(HIDDEN, HEAD, REF_HIDDEN, REF_HEAD, **options)
    ref_logits = oracles.logits_from_hidden(REF_HIDDEN, REF_HEAD[some])
    for b, t in np.ndindex(B, S - 1):
        expected = oracles.exact_kl(logits[b, t], ref_logits[b, t])
        np.testing.assert_allclose(exact[b, t + 1], expected, rtol=1e-4, atol=1e-5)
