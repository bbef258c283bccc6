"""Decoder features of other families, each against another computation.

test_families compares them with `transformers`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from tiers import one_in

from rlhf_jax import decode, decoder, kl, logprobs, policy
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import caches
from rlhf_jax.models.generation.sampling import Decoder, Draw
from rlhf_jax.models.packing import texts_of

LENGTHS, PROMPT, NEW = (6, 3, 1, 5, 2, 4), 6, 9
both = pytest.mark.parametrize(
    "model",
    [tiny.MIXED, tiny.PARALLEL, tiny.LATE],
    ids=["mixed", "parallel", "late"],
)
mixed_soon = pytest.mark.parametrize(
    "model",
    [tiny.MIXED, pytest.param(tiny.PARALLEL, marks=pytest.mark.slow)],
    ids=["mixed", "parallel"],
)
hidden_of = jax.jit(decoder.hidden_states, static_argnames=("model", "first_column"))


def compiled():
    """Compiles a new function, so that tracing reads the patched values."""
    return jax.jit(
        lambda *args, **named: decode.generate(*args, **named),
        static_argnames=(
            *("model", "max_new_tokens", "stop_ids", "temperature"),
            *("group_size", "continuous_batching"),
        ),
    )


def sampled(model, **options):
    tokens, mask = tiny.batch(LENGTHS, PROMPT, side="left")
    index = np.arange(len(LENGTHS), dtype=np.int32)
    inputs = {"tokens": tokens, "mask": mask, "stop_ids": (2,), "temperature": 0.7}
    inputs["keys"] = decode.row_keys(jax.random.key(0), index=index, sample=index)
    return compiled()(
        tiny.params(model), model=model, max_new_tokens=NEW, **inputs | options
    )


# --- cached decoding --------------------------------------------------------------


@pytest.mark.slow
@mixed_soon
def test_log_probs_of_samples_are_those_of_a_full_forward(model, monkeypatch):
    """Beyond the window, in growing caches."""
    monkeypatch.setattr(caches, "FIRST_WIDTH", 1)
    samples = sampled(model)
    assert np.asarray(samples.mask).sum(axis=1).max() > 2 * model.sliding_window
    expected = jax.jit(
        functools.partial(policy.logprobs_and_entropy, model=model, temperature=0.7)
    )(tiny.params(model), tokens=samples.tokens, mask=samples.mask)
    drawn = np.asarray(samples.response_mask)
    for mine, other in zip((samples.logprobs, samples.entropy), expected, strict=True):
        np.testing.assert_allclose(mine, np.where(drawn, other, 0.0), atol=2e-5)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [tiny.MIXED, tiny.PARALLEL, tiny.LATE, tiny.SHARED],
    ids=["mixed", "parallel", "late", "shared"],
)
def test_continuous_batching_draws_the_same_samples(model):
    samples, expected = sampled(model, continuous_batching=4), sampled(model)
    np.testing.assert_array_equal(samples.tokens, expected.tokens)
    np.testing.assert_allclose(samples.logprobs, expected.logprobs, atol=2e-5)


@pytest.mark.slow
def test_a_local_layer_caches_its_window_alone():
    tokens, mask = tiny.batch(LENGTHS, PROMPT, side="left")
    index = np.arange(len(LENGTHS), dtype=np.int32)
    state = jax.eval_shape(
        functools.partial(
            decode.start,
            [Decoder(tiny.params(tiny.MIXED), tiny.MIXED)],
            max_new_tokens=NEW,
            draw=Draw(()),
        ),
        tokens=tokens,
        mask=mask,
        keys=decode.row_keys(jax.random.key(0), index=index, sample=index),
    )
    [of_layers] = state.caches
    places = [key.shape[2] for key, _ in of_layers]
    assert places == [4, PROMPT + NEW, 4]


def test_places_that_a_new_token_sees():
    """Column 5 with a window of 3 has columns 3, 4 and 5, of which 3 is masked."""
    attend = jnp.array([[False, False, False, False, True, True, False, False]])
    visible = caches.near(attend, window=3, column=jnp.int32(5))
    np.testing.assert_array_equal(visible, [[False, True, True]])
    early = caches.near(attend[:, 3:], window=3, column=jnp.int32(1))
    np.testing.assert_array_equal(early, [[False, True, False]])


# --- whole sequences --------------------------------------------------------------


def loss_of(params, *, model):
    tokens, mask = tiny.batch((9, 4), 9, side="right")
    hidden = decoder.hidden_states(params, model=model, tokens=tokens, mask=mask)
    return jnp.square(jnp.where(mask[..., None], hidden, 0.0)).sum()


@pytest.mark.cases(slow=1)
@pytest.mark.parametrize(
    ("model", "how"),
    [
        pytest.param(
            tiny.MIXED, {"unroll": True}, id="mixed-unroll", marks=pytest.mark.slow
        ),
        *(
            pytest.param(model, {"remat": "full"}, id=name, marks=pytest.mark.slow)
            for model, name in (
                (tiny.PARALLEL, "parallel-remat"),
                (tiny.LATE, "late-remat"),
                (tiny.MIXED, "mixed-remat"),
                (tiny.SHARED, "shared-remat"),
            )
        ),
        pytest.param(
            tiny.PARALLEL,
            {"unroll": True},
            id="parallel-unroll",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            tiny.LATE, {"unroll": True}, id="late-unroll", marks=pytest.mark.slow
        ),
        pytest.param(
            tiny.SHARED, {"unroll": True}, id="shared-unroll", marks=pytest.mark.slow
        ),
    ],
)
def test_value_and_gradient_are_those_of_the_loop(model, how):
    gradient = jax.jit(jax.value_and_grad(loss_of), static_argnames="model")
    value, grads = gradient(tiny.params(model), model=model)
    other = dataclasses.replace(model, **how)
    other_value, other_grads = gradient(tiny.params(model), model=other)
    np.testing.assert_allclose(other_value, value, rtol=1e-5)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(grads))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5 * scale),
        other_grads,
        grads,
    )
    moved = jax.tree.leaves(
        {name: leaf for name, leaf in grads["layers"].items() if name != "layer_scale"}
    )
    assert all(np.abs(leaf).max() > 0 for leaf in moved)


@pytest.mark.slow
@both
def test_texts_that_share_a_row_are_read_as_if_alone(model):
    tokens, mask = tiny.batch((7, 5), 7, side="right")
    apart = hidden_of(tiny.params(model), model=model, tokens=tokens, mask=mask)
    together = hidden_of(
        tiny.params(model),
        model=model,
        tokens=np.concatenate([tokens[0], tokens[1, :5]])[None],
        mask=np.ones((1, 12), bool),
        segments=np.repeat(np.array([1, 2], np.int32), (7, 5))[None],
    )
    np.testing.assert_allclose(together[0, :7], apart[0], atol=1e-5)
    np.testing.assert_allclose(together[0, 7:], apart[1, :5], atol=1e-5)


@pytest.mark.cases(quick=1)
@both
def test_a_token_out_of_the_window_is_not_seen(model):
    """Tested with one layer, as deeper layers see further."""
    window = model.sliding_window
    layers = {"num_layers": 1, "local_layers": (True,), "unrotated_layers": ()}
    one = dataclasses.replace(model, **layers)
    tokens, mask = tiny.batch((9,), 9, side="right")
    other = tokens.copy()
    other[0, 3] = (other[0, 3] + 1) % tiny.VOCAB
    before, after = (
        np.asarray(hidden_of(tiny.params(one), model=one, tokens=ids, mask=mask))[0]
        for ids in (tokens, other)
    )
    moved = np.abs(after - before).max(axis=-1) > 1e-6
    np.testing.assert_array_equal(np.nonzero(moved)[0], np.arange(3, 3 + window))


# --- soft-capped logits -----------------------------------------------------------

CAP, TEMPERATURE = 1.5, 0.7


def inputs():
    rng = np.random.default_rng(0)
    hidden, ref_hidden = rng.normal(size=(2, 2, 5, 8)).astype(np.float32)
    head = rng.normal(size=(16, 8)).astype(np.float32)
    ref_head = rng.normal(size=(19, 8)).astype(np.float32)
    tokens = rng.integers(0, 13, (2, 5)).astype(np.int32)
    return (hidden, head), (ref_hidden, ref_head), tokens


def capped(hidden, head):
    """Soft-capped logits of the true vocabulary of 13 tokens."""
    logits = jnp.einsum("btd,vd->btv", hidden, head[:13])
    return CAP * jnp.tanh(logits / CAP)


@pytest.mark.slow
def test_logprobs_and_entropy_of_soft_capped_logits():
    (hidden, head), _, tokens = inputs()
    weights = np.random.default_rng(1).normal(size=(2, *tokens.shape))

    def weighed(output):
        return sum(
            (jnp.asarray(w) * x).sum() for w, x in zip(weights, output, strict=1)
        )

    def chunked(hidden, head, temperature):
        return weighed(
            logprobs.token_logprobs_from_hidden(
                hidden,
                head,
                tokens,
                temperature=temperature,
                vocab_size=13,
                softcap=CAP,
                max_logits=1,
            )
        )

    def plain(hidden, head, temperature):
        logits = capped(hidden, head)[:, :-1] / temperature
        every = jax.nn.log_softmax(logits)
        picked = jnp.take_along_axis(every, tokens[:, 1:, None], axis=-1)[..., 0]
        entropy = -(jnp.exp(every) * every).sum(axis=-1)
        room = ((0, 0), (1, 0))
        return weighed((jnp.pad(picked, room), jnp.pad(entropy, room)))

    arguments = hidden, head, jnp.float32(TEMPERATURE)
    output, expected = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1, 2)))(*arguments)
        for f in (chunked, plain)
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        output,
        expected,
    )


@pytest.mark.parametrize("direction", one_in(2, ["reverse", "forward"]))
@pytest.mark.parametrize("k", one_in(2, [None, 3]))
def test_kl_of_soft_capped_logits(direction, k):
    policy_, reference, _ = inputs()
    how = {"direction": direction, "temperature": TEMPERATURE}
    how |= {} if k is None else {"k": k}

    of_hidden = functools.partial(
        kl.exact_from_hidden,
        vocab_size=13,
        softcap=CAP,
        ref_softcap=CAP,
        **how,
    )

    def chunked(*sides):
        return of_hidden(*sides, max_logits=1)

    def plain(hidden, head, *reference):
        sides = capped(hidden, head), capped(*reference)
        if k is not None:
            output = kl.top_k(*sides, **how)
        else:
            output = kl.exact(*sides, temperature=TEMPERATURE, direction=direction)
        return jnp.pad(output[:, :-1], ((0, 0), (1, 0)))

    weights = np.random.default_rng(1).normal(size=(2, 5)).astype(np.float32)

    def weighed(f):
        def loss(weights, *args):
            return (weights * f(*args)).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(1, 2)))

    of_chunked, of_plain = weighed(chunked), weighed(plain)
    sides = *policy_, *reference
    output, expected = (of(weights, *sides) for of in (of_chunked, of_plain))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        output,
        expected,
    )
    # A position that is masked out may hold anything, as words of the padding may.
    weights[:, 3] = 0.0
    _, expected_gradients = of_plain(weights, *sides)
    broken, head = policy_[0].copy(), policy_[1].copy()
    broken[:, 2], head[13:], reference[1][13:] = np.nan, np.inf, np.nan
    _, masked = of_chunked(weights, broken, head, *reference)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6),
        masked,
        expected_gradients,
    )
    same = jax.jit(of_hidden)(*policy_, *policy_)
    np.testing.assert_array_equal(same, 0.0)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("model", [tiny.LATE, tiny.MIXED], ids=["divisor", "soft cap"])
def test_exact_kl_of_a_policy_reads_what_is_done_to_its_logits(model):
    params, other = (tiny.params(model, seed) for seed in (0, 1))
    tokens, mask = tiny.batch((7, 5), 7, side="right")
    of = functools.partial(hidden_of, model=model, tokens=tokens, mask=mask)
    texts = texts_of(tokens, mask)
    exact = jax.jit(functools.partial(policy.exact_kl, texts=texts, model=model))
    output = exact(params, of(params), other, of(other))
    logits_of = jax.jit(
        functools.partial(policy.logits, model=model, tokens=tokens, mask=mask)
    )
    logits, ref_logits = logits_of(params), logits_of(other)
    if model.logit_softcap is not None:
        assert np.abs(logits).max() < model.logit_softcap
    else:  # products with the head, which are divided here by hand
        head = decoder.vocabulary_head(params, model=model)[: tiny.VOCAB]
        product = of(params) @ head.T
        np.testing.assert_allclose(logits, product / model.logit_divisor, atol=1e-5)
    expected = jnp.pad(kl.exact(logits, ref_logits)[:, :-1], ((0, 0), (1, 0)))
    np.testing.assert_allclose(output, np.where(mask, expected, 0.0), atol=1e-5)


# --- configurations ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rotary_dim": 5}, "an even rotary_dim from 2 to head_dim = 12, got 5"),
        ({"local_layers": (True,)}, "local_layers for each of 3 layers, got 1 entries"),
        ({"sliding_window": None}, "sliding_window if, and only if, .* None with 2"),
        ({"local_layers": ()}, "sliding_window if, and only if, .* 4 with 0 local"),
        ({"sliding_window": 0}, "sliding_window: expected a finite number above 0"),
        ({"logit_softcap": -1.0}, "logit_softcap: expected a finite number above 0"),
        ({"logit_divisor": 0.0}, "logit_divisor: expected a finite number above 0"),
        ({"residual_scale": -0.5}, "residual_scale: expected a finite number above 0"),
        (
            {"unrotated_layers": (True,)},
            "unrotated_layers for each of 3 layers, .* 1 entries",
        ),
        (
            {"query_key_norm": False, "joint_head_norm": True},
            "expected query_key_norm with joint_head_norm",
        ),
        (
            {"attention": "cudnn", "dtype": "bfloat16"},
            "no attention_softcap, got .* attention auto",
        ),
    ],
)
def test_configurations_that_are_refused(change, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(tiny.MIXED, **change)
