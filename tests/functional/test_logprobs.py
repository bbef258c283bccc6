import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiers import one_in

from rlhf_jax import kl, logprobs
from rlhf_jax.planning import cost

pytestmark = pytest.mark.usefixtures("strict_dtypes")

B, S, D, V, PADDED = 3, 6, 5, 43, 48
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 3, (B, S, V)).astype(np.float32)
HIDDEN = RNG.normal(0, 1, (B, S, D)).astype(np.float32)
HEAD = RNG.normal(0, 1, (PADDED, D)).astype(np.float32)
TOKENS = RNG.integers(0, V, (B, S)).astype(np.int32)

# The head is 16 blocks of 3 rows. Two of each at a time, for the 5 columns that are
# computed: two chunks, and a row of each block is seen twice.
TWO_ROWS = 2 * 16 * B * (S - 1)


def from_hidden(hidden=HIDDEN, head=HEAD, tokens=TOKENS, **options):
    options = {"vocab_size": V, "temperature": 0.7} | options
    return logprobs.token_logprobs_from_hidden(hidden, head, tokens, **options)


def expected_from_hidden() -> tuple[np.ndarray, np.ndarray]:
    logits = oracles.logits_from_hidden(HIDDEN, HEAD[:V])
    entropy = np.zeros((B, S))
    entropy[:, 1:] = oracles.entropy(logits, 0.7)[:, :-1]
    return oracles.token_logprobs(logits, TOKENS, 0.7), entropy


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
def test_token_logprobs_and_entropy_match_the_oracle(temperature: float):
    output = logprobs.token_logprobs(LOGITS, TOKENS, temperature=temperature)
    expected = oracles.token_logprobs(LOGITS, TOKENS, temperature)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(output[:, 0], 0.0)
    output = logprobs.entropy(LOGITS, temperature=temperature)
    expected = oracles.entropy(LOGITS, temperature)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


def test_column_t_is_read_from_the_logits_before_it():
    certain = np.full((1, 4, 5), -1e4, np.float32)
    tokens = np.array([[3, 1, 4, 2]], np.int32)
    for t in range(1, 4):
        certain[0, t - 1, tokens[0, t]] = 1e4
    output = logprobs.token_logprobs(certain, tokens)
    np.testing.assert_array_equal(output, np.zeros((1, 4)))


def test_probabilities_of_all_tokens_sum_to_1():
    total = np.zeros(B)
    for token in range(V):
        output = logprobs.token_logprobs(LOGITS, np.full((B, S), token, np.int32))
        total += np.exp(np.asarray(output)[:, 3])
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_entropy_of_equal_logits_is_log_v_and_of_one_word_0():
    logits = np.stack([np.full(V, 7.0), np.full(V, -np.inf)]).astype(np.float32)
    logits[1, 4] = 2.0
    output = logprobs.entropy(logits)
    np.testing.assert_allclose(output, [np.log(V), 0.0], rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(logprobs.entropy(x)))(logits)
    np.testing.assert_allclose(gradient, np.zeros_like(logits), atol=1e-6)


def test_logits_of_half_precision_are_taken_to_float32():
    half = LOGITS.astype(jnp.bfloat16)
    output = logprobs.token_logprobs(half, TOKENS)
    assert output.dtype == jnp.float32
    expected = oracles.token_logprobs(half.astype(np.float32), TOKENS)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_gradient_of_logprobs_and_entropy_match_finite_differences():
    weights = RNG.normal(size=(B, S))

    def loss(x):
        w = weights.astype(np.float32)
        output = logprobs.token_logprobs(x, TOKENS, temperature=0.7)
        return jnp.sum(output * w) + jnp.sum(logprobs.entropy(x, temperature=0.7) * w)

    def oracle(x):
        output = oracles.token_logprobs(x, TOKENS, 0.7)
        return float((output * weights + oracles.entropy(x, 0.7) * weights).sum())

    expected = oracles.numerical_gradient(oracle, LOGITS)
    gradient = jax.jit(jax.grad(loss))(LOGITS)
    np.testing.assert_allclose(gradient, expected, rtol=1e-3, atol=1e-4)


