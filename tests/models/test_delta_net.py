"""Gated DeltaNet: chunks, the recurrence and a float64 loop over tokens agree."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
import toys
from jax.sharding import AxisType

from rlhf_jax import config, decoder, policy
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import cached_decoder, delta_net, delta_rule, leaves
from rlhf_jax.models.delta_rule import Tokens
from rlhf_jax.models.positions import AttentionMask
from rlhf_jax.roles.reference import storage

ROWS, COLUMNS, KEY_HEADS, HEADS, KEY, VALUE = 2, 13, 2, 4, 3, 2
# Text 0 goes on from the memory; the second row is one text, and begins at once.
TEXTS = np.array([[0, 0, 0, 1, 1, 1, 1, 1, 2, 2, 2, 3, 3], [1] * COLUMNS], np.int32)


def drawn(seed=0, columns=COLUMNS, scale=1.0):
    """Inputs with nearly equal keys, like a repeated token's; decays from 1 to 1e-4."""
    rng = np.random.default_rng(seed)
    key = 1.0 + 0.3 * rng.normal(size=(ROWS, columns, KEY_HEADS, KEY))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    arrays = (
        rng.normal(size=(ROWS, columns, KEY_HEADS, KEY)),
        key,
        rng.normal(size=(ROWS, columns, HEADS, VALUE)),
        -scale * rng.exponential(size=(ROWS, columns, HEADS)) ** 3,
        rng.uniform(size=(ROWS, columns, HEADS)),
        rng.normal(size=(ROWS, HEADS, KEY, VALUE)),
    )
    return tuple(x.astype(np.float32) for x in arrays)


def by_oracle(*arrays, texts=TEXTS):
    rows = [
        oracles.delta_rule(*(x[row] for x in arrays), texts=texts[row])
        for row in range(ROWS)
    ]
    return tuple(np.stack(parts) for parts in zip(*rows, strict=True))


@functools.partial(jax.jit, static_argnames="chunk")
def by_chunks(*arrays, texts, chunk):
    *tokens, memory = arrays
    return delta_rule.chunked(Tokens(*tokens), memory, texts=texts, chunk=chunk)


@jax.jit
def by_steps(*arrays):
    *tokens, memory = (jnp.asarray(x) for x in arrays)

    def one(memory, token):
        output, memory = delta_rule.step(Tokens(*token), memory)
        return memory, output

    by_token = [jnp.moveaxis(x, 1, 0) for x in tokens]
    memory, outputs = jax.lax.scan(one, memory, by_token)
    return jnp.moveaxis(outputs, 0, 1), memory


@pytest.mark.parametrize("chunk", [1, 2, 8, 64])
def test_chunks_are_the_recurrence_in_float64(chunk):
    arrays = drawn()
    output, memory = by_chunks(*arrays, texts=TEXTS, chunk=chunk)
    expected, expected_memory = by_oracle(*arrays)
    np.testing.assert_allclose(output, expected, atol=2e-6)
    np.testing.assert_allclose(memory, expected_memory, atol=2e-6)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("columns", [1, 63, 65, 200])
def test_long_rows_of_one_text(columns):
    """Decays are near 1, so the state remembers the whole row."""
    arrays = drawn(columns=columns, scale=1e-3)
    texts = np.zeros((ROWS, columns), np.int32)
    expected, expected_memory = by_oracle(*arrays, texts=texts)
    for output, memory in (
        by_chunks(*arrays, texts=texts, chunk=delta_rule.CHUNK),
        by_steps(*arrays),
    ):
        np.testing.assert_allclose(output, expected, atol=2e-5)
        np.testing.assert_allclose(memory, expected_memory, atol=2e-5)


def test_a_key_that_is_repeated_a_whole_chunk():
    """With β = 1 and α = 1, powers of L would reach 1e18."""
    query, key, value, *_ = drawn(columns=64)
    key[:] = key[:, :1]
    ones = np.ones((ROWS, 64, HEADS), np.float32)
    arrays = query, key, value, 0 * ones, ones, np.zeros((ROWS, HEADS, KEY, VALUE))
    texts = np.zeros((ROWS, 64), np.int32)
    output, _ = by_chunks(*arrays, texts=texts, chunk=64)
    np.testing.assert_allclose(output, by_oracle(*arrays, texts=texts)[0], atol=2e-5)


