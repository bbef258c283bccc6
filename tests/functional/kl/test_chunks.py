"""KL of two heads in vocabulary chunks, against all logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from tiers import one_in

from rlhf_jax import kl

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")

B, S, D, V, PADDED = 2, 5, 6, 37, 48
RNG = np.random.default_rng(0)


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return RNG.normal(0, scale, shape).astype(np.float32)


HIDDEN, REF_HIDDEN = normal(B, S, D, scale=0.5), normal(B, S, D, scale=0.5)
HEAD, REF_HEAD = normal(PADDED, D), normal(PADDED, D)
HEAD[V:], REF_HEAD[V:] = np.nan, 1e30  # padded rows: garbage
ARRAYS = (HIDDEN, HEAD, REF_HIDDEN, REF_HEAD)
WEIGHTS = normal(B, S)
DIRECTIONS = ["reverse", "forward"]
# Words at a time: one, ten (four chunks, the last of which begins early), all.
ONE, TEN, ALL = 1, 2 * B * S * 10, 2**24
TEMPERATURES = [0.3, 0.7, 1.0, 1.5]
TOP_K = [  # direction, k, max_logits
    *(("reverse", 1, TEN), ("reverse", 5, ONE), ("reverse", V, TEN)),
    ("forward", 5, TEN),
]
EXACT = [
    (direction, None, most) for direction in DIRECTIONS for most in (ONE, TEN, ALL)
]


def from_hidden(*arrays, k=None, **options):
    options = {"vocab_size": V, "temperature": 0.7, **options}
    arrays = arrays or ARRAYS
    return kl.exact_from_hidden(*arrays, k=k, **options)


def with_gradients(function):
    """(temperature, *arrays) -> KL and the gradients of its weighted sum, compiled."""

    def loss(arrays, temperature):
        output = function(*arrays, temperature=temperature)
        return jnp.sum(output * WEIGHTS), output

    program = jax.jit(jax.grad(loss, has_aux=True))

    def run(temperature, *arrays):
        gradients, output = program(arrays or ARRAYS, np.float32(temperature))
        return np.asarray(output), [np.asarray(gradient) for gradient in gradients]

    return run


@functools.cache
def chunked(direction="reverse", max_logits=TEN, k=None):
    options = {"direction": direction, "max_logits": max_logits, "k": k}
    return with_gradients(functools.partial(from_hidden, **options))


@functools.cache
def whole(direction="reverse", k=None):
    return with_gradients(functools.partial(materialised, direction=direction, k=k))


@pytest.mark.parametrize(
    ("softcap", "ref_softcap"),
    one_in(3, [(1.5, 0.7), (1.5, None), (None, 0.7)]),
)
def test_each_model_has_its_own_softcap(softcap, ref_softcap):
    """Value and gradient equal those of separately capped logits."""

    def whole(hidden, head, ref_hidden, ref_head, *, temperature):
        def logits(hidden, head, cap):
            logits = jnp.einsum("btd,vd->btv", hidden, head[:V])
            return logits if cap is None else cap * jnp.tanh(logits / cap)

        output = kl.exact(
            logits(hidden, head, softcap),
            logits(ref_hidden, ref_head, ref_softcap),
            temperature=temperature,
        )
        return jnp.pad(output[:, :-1], ((0, 0), (1, 0)))

    caps = {"softcap": softcap, "ref_softcap": ref_softcap, "max_logits": TEN}
    output, gradients = with_gradients(functools.partial(from_hidden, **caps))(0.7)
    expected, expected_gradients = with_gradients(whole)(0.7)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-6)
    for ours, theirs in zip(gradients[:2], expected_gradients[:2], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)
    assert not any(gradient.any() for gradient in gradients[2:])


def materialised(*arrays, temperature, k=None, direction="reverse"):
    """The reference implementation, from all logits."""
    hidden, head, ref_hidden, ref_head = arrays
    logits = jnp.einsum("btd,vd->btv", hidden, head[:V])
    ref_logits = jnp.einsum("btd,vd->btv", ref_hidden, ref_head[:V])
    options = {"temperature": temperature, "direction": direction}
    if k is not None:
        output = kl.top_k(logits, ref_logits, k=k, **options)
    else:
        output = kl.exact(logits, ref_logits, **options)
    return jnp.pad(output[:, :-1], ((0, 0), (1, 0)))


def oracle(hidden, head, ref_hidden, ref_head, *, temperature=0.7, direction="reverse"):
    logits = oracles.logits_from_hidden(hidden, head[:V])
    ref_logits = oracles.logits_from_hidden(ref_hidden, ref_head[:V])
    if direction == "forward":
        logits, ref_logits = ref_logits, logits
    output = np.zeros(logits.shape[:2])
    output[:, 1:] = oracles.exact_kl(logits, ref_logits, temperature)[:, :-1]
    return output


def top_k_oracle(logits, ref_logits, k, temperature=1.0, direction="reverse"):
    output = np.zeros(logits.shape[:-1])
    for index in np.ndindex(*output.shape):
        policy = np.exp(oracles.log_softmax(logits[index], temperature))
        reference = np.exp(oracles.log_softmax(ref_logits[index], temperature))
        order = sorted(range(len(policy)), key=lambda v: -policy[v])
        buckets = [(policy[v], reference[v]) for v in order[:k]]
        rest = order[k:]
        buckets += [(policy[rest].sum(), reference[rest].sum())] if rest else []
        for p, q in buckets:
            output[index] += (
                p * np.log(p / q) if direction == "reverse" else q * np.log(q / p)
            )
    return output


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize(("direction", "k", "max_logits"), EXACT)
def test_exact_matches_the_oracle(direction, k, max_logits):
    for temperature in TEMPERATURES:
        output, _ = chunked(direction, max_logits, k)(temperature)
        expected = oracle(*ARRAYS, temperature=temperature, direction=direction)
        assert output.dtype == np.float32
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(output[:, 0], 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("direction", one_in(2, DIRECTIONS))
def test_exact_gradient_matches_finite_differences(direction):
    """With a reference of another width and padding."""
    arrays = (HIDDEN, HEAD, normal(B, S, 4), normal(V + 2, 4))
    _, gradients = chunked(direction)(0.7, *arrays)
    for argument in (0, 1):

        def value(x, argument=argument):
            changed = (*arrays[:argument], x, *arrays[argument + 1 :])
            return float((oracle(*changed, direction=direction) * WEIGHTS).sum())

        x = arrays[argument] if argument == 0 else arrays[argument][:V]
        expected = oracles.numerical_gradient(value, x)
        np.testing.assert_allclose(gradients[argument][: len(x)], expected, atol=1e-5)
        np.testing.assert_array_equal(gradients[argument][len(x) :], 0.0)


@pytest.mark.parametrize(("direction", "k", "max_logits"), one_in(3, [*EXACT, *TOP_K]))
def test_gradient_is_that_of_the_materialised_one(direction, k, max_logits):
    for temperature in TEMPERATURES:
        _, gradients = chunked(direction, max_logits, k)(temperature)
        _, expected = whole(direction, k)(temperature)
        near = {"rtol": 1e-5, "atol": 1e-5 / temperature}  # of logits / temperature
        np.testing.assert_allclose(gradients[0], expected[0], **near)
        np.testing.assert_allclose(gradients[1][:V], expected[1][:V], **near)
        np.testing.assert_array_equal(gradients[1][V:], 0.0)
        for reference in gradients[2:]:
            np.testing.assert_array_equal(reference, 0.0)


@pytest.mark.cases(quick=5)
@pytest.mark.parametrize(("direction", "k", "max_logits"), [*EXACT, *TOP_K])
def test_equal_models_have_no_kl_and_no_slope(direction, k, max_logits):
    program = chunked(direction, max_logits, k)
    for temperature in TEMPERATURES:
        output, gradients = program(temperature, HIDDEN, HEAD, HIDDEN, HEAD)
        np.testing.assert_array_equal(output, 0.0)
        np.testing.assert_allclose(gradients[0], 0.0, atol=3e-6)
        np.testing.assert_allclose(gradients[1], 0.0, atol=3e-6)
        # Equal as models, and not as arrays: the level of the logits is nobody's.
        head = HEAD.copy()
        head[:, 0] = 1.0
        raised = HIDDEN.copy()
        raised[..., 0] += 16.0
        output, _ = program(temperature, raised, head, HIDDEN, head)
        np.testing.assert_allclose(output, 0.0, atol=1e-5 / temperature)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("max_logits", [2 * B * S * 64, 2**24])
def test_logits_that_lie_far_apart(direction, max_logits):
    """Logits over 30 nats, 300 tokens, and chunks that do not divide them."""
    rng = np.random.default_rng(1)
    width, vocab = 16, 300
    hidden = rng.normal(0, 1.4, (B, S, width)).astype(np.float32)
    head = rng.normal(size=(vocab, width)).astype(np.float32)
    ref_hidden = hidden + rng.normal(0, 0.1, hidden.shape).astype(np.float32)
    options = {"direction": direction, "max_logits": max_logits}
    output = jax.jit(functools.partial(kl.exact_from_hidden, **options))(
        *(hidden, head, ref_hidden, head)
    )
    pair = [oracles.logits_from_hidden(x, head) for x in (hidden, ref_hidden)]
    assert np.median(np.ptp(pair[0], axis=-1)) > 25
    expected = oracles.exact_kl(*(pair if direction == "reverse" else pair[::-1]))
    np.testing.assert_allclose(output[:, 1:], expected[:, :-1], rtol=1e-5, atol=1e-5)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_half_precision_accumulates_in_float32_and_keeps_the_masters_dtype(direction):
    half = [x.astype(jnp.bfloat16) for x in (HIDDEN, REF_HIDDEN)]
    head = [x.astype(jnp.bfloat16).astype(np.float32) for x in (HEAD, REF_HEAD)]
    wide = [x.astype(np.float32) for x in half]
    arrays = (wide[0], head[0], wide[1], head[1])
    output, narrow = chunked(direction)(0.7, half[0], head[0], half[1], head[1])
    expected = oracle(*arrays, direction=direction)
    assert output.dtype == jnp.float32
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)
    assert [g.dtype for g in narrow[:2]] == [jnp.bfloat16, jnp.float32]
    _, exact = chunked(direction)(0.7, *arrays)
    for output, expected in zip(narrow[:2], exact[:2], strict=True):
        error = np.abs(output.astype(np.float32) - expected)
        assert np.max(error) <= 0.01 * np.max(np.abs(expected))
    # Sums over tokens have more digits than bfloat16, in which they would be rounded.
    rounded = narrow[1].astype(jnp.bfloat16).astype(jnp.float32)
    assert np.mean(rounded != narrow[1]) > 0.5


@pytest.mark.parametrize("first_column", [3, S, S + 1])
def test_columns_before_the_first_are_0(first_column):
    output = jax.jit(functools.partial(from_hidden, first_column=first_column))(*ARRAYS)
    assert output.shape == (B, S)
    np.testing.assert_array_equal(output[:, :first_column], 0.0)
    expected = oracle(*ARRAYS)[:, first_column:]
    np.testing.assert_allclose(output[:, first_column:], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("k", [None, pytest.param(5, marks=pytest.mark.slow)])
def test_a_column_that_is_masked_out_plays_no_part(k):
    """Hidden states at padding affect neither value nor gradient."""
    mask = np.ones((B, S), bool)
    mask[0, 2], mask[1, 4] = False, False

    @jax.jit
    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def run(hidden, head, ref_hidden, ref_head):
        output = from_hidden(hidden, head, ref_hidden, ref_head, k=k, max_logits=TEN)
        return jnp.sum(jnp.where(mask, output, 0.0))

    expected, gradients = run(*ARRAYS)
    for garbage in (np.nan, np.inf, 1e30):
        hidden, ref_hidden = HIDDEN.copy(), REF_HIDDEN.copy()
        for array in (hidden, ref_hidden):
            array[0, 1], array[1, 3], array[:, -1] = garbage, garbage, garbage
        output, poisoned = run(hidden, HEAD, ref_hidden, REF_HEAD)
        np.testing.assert_array_equal(output, expected)
        np.testing.assert_allclose(poisoned[0], gradients[0], atol=1e-6)
        np.testing.assert_allclose(poisoned[1], gradients[1], atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("k", [None, pytest.param(5, marks=pytest.mark.slow)])
def test_rows_on_eight_devices_give_the_same(k):
    rng = np.random.default_rng(2)
    hidden, ref_hidden = rng.normal(size=(2, 8, S, D)).astype(np.float32)
    head, ref_head = rng.normal(size=(2, PADDED, D)).astype(np.float32)
    weights = rng.normal(size=(8, S)).astype(np.float32)

    def loss(hidden, head, ref_hidden, ref_head):
        arrays = (hidden, head, ref_hidden, ref_head)
        output = from_hidden(*arrays, k=k, max_logits=2 * 8 * S * 10)
        return jnp.sum(output * weights), output

    run = jax.jit(jax.value_and_grad(loss, (0, 1), has_aux=True))
    (_, expected), gradients = run(hidden, head, ref_hidden, ref_head)
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("batch"))
    everywhere = NamedSharding(mesh, PartitionSpec())
    placed = [
        jax.device_put(array, rows if array.ndim == 3 else everywhere)
        for array in (hidden, head, ref_hidden, ref_head)
    ]
    (_, output), sharded = run(*placed)
    assert output.sharding.is_equivalent_to(rows, output.ndim)
    np.testing.assert_allclose(output, expected, rtol=1e-6, atol=2e-6)
    for gradient, alone in zip(sharded, gradients, strict=True):
        np.testing.assert_allclose(gradient, alone, rtol=1e-5, atol=3e-6)


@pytest.mark.slow
def test_mapped_over_models_it_is_each_models_own():
    """As in a sweep that maps over seeds."""
    hidden = normal(3, B, S, D)
    head = normal(3, PADDED, D)

    def gradient(hidden, head):
        return jax.grad(lambda x: jnp.sum(from_hidden(hidden, x, *ARRAYS[2:])))(head)

    mapped = jax.jit(jax.vmap(gradient))(hidden, head)
    for number in range(3):
        alone = jax.jit(gradient)(hidden[number], head[number])
        np.testing.assert_allclose(mapped[number], alone, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(("direction", "k", "max_logits"), TOP_K)
def test_top_k_matches_the_oracle(direction, k, max_logits):
    logits = oracles.logits_from_hidden(HIDDEN, HEAD[:V])
    ref_logits = oracles.logits_from_hidden(REF_HIDDEN, REF_HEAD[:V])
    for temperature in (0.3, 1.0):
        expected = np.zeros((B, S))
        expected[:, 1:] = top_k_oracle(
            logits[:, :-1], ref_logits[:, :-1], k, temperature, direction
        )
        for program in (chunked(direction, max_logits, k), whole(direction, k)):
            output, _ = program(temperature)
            np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


def test_top_k_rises_to_the_exact_kl():
    """Merging outcomes can only hide a difference."""
    exact, _ = chunked()(0.7)
    before = np.zeros_like(exact)
    for k in (1, 5, V):
        output, _ = whole("reverse", k)(0.7)
        assert np.all(output >= before - 1e-6)
        assert np.all(output <= exact + 1e-5)
        before = output
    np.testing.assert_allclose(before, exact, rtol=1e-5, atol=1e-5)


def test_top_k_keeps_the_policys_words_in_both_directions():
    """The policy's two likeliest tokens, although the reference prefers another."""
    logits = jnp.log(jnp.array([0.5, 0.3, 0.1, 0.1]))
    ref_logits = jnp.log(jnp.array([0.2, 0.2, 0.5, 0.1]))
    merged, ref_merged = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.2, 0.6])
    reverse = (merged * np.log(merged / ref_merged)).sum()
    forward = (ref_merged * np.log(ref_merged / merged)).sum()
    for direction, expected in (("reverse", reverse), ("forward", forward)):
        output = jax.jit(kl.top_k, static_argnames=("k", "direction"))(
            logits, ref_logits, k=2, direction=direction
        )
        np.testing.assert_allclose(output, expected, rtol=1e-5)