# 2**32 is what 256 devices have together, more than int32 holds.
@pytest.mark.parametrize("max_logits", [1, TWO_ROWS, 2**32])
def test_from_hidden_matches_the_oracle(max_logits: int):
    for output, expected in zip(
        from_hidden(max_logits=max_logits), expected_from_hidden(), strict=True
    ):
        assert output.dtype == jnp.float32
        np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_logits", one_in(2, [TWO_ROWS, 2**24]))
def test_from_hidden_gradient_matches_finite_differences(max_logits: int):
    weights = RNG.normal(size=(2, B, S)).astype(np.float32)

    def loss(hidden, head):
        output = from_hidden(hidden, head, max_logits=max_logits)
        return jnp.sum(output[0] * weights[0]) + jnp.sum(output[1] * weights[1])

    def oracle(hidden, head):
        logits = oracles.logits_from_hidden(hidden, head[:V])
        output = oracles.token_logprobs(logits, TOKENS, 0.7) * weights[0]
        entropy = oracles.entropy(logits, 0.7)[:, :-1] * weights[1, :, 1:]
        return float(output.sum() + entropy.sum())

    for_hidden, for_head = jax.jit(jax.grad(loss, (0, 1)))(HIDDEN, HEAD)
    expected = oracles.numerical_gradient(lambda x: oracle(x, HEAD), HIDDEN)
    np.testing.assert_allclose(for_hidden, expected, rtol=1e-3, atol=1e-4)
    expected = oracles.numerical_gradient(lambda x: oracle(HIDDEN, x), HEAD)
    np.testing.assert_allclose(for_head, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(for_head[V:], 0.0)


def weighted(output, weights):
    return jnp.sum(output[0] * weights[0]) + jnp.sum(output[1] * weights[1])


def materialised(hidden, head, tokens, temperature=0.7):
    """The reference implementation, by autodiff through all logits."""
    logits = jnp.einsum("bsd,vd->bsv", hidden, head)
    logprobs_ = logprobs.token_logprobs(logits, tokens, temperature=temperature)
    entropy = logprobs.entropy(logits[:, :-1], temperature=temperature)
    return logprobs_, jnp.pad(entropy, ((0, 0), (1, 0)))


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("padding", one_in(3, [np.nan, np.inf, 1e3]))
@pytest.mark.parametrize("max_logits", [1, TWO_ROWS, 2**24])
def test_padded_rows_of_the_head_play_no_part(max_logits: int, padding: float):
    weights = RNG.normal(size=(2, B, S)).astype(np.float32)

    @jax.jit
    def both(head):
        def loss(hidden, head):
            output = from_hidden(hidden, head, max_logits=max_logits)
            return weighted(output, weights), output

        return jax.grad(loss, (0, 1), has_aux=True)(HIDDEN, head)

    head = HEAD.copy()
    head[V:] = padding
    chex.assert_trees_all_equal(both(head), both(HEAD))


@pytest.mark.cases(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "words"),
    [
        *((5, 30), (1, 1), (5, 1), (1, 13), (5, 13), (1, 30)),
        *(
            pytest.param(w, n, marks=pytest.mark.long)
            for w in (1, 5)
            for n in (2, 16, 96)
        ),
    ],
)
def test_sizes_that_do_not_divide(words: int, width: int):
    """Compares with autodiff through all logits at every chunk size."""
    rng = np.random.default_rng(words)
    hidden = rng.normal(size=(2, 4, width)).astype(np.float32)
    head = rng.normal(size=(words, width)).astype(np.float32)
    tokens = rng.integers(0, words, (2, 4)).astype(np.int32)
    weights = rng.normal(size=(2, 2, 4)).astype(np.float32)

    def chunked(hidden, head, max_logits):
        output = from_hidden(
            hidden, head, tokens, vocab_size=None, max_logits=max_logits
        )
        return weighted(output, weights), output

    def whole(hidden, head):
        output = materialised(hidden, head, tokens)
        return weighted(output, weights), output

    expected = jax.value_and_grad(whole, (0, 1), has_aux=True)(hidden, head)
    step = jax.jit(jax.value_and_grad(chunked, (0, 1), has_aux=True), static_argnums=2)
    for max_logits in (1, 2 * 3 * 5, 2 * 3 * 32, 2**24):
        output = step(hidden, head, max_logits)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
            output,
            expected,
        )