@pytest.mark.parametrize("chunk", [4, pytest.param(16, marks=pytest.mark.slow)])
def test_gradients_are_those_of_the_recurrence_in_float64(chunk):
    arrays = drawn(seed=1)
    rng = np.random.default_rng(2)
    of_output = rng.normal(size=(ROWS, COLUMNS, HEADS, VALUE)).astype(np.float32)
    of_memory = rng.normal(size=(ROWS, HEADS, KEY, VALUE)).astype(np.float32)

    def total(function, *arrays):
        output, memory = function(*arrays)
        return (of_output * output).sum() + (of_memory * memory).sum()

    chunks = functools.partial(by_chunks, texts=TEXTS, chunk=chunk)
    of_all = tuple(range(len(arrays)))
    gradients = jax.grad(functools.partial(total, chunks), of_all)(*arrays)
    for i, gradient in enumerate(gradients):

        def at(x, i=i):
            return total(by_oracle, *arrays[:i], x, *arrays[i + 1 :])

        expected = oracles.numerical_gradient(at, arrays[i])
        np.testing.assert_allclose(gradient, expected, atol=3e-5, err_msg=str(i))


@pytest.mark.slow
def test_gradients_of_steps_are_those_of_chunks():
    arrays = drawn(seed=3)
    texts = np.zeros((ROWS, COLUMNS), np.int32)

    def total(function, *arrays):
        output, memory = function(*arrays)
        return jnp.sin(output).sum() + jnp.sin(memory).sum()

    chunks = functools.partial(by_chunks, texts=texts, chunk=8)
    of_all = tuple(range(len(arrays)))
    mine, other = (
        jax.grad(functools.partial(total, function), of_all)(*arrays)
        for function in (chunks, by_steps)
    )
    for one, another in zip(mine, other, strict=True):
        np.testing.assert_allclose(one, another, atol=1e-5)


def logprobs(model, tokens, mask, **options):
    run = toys.jit(functools.partial(policy.logprobs, model=model))
    return np.asarray(run(tiny.params(model), tokens=tokens, mask=mask, **options))


@pytest.mark.slow
def test_padding_leaves_the_state_as_it_is():
    """State and next token are the same for any content of the padding."""
    model, params = tiny.HYBRID, tiny.params(tiny.HYBRID)
    prefill = toys.jit(functools.partial(decoder.prefill, model=model))
    states = []
    for size, side in ((9, "left"), (9, "right")):
        tokens, mask = tiny.batch((5, 5), size, side=side, padding=11)
        _, kept, _ = prefill(params, tokens=tokens, mask=mask)
        states.append(kept["delta_net"])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), *states)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{"unroll": True}, {"remat": "full"}, {"remat": "dots"}], ids=str
)
def test_layers_one_by_one_and_in_periods(options):
    model = tiny.HYBRID
    tokens, mask = tiny.batch((7, 3), 9, side="right")

    def value_and_gradient(model):
        def total(params):
            return policy.logprobs(params, model=model, tokens=tokens, mask=mask).sum()

        return toys.jit(jax.value_and_grad(total))(tiny.params(model))

    expected = value_and_gradient(model)
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(expected))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=1e-5 * largest),
        value_and_gradient(dataclasses.replace(model, **options)),
        expected,
    )