@pytest.mark.slow
def test_top_k_gradient_matches_finite_differences():
    logits, ref_logits = normal(3, 7, scale=2.0), normal(3, 7, scale=2.0)
    for direction in DIRECTIONS:

        def value(x, direction=direction):
            return float(top_k_oracle(x, ref_logits, 3, direction=direction).sum())

        def loss(x, direction=direction):
            return jnp.sum(kl.top_k(x, ref_logits, k=3, direction=direction))

        expected = oracles.numerical_gradient(value, logits)
        output = jax.jit(jax.grad(loss))(logits)
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_top_k_with_words_that_cannot_come():
    """Tokens 4 to 6 are impossible in both models, so the bucket of k = 4 is empty."""
    logits, ref_logits = normal(7), normal(7)
    logits[4:], ref_logits[4:] = -np.inf, -np.inf
    expected = kl.exact(logits[:4], ref_logits[:4])
    for k in (4, 6):
        output, gradients = jax.jit(
            jax.value_and_grad(lambda *pair, k=k: kl.top_k(*pair, k=k), (0, 1))
        )(logits, ref_logits)
        np.testing.assert_allclose(output, expected, rtol=1e-5)
        assert all(np.all(np.isfinite(gradient)) for gradient in gradients)


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_a_quarter_of_the_memory_at_the_size_of_gpt2(direction):
    """The compiler's figure, without a run; D = 64 keeps the heads small."""
    rows, columns, width, vocab, padded = 4, 256, 64, 50257, 50304

    def in_chunks(*arrays):
        return kl.exact_from_hidden(*arrays, vocab_size=vocab, direction=direction)

    def at_once(hidden, head, ref_hidden, ref_head):
        logits = jnp.einsum("btd,vd->btv", hidden, head)[..., :vocab]
        ref_logits = jnp.einsum("btd,vd->btv", ref_hidden, ref_head)[..., :vocab]
        return kl.exact(logits, ref_logits, direction=direction)

    def temporary_bytes(function) -> int:
        shapes = [
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in 2 * ((rows, columns, width), (padded, width))
        ]
        memory = jax.jit(function).lower(*shapes).compile().memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    def trained(function):
        loss = lambda *arrays: jnp.sum(function(*arrays))  # noqa: E731
        return jax.value_and_grad(loss, (0, 1))

    assert temporary_bytes(in_chunks) <= temporary_bytes(at_once) / 4
    assert temporary_bytes(trained(in_chunks)) <= temporary_bytes(trained(at_once)) / 4