@pytest.mark.slow
def test_gradient_of_one_argument_alone_and_its_products():
    """4 products with the head if both are differentiated, 3 for hidden alone."""
    weights = RNG.normal(size=(2, B, S)).astype(np.float32)

    def loss(hidden, head):
        return weighted(from_hidden(hidden, head, max_logits=TWO_ROWS), weights)

    def run(argnums):
        step = jax.jit(jax.value_and_grad(loss, argnums))
        compiled = step.lower(HIDDEN, HEAD).compile()
        # 2 chunks of 2 rows of every block
        product = 2 * B * (S - 1) * D * (4 * 16)
        work = cost.cost(compiled.as_text())
        return step(HIDDEN, HEAD)[1], work.flops / product

    (both, products) = run((0, 1))
    assert products == 4
    for argnum in (0, 1):
        alone, products = run(argnum)
        np.testing.assert_allclose(alone, both[argnum], rtol=1e-6, atol=1e-6)
        assert products == 3


@pytest.mark.slow
@pytest.mark.parametrize("which", one_in(2, [0, 1]))
def test_gradient_of_one_result_alone(which: int):
    weights = np.zeros((2, B, S), np.float32)
    weights[which] = RNG.normal(size=(B, S))

    def alone(hidden, head):
        output = from_hidden(hidden, head, max_logits=TWO_ROWS)
        return jnp.sum(output[which] * weights[which])

    def whole(hidden, head):
        return weighted(materialised(hidden, head[:V], TOKENS), weights)

    gradient = jax.jit(jax.grad(alone, (0, 1)))(HIDDEN, HEAD)
    expected = jax.grad(whole, (0, 1))(HIDDEN, HEAD)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5),
        gradient,
        expected,
    )


def test_gradient_of_the_temperature_matches_finite_differences():
    weights = RNG.normal(size=(2, B, S)).astype(np.float32)

    def loss(temperature):
        output = from_hidden(temperature=temperature, max_logits=TWO_ROWS)
        return weighted(output, weights)

    def oracle(temperature):
        logits = oracles.logits_from_hidden(HIDDEN, HEAD[:V])
        output = oracles.token_logprobs(logits, TOKENS, float(temperature[0]))
        entropy = oracles.entropy(logits, float(temperature[0]))[:, :-1]
        return float((output * weights[0]).sum() + (entropy * weights[1, :, 1:]).sum())

    expected = oracles.numerical_gradient(oracle, np.array([0.7]))
    gradient = jax.jit(jax.grad(loss))(jnp.float32(0.7))
    np.testing.assert_allclose(gradient, expected[0], rtol=1e-3)


def test_positions_without_a_cotangent_play_no_part_in_the_gradient():
    mask = RNG.random((B, S)) < 0.5
    weights = np.where(mask, RNG.normal(size=(2, B, S)), 0.0).astype(np.float32)
    broken = HIDDEN.copy()
    broken[:, :-1][~mask[:, 1:]] = np.nan

    def loss(hidden, head):
        output = from_hidden(hidden, head, max_logits=TWO_ROWS)
        return weighted([jnp.where(mask, x, 0.0) for x in output], weights)

    step = jax.jit(jax.grad(loss, (0, 1)))
    output, expected = step(broken, HEAD), step(HIDDEN, HEAD)
    chex.assert_trees_all_equal(output, expected)


