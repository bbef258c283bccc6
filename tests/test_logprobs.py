import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax import logprobs

pytestmark = pytest.mark.usefixtures("strict_dtypes")

B, S, D, V, PADDED = 3, 6, 5, 11, 16
RNG = np.random.default_rng(0)
LOGITS = RNG.normal(0, 3, (B, S, V)).astype(np.float32)
HIDDEN = RNG.normal(0, 1, (B, S, D)).astype(np.float32)
HEAD = RNG.normal(0, 1, (PADDED, D)).astype(np.float32)
TOKENS = RNG.integers(0, V, (B, S)).astype(np.int32)

# Two columns at a time of the five that are priced: three chunks, one column padding.
TWO_COLUMNS = 2 * B * PADDED


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
    found = logprobs.token_logprobs(LOGITS, TOKENS, temperature=temperature)
    expected = oracles.token_logprobs(LOGITS, TOKENS, temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(found[:, 0], 0.0)
    found = logprobs.entropy(LOGITS, temperature=temperature)
    expected = oracles.entropy(LOGITS, temperature)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_column_t_is_read_from_the_logits_before_it():
    certain = np.full((1, 4, 5), -1e4, np.float32)
    tokens = np.array([[3, 1, 4, 2]], np.int32)
    for t in range(1, 4):
        certain[0, t - 1, tokens[0, t]] = 1e4
    found = logprobs.token_logprobs(certain, tokens)
    np.testing.assert_array_equal(found, np.zeros((1, 4)))


def test_probabilities_of_all_tokens_sum_to_1():
    total = np.zeros(B)
    for token in range(V):
        found = logprobs.token_logprobs(LOGITS, np.full((B, S), token, np.int32))
        total += np.exp(np.asarray(found)[:, 3])
    np.testing.assert_allclose(total, 1.0, rtol=1e-5)


def test_entropy_of_equal_logits_is_log_v_and_of_one_word_0():
    logits = np.stack([np.full(V, 7.0), np.full(V, -np.inf)]).astype(np.float32)
    logits[1, 4] = 2.0
    found = logprobs.entropy(logits)
    np.testing.assert_allclose(found, [np.log(V), 0.0], rtol=1e-6)
    gradient = jax.grad(lambda x: jnp.sum(logprobs.entropy(x)))(logits)
    np.testing.assert_allclose(gradient, np.zeros_like(logits), atol=1e-6)


def test_logits_of_half_precision_are_taken_to_float32():
    half = LOGITS.astype(jnp.bfloat16)
    found = logprobs.token_logprobs(half, TOKENS)
    assert found.dtype == jnp.float32
    expected = oracles.token_logprobs(half.astype(np.float32), TOKENS)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_gradient_of_logprobs_and_entropy_match_finite_differences():
    weights = RNG.normal(size=(B, S))

    def loss(x):
        w = weights.astype(np.float32)
        found = logprobs.token_logprobs(x, TOKENS, temperature=0.7)
        return jnp.sum(found * w) + jnp.sum(logprobs.entropy(x, temperature=0.7) * w)

    def oracle(x):
        found = oracles.token_logprobs(x, TOKENS, 0.7)
        return float((found * weights + oracles.entropy(x, 0.7) * weights).sum())

    expected = oracles.numerical_gradient(oracle, LOGITS)
    found = jax.jit(jax.grad(loss))(LOGITS)
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("max_logits", [1, TWO_COLUMNS, 2**24])
def test_from_hidden_matches_the_oracle(max_logits: int):
    for found, expected in zip(
        from_hidden(max_logits=max_logits), expected_from_hidden(), strict=True
    ):
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("max_logits", [TWO_COLUMNS, 2**24])
def test_from_hidden_gradient_matches_finite_differences(max_logits: int):
    weights = RNG.normal(size=(2, B, S)).astype(np.float32)

    def loss(hidden, head):
        found = from_hidden(hidden, head, max_logits=max_logits)
        return jnp.sum(found[0] * weights[0]) + jnp.sum(found[1] * weights[1])

    def oracle(hidden, head):
        logits = oracles.logits_from_hidden(hidden, head[:V])
        found = oracles.token_logprobs(logits, TOKENS, 0.7) * weights[0]
        entropy = oracles.entropy(logits, 0.7)[:, :-1] * weights[1, :, 1:]
        return float(found.sum() + entropy.sum())

    for_hidden, for_head = jax.jit(jax.grad(loss, (0, 1)))(HIDDEN, HEAD)
    expected = oracles.numerical_gradient(lambda x: oracle(x, HEAD), HIDDEN)
    np.testing.assert_allclose(for_hidden, expected, rtol=1e-3, atol=1e-4)
    expected = oracles.numerical_gradient(lambda x: oracle(HIDDEN, x), HEAD)
    np.testing.assert_allclose(for_head, expected, rtol=1e-3, atol=1e-4)
    np.testing.assert_array_equal(for_head[V:], 0.0)


def test_padded_rows_of_the_head_play_no_part():
    head = HEAD.copy()
    head[V:] = 1e3
    for found, expected in zip(from_hidden(head=head), from_hidden(), strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("first_column", [1, 4, S, S + 1])
@pytest.mark.parametrize("max_logits", [1, 2**24])
def test_columns_before_the_first_are_0(first_column: int, max_logits: int):
    options = {"first_column": first_column, "max_logits": max_logits}
    for found, expected in zip(
        from_hidden(**options), expected_from_hidden(), strict=True
    ):
        assert found.shape == (B, S)
        np.testing.assert_array_equal(found[:, :first_column], 0.0)
        np.testing.assert_allclose(
            found[:, first_column:], expected[:, first_column:], rtol=1e-5, atol=1e-5
        )


def test_rows_do_not_know_each_other():
    order = np.array([2, 0, 1])
    for found, expected in zip(
        from_hidden(HIDDEN[order], tokens=TOKENS[order], max_logits=TWO_COLUMNS),
        from_hidden(max_logits=TWO_COLUMNS),
        strict=True,
    ):
        np.testing.assert_allclose(found, expected[order], rtol=1e-6, atol=1e-6)


def test_half_precision_accumulates_in_float32_and_keeps_the_masters_dtype():
    rng = np.random.default_rng(1)
    hidden = rng.normal(size=(2, 4, 2048)).astype(jnp.bfloat16)
    head = rng.normal(size=(8, 2048)).astype(jnp.bfloat16).astype(np.float32)
    tokens = rng.integers(0, 8, (2, 4)).astype(np.int32)

    def total(hidden, head):
        found, _ = logprobs.token_logprobs_from_hidden(
            hidden, head, tokens, temperature=50.0, max_logits=2 * 8
        )
        return jnp.sum(found), found

    logits = oracles.logits_from_hidden(hidden.astype(np.float32), head)
    expected = oracles.token_logprobs(logits, tokens, 50.0)
    gradients, found = jax.jit(jax.grad(total, (0, 1), has_aux=True))(hidden, head)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.float32]


def test_never_holds_the_logits_of_every_position():
    rows, columns, width, vocab = 4, 512, 16, 2048
    all_logits = rows * columns * vocab * 4  # bytes in float32, 16 MiB

    def loss(hidden, head, tokens):
        found = logprobs.token_logprobs_from_hidden(
            hidden, head, tokens, max_logits=16 * rows * vocab
        )
        return jnp.sum(found[0] + found[1])

    shapes = (
        jax.ShapeDtypeStruct((rows, columns, width), jnp.float32),
        jax.ShapeDtypeStruct((vocab, width), jnp.float32),
        jax.ShapeDtypeStruct((rows, columns), jnp.int32),
    )
    step = jax.jit(jax.value_and_grad(loss, (0, 1)))
    memory = step.lower(*shapes).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < all_logits / 4


def test_map_columns_is_the_function_itself():
    x = RNG.normal(size=(2, 7, 3)).astype(np.float32)
    y = np.arange(14, dtype=np.float32).reshape(2, 7)

    def function(x, y):
        return jnp.sum(x, axis=-1) * y, x * 2.0

    for chunk in (3, 7):
        summed, doubled = logprobs.map_columns(function, x, y, chunk=chunk)
        np.testing.assert_allclose(summed, x.sum(-1) * y, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(doubled, x * 2)


def test_wrong_input_says_what_to_do():
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
    with pytest.raises(ValueError, match=r"vocab_size: expected 1 to 16 .* got 17;"):
        from_hidden(vocab_size=17)
    with pytest.raises(ValueError, match=r"first_column: expected .* above 0, got 0"):
        from_hidden(first_column=0)
