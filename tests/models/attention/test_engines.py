"""Attention engines against a float64 oracle: values, gradients, padding."""

import dataclasses
import functools

import attention_cases
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax import config
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import layout
from rlhf_jax.models.attention import attend_xla, cudnn, splash
from rlhf_jax.models.attention.blockwise import attend_blockwise
from rlhf_jax.models.attention.cudnn import attend_cudnn
from rlhf_jax.models.positions import AttentionMask

# Four blocks of 29 columns, the last of them with room.
ENGINES = {
    "xla": attend_xla,
    "blockwise": functools.partial(attend_blockwise, block=8),
    "splash": functools.partial(splash.attend_splash, interpret=True),
}
GARBAGE = {"xla": 1e4, "blockwise": np.nan, "splash": 1e4}
for_each_engine_and_case = pytest.mark.parametrize(
    ("engine", "name"),
    [
        pytest.param(engine, name, marks=[pytest.mark.slow] * (engine == "splash"))
        for engine in ENGINES
        for name in attention_cases.CASES
        if (engine, name) != ("splash", "shared prefix")  # which it does not compute
    ],
)


@pytest.mark.cases(quick=2)
@for_each_engine_and_case
def test_values_and_gradients_are_the_oracles(engine, name):
    """Compared at tokens; large numbers at padding still give finite output."""
    run = attention_cases.with_gradients(ENGINES[engine], name)
    expected = attention_cases.expected(name)
    for arrays in (
        attention_cases.arrays(name)[:3],
        attention_cases.poisoned(name, by=GARBAGE[engine]),
    ):
        out, gradients = run(*arrays)
        assert np.isfinite(out).all()
        np.testing.assert_allclose(
            np.where(attention_cases.live(name), out, 0), expected[0], atol=2e-5
        )
        for mine, other in zip(gradients, expected[1], strict=True):
            np.testing.assert_allclose(mine, other, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", ["causal", "window, soft cap, grouped heads"])
def test_queries_of_a_device_that_has_some_columns_are_the_oracle_s(engine, name):
    """Two devices in turn: chunks 0 and 3 of four, then 1 and 2."""
    run = attention_cases.with_gradients(
        attention_cases.in_shares(ENGINES[engine]), name
    )
    expected = attention_cases.expected(name)
    out, gradients = run(*attention_cases.arrays(name)[:3])
    np.testing.assert_allclose(
        np.where(attention_cases.live(name), out, 0), expected[0], atol=2e-5
    )
    for mine, other in zip(gradients, expected[1], strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


def test_the_oracle_s_gradients_are_those_of_its_values():
    name = "window, soft cap, grouped heads"
    rng = np.random.default_rng(1)
    query, gradient = rng.normal(size=(2, 1, 2, 3, 2))
    key, value = rng.normal(size=(2, 1, 1, 4, 2))
    segments = np.array([[1, 1, 1, 2]])
    options = dict(attention_cases.CASES[name][3], gradient=gradient)
    options["window"] = 2
    _, gradients = oracles.attention(query, key, value, segments, **options)
    inputs = [query, key, value]
    for place, mine in enumerate(gradients):

        def total(x, place=place):
            moved = [*inputs[:place], x, *inputs[place + 1 :]]
            return float(
                (oracles.attention(*moved, segments, **options)[0] * gradient).sum()
            )

        numerical = oracles.numerical_gradient(total, inputs[place])
        np.testing.assert_allclose(mine, numerical, atol=1e-8)


@pytest.mark.slow
def test_products_with_the_hessian():
    """Blockwise attention against `xla`, which JAX differentiates."""
    name = "window, soft cap, grouped heads"
    *arrays, weights = attention_cases.arrays(name)
    rng = np.random.default_rng(2)
    moved = [rng.normal(size=x.shape).astype(np.float32) for x in arrays]
    mask = attention_cases.mask_of(name)
    weights = np.where(attention_cases.live(name), weights, 0)

    def both(engine):
        def total(*arrays):
            query, *keys_values = arrays
            return (engine(query, tuple(keys_values), mask=mask) * weights).sum()

        gradient = jax.grad(total, (0, 1, 2))
        return jax.jit(lambda: jax.jvp(gradient, tuple(arrays), tuple(moved))[1])()

    output, expected = (both(ENGINES[name]) for name in ("xla", "blockwise"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4),
        output,
        expected,
    )


@pytest.mark.slow
@pytest.mark.parametrize("fused", [True, False])
def test_splash_over_several_blocks(monkeypatch, fused):
    """Three blocks of 128 columns, and the backward pass of long rows."""
    monkeypatch.setattr(splash, "BLOCK", 128)
    monkeypatch.setattr(splash, "FUSED", 8192 if fused else 0)
    rng = np.random.default_rng(0)
    query, gradient = rng.normal(size=(2, 1, 2, 300, 64)).astype(np.float32)
    key, value = rng.normal(size=(2, 1, 1, 300, 64)).astype(np.float32)
    segments = np.repeat([[0, 1, 2, 0]], [20, 150, 110, 20], axis=1).astype(np.int32)
    mask = AttentionMask(segments=jnp.asarray(segments), window=70)
    live = (segments > 0)[:, None, :, None]
    expected, gradients = oracles.attention(
        *(query, key, value, segments),
        window=70,
        scale=1 / 8,
        softcap=None,
        gradient=gradient,
    )
    out, back = jax.vjp(
        lambda query, key, value: splash.attend_splash(
            query, (key, value), mask=mask, interpret=True
        ),
        *(query, key, value),
    )
    np.testing.assert_allclose(np.where(live, out, 0), expected, atol=2e-5)
    for mine, other in zip(
        back(np.where(live, gradient, 0).astype(np.float32)), gradients, strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=5e-5)


ONE_TEXT = [0, 1, 2, 4]  # rows that are not packed


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("name", ["causal", "later queries, traced window"])
def test_cudnn_s_form_of_rows_with_one_text(name):
    """Rows are rolled to their tokens, and computed by a function that cuDNN has."""
    query, key, value, weights = (x[ONE_TEXT] for x in attention_cases.arrays(name))
    options = attention_cases.CASES[name][3]
    live = attention_cases.live(name)[ONE_TEXT]
    weights = np.where(live, weights, 0).astype(np.float32)
    expected, gradients = oracles.attention(
        *(query, key, value, attention_cases.SEGMENTS[ONE_TEXT]),
        window=options.get("window"),
        scale=query.shape[-1] ** -0.5,
        softcap=None,
        gradient=weights,
    )
    mask = attention_cases.mask_of(name, rows=ONE_TEXT, packed=False)

    @jax.jit
    def both(query, key, value):
        out, back = jax.vjp(
            lambda *x: attend_cudnn(x[0], x[1:], mask=mask, implementation="xla"),
            *(query, key, value),
        )
        return out, back(weights)

    out, cudnn_gradients = both(query, key, value)
    np.testing.assert_allclose(out, np.where(live, expected, 0), atol=2e-5)
    for mine, other in zip(cudnn_gradients, gradients, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("causal", marks=pytest.mark.slow),
        *("later queries, traced window", "shared prefix"),
    ],
)
def test_cudnn_s_form_of_packed_rows_block_by_block(monkeypatch, name):
    """Blocks have 12 queries; the last is shorter."""
    monkeypatch.setattr(cudnn, "BLOCK", 12)
    engine = functools.partial(attend_cudnn, implementation="xla")
    run = attention_cases.with_gradients(engine, name)
    expected, expected_gradients = attention_cases.expected(name)
    out, gradients = run(*attention_cases.arrays(name)[:3])
    live = attention_cases.live(name)
    np.testing.assert_allclose(np.where(live, out, 0), expected, atol=2e-5)
    for mine, other in zip(gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(mine, other, atol=2e-5)


LLAMA = config.llama(
    vocab_size=32,
    hidden_size=256,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=64,
    max_positions=4096,
)


def model(**changes):
    return dataclasses.replace(LLAMA, attention="auto", **changes)


@pytest.mark.parametrize(
    ("changes", "backend", "columns", "engine", "reason"),
    [
        ({}, "cpu", 1023, "xla", "as they are short"),
        ({}, "cpu", 1024, "blockwise", "as cpu has no flash attention of its own"),
        ({}, "tpu", 2048, "splash", "the flash attention of tpu"),
        ({"num_heads": 16}, "tpu", 2048, "blockwise", "as splash has no kernel for"),
        ({"dtype": "bfloat16"}, "gpu", 2048, "cudnn", "the flash attention of gpu"),
        ({}, "gpu", 2048, "blockwise", "as cudnn computes in bfloat16, and the model"),
        (
            {"dtype": "bfloat16", "attention_softcap": 50.0},
            *("gpu", 2048, "blockwise", "as cudnn has no soft cap"),
        ),
    ],
)
def test_auto_says_what_it_takes_and_why(changes, backend, columns, engine, reason):
    if "num_heads" in changes:
        changes = {**changes, "head_dim": 16, "num_kv_heads": 2}
    chosen = layout.choose(model(**changes), columns=columns, backend=backend)
    assert chosen.engine == engine
    assert chosen.reason.startswith(reason)


@pytest.mark.slow
def test_an_engine_that_cannot_run_is_refused_by_name():
    splash_ = dataclasses.replace(LLAMA, attention="splash")
    with pytest.raises(InputError, match="a TPU for attention splash, got the backend"):
        layout.fastest(splash_, backend="cpu")
    assert layout.fastest(splash_, backend="tpu").attention == "splash"
    small = dataclasses.replace(splash_, head_dim=16)
    with pytest.raises(InputError, match="no kernel for heads of 16 numbers; choose"):
        layout.fastest(small, backend="tpu")
    llama = dataclasses.replace(LLAMA, attention="xla")
    assert layout.choose(llama, columns=9999) == ("xla", "as asked")