@pytest.mark.slow
def test_under_vmap():
    weights = RNG.normal(size=(2, B, S)).astype(np.float32)

    def loss(hidden, head, tokens):
        output = from_hidden(hidden, head, tokens, max_logits=TWO_ROWS)
        return weighted(output, weights)

    step = jax.jit(jax.grad(loss, (0, 1)))
    args = [jnp.stack([x, x[::-1]]) for x in (HIDDEN, HEAD, TOKENS)]
    output = jax.jit(jax.vmap(step))(*args)
    for i in range(2):
        expected = step(*(x[i] for x in args))
        jax.tree.map(
            lambda a, b, i=i: np.testing.assert_allclose(a[i], b, rtol=1e-5, atol=1e-5),
            output,
            expected,
        )


def test_logits_on_a_high_level_keep_their_digits():
    """A constant added to all logits of a position has no effect."""
    rounded = [np.round(array * 64) / 64 for array in (HIDDEN, HEAD)]
    hidden, head = (
        np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, 1)]) for array in rounded
    )
    raised = head.copy()  # what a program under way still reads is not to change
    hidden[..., D], raised[:, D] = 1.0, 4096.0
    output = from_hidden(hidden, raised, temperature=1.0, max_logits=TWO_ROWS)
    expected = from_hidden(hidden, head, temperature=1.0, max_logits=TWO_ROWS)
    for a, b in zip(output, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-3)


def test_a_token_that_cannot_come_and_one_that_is_none():
    tokens = TOKENS.copy()
    tokens[:, 2], tokens[:, 3], tokens[:, 4] = V, PADDED, -1
    output, _ = from_hidden(tokens=tokens, max_logits=TWO_ROWS)
    np.testing.assert_array_equal(output[:, 2], -np.inf)
    np.testing.assert_array_equal(output[:, 3:5], np.nan)
    expected, _ = expected_from_hidden()
    np.testing.assert_allclose(output[:, 5], expected[:, 5], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first_column", [1, 4, S, S + 1])
@pytest.mark.parametrize("max_logits", [1, 2**24])
def test_columns_before_the_first_are_0(first_column: int, max_logits: int):
    options = {"first_column": first_column, "max_logits": max_logits}
    for output, expected in zip(
        from_hidden(**options), expected_from_hidden(), strict=True
    ):
        assert output.shape == (B, S)
        np.testing.assert_array_equal(output[:, :first_column], 0.0)
        np.testing.assert_allclose(
            output[:, first_column:], expected[:, first_column:], rtol=1e-5, atol=1e-5
        )


@pytest.mark.slow
def test_rows_do_not_know_each_other():
    order = np.array([2, 0, 1])
    for output, expected in zip(
        from_hidden(HIDDEN[order], tokens=TOKENS[order], max_logits=TWO_ROWS),
        from_hidden(max_logits=TWO_ROWS),
        strict=True,
    ):
        np.testing.assert_allclose(output, expected[order], rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_half_precision_accumulates_in_float32_and_keeps_the_masters_dtype():
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(2, 4, 2048)).astype(jnp.bfloat16)
    head = rng.normal(size=(8, 2048)).astype(jnp.bfloat16).astype(np.float32)
    tokens = rng.integers(0, 8, (2, 4)).astype(np.int32)

    def total(hidden, head):
        output, _ = logprobs.token_logprobs_from_hidden(
            hidden, head, tokens, temperature=50.0, max_logits=2 * 8
        )
        return jnp.sum(output), output

    logits = oracles.logits_from_hidden(hidden.astype(np.float32), head)
    expected = oracles.token_logprobs(logits, tokens, 50.0)
    gradients, output = jax.jit(jax.grad(total, (0, 1), has_aux=True))(hidden, head)
    assert output.dtype == jnp.float32
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]

    def whole(hidden, head):
        return jnp.sum(materialised(hidden, head, tokens, 50.0)[0])

    wide = hidden.astype(np.float32)
    for output, expected in zip(
        gradients, jax.grad(whole, (0, 1))(wide, head), strict=True
    ):
        near = 2**-7 * np.abs(expected).max()
        np.testing.assert_allclose(output.astype(np.float32), expected, atol=near)