@pytest.mark.slow
@pytest.mark.parametrize("block", [128, 256])
def test_blocks_of_columns_are_one_block(monkeypatch, block):
    """Blocks end within texts, between texts, and within a convolution's window."""
    model, (rows, columns) = tiny.HYBRID, (2, 200)
    net, rng = delta_net.GatedDeltaNet(model), np.random.default_rng(0)
    ends = [[(30, 0), (100, 1), (131, 2), (200, 3)], [(63, 1), (190, 2), (200, 0)]]
    segments = np.zeros((rows, columns), np.int32)
    for row, own in enumerate(ends):
        for (start, _), (end, text) in itertools.pairwise([(0, 0), *own]):
            segments[row, start:end] = text
    x = rng.normal(size=(rows * columns, model.hidden_size)).astype(np.float32)
    weight = rng.normal(size=x.shape) * (segments.reshape(-1, 1) > 0)
    options = {"rows": rows, "cache": None}
    params = net.init(jax.random.key(0), x, mask=None, **options)

    def total(params, x):
        mask = AttentionMask(jnp.asarray(segments))
        y, state = net.apply(params, x, mask=mask, **options)
        return (weight * y).sum() + jnp.sin(state.memory).sum(), state

    def outputs():
        run = jax.value_and_grad(total, (0, 1), has_aux=True)
        return toys.jit(lambda *args: run(*args))(params, x)

    monkeypatch.setattr(delta_net, "BLOCK", rows * 256)
    expected = outputs()
    monkeypatch.setattr(delta_net, "BLOCK", block)  # tokens of both rows
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, atol=2e-5), outputs(), expected
    )


@pytest.mark.parametrize("rows", [1, 2, 3, 5])
def test_blocks_are_whole_chunks(monkeypatch, rows):
    """Rounding blocks up would compute up to 75% more columns, of three rows."""
    model, columns, seen = tiny.HYBRID, 511, []
    chunked = delta_rule.chunked

    def counted(tokens, *args, **settings):
        seen.append(tokens.value.shape[1])
        return chunked(tokens, *args, **settings)

    monkeypatch.setattr(delta_rule, "chunked", counted)
    net = delta_net.GatedDeltaNet(model)
    x = jnp.zeros((rows * columns, model.hidden_size))
    run = functools.partial(net.init_with_output, mask=None, rows=rows, cache=None)
    jax.eval_shape(run, jax.random.key(0), x)
    (block,) = {*seen}
    assert block == {1: 256, 2: 128, 3: 64, 5: 64}[rows]
    assert block == delta_net.block_columns(rows)


def test_layers_of_a_kind_that_follow_each_other_are_in_a_program_once(monkeypatch):
    """Two DeltaNets and attention, twice: a compiler meets one of them, and not two.

    Layers one by one are traced once, too: the trace of a layer is cached.
    """
    tokens, mask = tiny.batch((7, 3), 9, side="right")
    chunked, calls = delta_rule.chunked, []

    def counted(*args, **settings):
        calls.append(args)
        return chunked(*args, **settings)

    monkeypatch.setattr(delta_rule, "chunked", counted)
    for unroll in (False, True):
        model = dataclasses.replace(tiny.HYBRID, unroll=unroll)
        hidden = functools.partial(decoder.hidden_states, model=model)
        shapes = tiny.shapes(model)  # which calls it, too
        calls.clear()
        jax.eval_shape(hidden, shapes, tokens=tokens, mask=mask)
        assert len(calls) == 1


def test_the_last_of_unrolled_layers_computes_no_column_that_is_left_out():
    tokens, mask = tiny.batch((9, 7), 9, side="right")
    model = dataclasses.replace(tiny.HYBRID, unroll=True)

    def flops(first):
        hidden = functools.partial(
            decoder.hidden_states, model=model, first_column=first
        )
        lowered = jax.jit(hidden).lower(tiny.shapes(model), tokens=tokens, mask=mask)
        return lowered.cost_analysis()["flops"]

    # Of the last layer at least the MLP's three products are left out.
    mlp = 3 * 2 * model.hidden_size * model.intermediate_size
    assert flops(0) - flops(8) > tokens.shape[0] * 8 * mlp


@pytest.mark.slow
def test_layers_in_int8_on_the_host():
    model = tiny.HYBRID
    tokens, mask = tiny.batch((7, 3), 9, side="right")
    stored = storage.store(tiny.params(model), dtype="int8", memory="pinned_host")
    taps = stored["layers"]["delta_net"]["query_taps"]
    assert taps.held.dtype == jnp.float32  # no matrix
    again, of_read = (
        toys.jit(functools.partial(policy.logprobs, model=model))(
            params, tokens=tokens, mask=mask
        )
        for params in (stored, leaves.read(stored))
    )
    np.testing.assert_allclose(again, of_read, atol=1e-5)