def test_wrong_input_says_what_to_do():
    with pytest.raises(ValueError, match=r"ref_head: expected shape \(any, 6\), got"):
        from_hidden(HIDDEN, HEAD, REF_HIDDEN, HEAD.T)
    with pytest.raises(ValueError, match=r"ref_hidden: expected shape \(2, 5, any\)"):
        from_hidden(HIDDEN, HEAD, REF_HIDDEN[:, 1:], REF_HEAD)
    with pytest.raises(ValueError, match=r"vocab_size: expected .* most 48, got 49;"):
        from_hidden(vocab_size=PADDED + 1)
    with pytest.raises(ValueError, match=r"heads have 48 and 40 rows, got None; pass"):
        from_hidden(*ARRAYS[:3], REF_HEAD[:40], vocab_size=None)
    with pytest.raises(ValueError, match=r"first_column: expected .* above 0, got 0"):
        from_hidden(first_column=0)
    with pytest.raises(ValueError, match=r"direction: .* got 'backward'; choose"):
        from_hidden(direction="backward")
    with pytest.raises(ValueError, match=r"temperature: expected .* above 0, got 0"):
        from_hidden(temperature=0.0)
    with pytest.raises(TypeError, match=r"hidden: expected a floating dtype, got int"):
        from_hidden(HIDDEN.astype(np.int32), *ARRAYS[1:])
    for k in (0, V + 1):
        with pytest.raises(
            ValueError, match=rf"k: expected .* at most 37, got {k}; choose"
        ):
            from_hidden(k=k)


@pytest.mark.parametrize("k", [None, 3])
def test_a_batch_of_no_rows_has_no_kl(k):
    nothing = from_hidden(HIDDEN[:0], HEAD, REF_HIDDEN[:0], REF_HEAD, k=k)
    assert (nothing.shape, nothing.dtype) == ((0, S), np.float32)


def test_options_of_another_divergence_are_refused():
    """Passed on, they would change what is computed, without a word."""
    tokens = jnp.ones((B, S), jnp.int32)
    for function, options in (
        (kl.exact_from_hidden, {"beta": 0.5}),
        (kl.exact_from_hidden, {"tokens": tokens}),
        (kl.head_from_hidden, {"tokens": tokens, "k": 2, "direction": "forward"}),
    ):
        with pytest.raises(TypeError, match="unexpected keyword argument"):
            function(*ARRAYS, vocab_size=V, **options)