def test_softcapped_logits_match_the_oracle():
    """c·tanh(z / c), before the temperature."""
    output, entropy = from_hidden(softcap=2.0)
    logits = 2.0 * np.tanh(oracles.logits_from_hidden(HIDDEN, HEAD[:V]) / 2.0)
    expected = oracles.token_logprobs(logits, TOKENS, 0.7)
    np.testing.assert_allclose(output, expected, rtol=1e-5, atol=1e-5)
    expected = oracles.entropy(logits, 0.7)[:, :-1]
    np.testing.assert_allclose(entropy[:, 1:], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_never_holds_the_logits_of_every_position():
    rows, columns, width, vocab = 4, 512, 16, 2048
    all_logits = rows * columns * vocab * 4  # bytes in float32, 16 MiB

    def loss(hidden, head, tokens):
        output = logprobs.token_logprobs_from_hidden(
            hidden, head, tokens, max_logits=16 * rows * vocab
        )
        return jnp.sum(output[0] + output[1])

    shapes = (
        jax.ShapeDtypeStruct((rows, columns, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, columns), jnp.int32),
    )
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    memory = step.lower(*shapes).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < all_logits / 4


def test_wrong_input_says_what_to_do():
    with pytest.raises(ValueError, match=r"tokens: expected shape \(any, any\), got"):
        logprobs.token_logprobs(LOGITS[0], TOKENS[0])
    with pytest.raises(ValueError, match=r"logits: expected shape \(3, 6, any\), got"):
        logprobs.token_logprobs(LOGITS[:, 1:], TOKENS)
    with pytest.raises(TypeError, match=r"tokens: expected int32, got float32; cast"):
        logprobs.token_logprobs(LOGITS, TOKENS.astype(np.float32))
    with pytest.raises(TypeError, match=r"logits: expected a floating dtype, got int"):
        logprobs.entropy(TOKENS)
    for temperature in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match=r"temperature: expected .* above 0, got"):
            logprobs.token_logprobs(LOGITS, TOKENS, temperature=temperature)
    with pytest.raises(ValueError, match=r"head: expected shape \(any, 5\), got"):
        from_hidden(head=HEAD.T)
    with pytest.raises(ValueError, match=r"vocab_size: expected .* most 48, got 49;"):
        from_hidden(vocab_size=49)
    with pytest.raises(ValueError, match=r"first_column: expected .* above 0, got 0"):
        from_hidden(first_column=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, t: logprobs.token_logprobs(x, TOKENS_OF_THREE, temperature=t),
        lambda x, y, t: logprobs.entropy(x, temperature=t),
        lambda x, y, t: kl.exact(x, y, temperature=t),
        lambda x, y, t: kl.top_k(x, y, k=2, temperature=t),
        lambda x, y, t: kl.jensen_shannon(x, y, beta=0.3, temperature=t),
    ],
)
def test_a_learned_temperature_may_meet_tokens_of_probability_0(function):
    """A logit of -inf over a temperature would have an infinite slope in it."""
    rng = np.random.default_rng(0)
    logits, ref_logits = (
        jnp.asarray(rng.normal(size=(1, 3, 4)), jnp.float32).at[..., 2].set(-jnp.inf)
        for _ in range(2)
    )

    def total(temperature):
        return function(logits, ref_logits, temperature).sum()

    slope = jax.grad(total)(jnp.float32(0.7))
    step = 1e-2
    difference = (total(jnp.float32(0.7 + step)) - total(jnp.float32(0.7 - step))) / (
        2 * step
    )
    assert float(slope) == pytest.approx(float(difference), rel=5e-3, abs=1e-4)
    gradient = jax.grad(lambda x: function(x, ref_logits, 0.7).sum())(logits)
    assert np.isfinite(gradient).all()


TOKENS_OF_THREE = jnp.array([[0, 1, 3]], jnp.int32)