@pytest.mark.slow
def test_kinds_of_layers_that_do_not_repeat():
    model = tiny.HYBRID
    kinds = (True, False, True, True, True, False)
    uneven = dataclasses.replace(model, recurrent_layers=kinds)
    assert (model.parts, uneven.parts) == (((0, 6, 3),), ((0, 6, 6),))
    shapes = decoder.shapes(uneven)["layers"]
    assert shapes["attention"]["gate"]["kernel"].shape == (2, 32, 32)
    assert shapes["delta_net"]["value"]["kernel"].shape == (4, 32, 16)
    assert shapes["mlp"]["up"]["kernel"].shape == (6, 32, 24)
    tokens, mask = tiny.batch((7, 3), 9, side="right")
    assert np.isfinite(logprobs(uneven, tokens, mask)).all()


@pytest.mark.slow
def test_each_field_of_the_shape_is_read():
    shape = tiny.HYBRID.delta_net
    sizes = jax.tree.map(lambda leaf: leaf.shape, decoder.shapes(tiny.HYBRID))
    for name in ("num_key_heads", "num_value_heads", "key_dim", "value_dim"):
        changed = dataclasses.replace(shape, **{name: 2 * getattr(shape, name)})
        model = dataclasses.replace(tiny.HYBRID, delta_net=changed)
        assert jax.tree.map(lambda leaf: leaf.shape, decoder.shapes(model)) != sizes
    plain = dataclasses.replace(tiny.HYBRID, output_gate=False)
    assert "gate" not in decoder.shapes(plain)["layers"]["attention"]


@pytest.mark.slow
def test_in_bfloat16_the_memory_is_float32():
    model = tiny.bfloat16(tiny.HYBRID)
    tokens, mask = tiny.batch((5, 3), 6, side="left")
    run = functools.partial(cached_decoder.prefill, model=model)
    hidden, kept, _ = jax.eval_shape(run, tiny.params(model), tokens=tokens, mask=mask)
    assert hidden.dtype == jnp.bfloat16
    assert kept["delta_net"].memory.dtype == jnp.float32
    assert kept["delta_net"].tails[0].dtype == jnp.bfloat16
    exact = logprobs(tiny.HYBRID, tokens, mask)
    assert np.abs(logprobs(model, tokens, mask) - exact).mean() < 0.1


def test_what_cannot_be_is_named():
    with pytest.raises(InputError, match="divide num_value_heads, got 3 and 4"):
        config.DeltaNet(3, 4, key_dim=2, value_dim=2)
    with pytest.raises(InputError, match="value_dim"):
        config.DeltaNet(2, 4, key_dim=2, value_dim=0)
    with pytest.raises(InputError, match="conv_width: expected a number of at least 2"):
        config.DeltaNet(2, 4, key_dim=2, value_dim=2, conv_width=1)
    message = "a delta_net if, and only if, .* got None with 4 recurrent layers"
    with pytest.raises(InputError, match=message):
        dataclasses.replace(tiny.HYBRID, delta_net=None)
    with pytest.raises(
        InputError, match="recurrent_layers for each of 6 layers, got 2"
    ):
        dataclasses.replace(tiny.HYBRID, recurrent_layers=(True, False))
    tokens, mask = tiny.batch((5, 3), 6, side="left")
    shapes = tiny.shapes(tiny.HYBRID)
    hidden = functools.partial(decoder.hidden_states, model=tiny.HYBRID)
    segments = mask.astype(np.int32)
    with pytest.raises(InputError, match="without recurrent layers for texts that sh"):
        jax.eval_shape(
            functools.partial(hidden, tokens=tokens, mask=mask),
            shapes,
            segments=segments,
            prefixes=segments,
        )
    mesh = jax.sharding.AbstractMesh((2,), ("context",), (AxisType.Auto,))
    with (
        jax.sharding.use_abstract_mesh(mesh),
        pytest.raises(InputError, match=r"without a context axis .* recurrent layers"),
    ):
        jax.eval_shape(functools.partial(hidden, tokens=tokens, mask=mask), shapes)
