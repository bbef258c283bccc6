import functools
import math

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

from rlhf_jax.algorithms import optimizers
from rlhf_jax.functional import checks
from rlhf_jax.roles.reference import storage
from rlhf_jax.train.config import optimizer as options

RNG = np.random.default_rng(0)
# Large, near eps and far below it, where the place of eps is all that counts.
SIZES = {"large": 1.0, "near": 1e-4, "tiny": 1e-7}
START = {name: RNG.normal(size=(2, 3)).astype(np.float32) for name in SIZES}


def gradients(num_steps: int, seed: int = 1) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(seed)
    return [
        {
            name: rng.normal(0, size, (2, 3)).astype(np.float32)
            for name, size in SIZES.items()
        }
        for _ in range(num_steps)
    ]


def oracle(
    grads, *, rate, b1, b2, eps, style, hold=float
) -> list[dict[str, np.ndarray]]:
    """The update of every step in float64, element by element; `hold` rounds m."""
    updates = []
    m = {name: np.zeros((2, 3)) for name in SIZES}
    v = {name: np.zeros((2, 3)) for name in SIZES}
    for t, grad in enumerate(grads, start=1):
        update = {}
        for name, g in grad.items():
            update[name] = np.zeros((2, 3))
            for index in np.ndindex(2, 3):
                one = float(g[index])
                m[name][index] = b1 * m[name][index] + (1 - b1) * one
                v[name][index] = b2 * v[name][index] + (1 - b2) * one**2
                if style == "tf":
                    lr_t = rate(t - 1) * math.sqrt(1 - b2**t) / (1 - b1**t)
                    step = lr_t * m[name][index] / (math.sqrt(v[name][index]) + eps)
                else:
                    mean = m[name][index] / (1 - b1**t)
                    size = math.sqrt(v[name][index] / (1 - b2**t))
                    step = rate(t - 1) * mean / (size + eps)
                update[name][index] = -step
                m[name][index] = hold(m[name][index])
        updates.append(update)
    return updates


def run(optimizer, grads) -> list[dict[str, np.ndarray]]:
    """The update of every step, each jitted with its state donated."""

    @functools.partial(jax.jit, donate_argnums=1)
    def step(grad, opt, params):
        return optimizer.update(grad, opt, params)

    params = jax.tree.map(jnp.asarray, START)
    opt, updates = optimizer.init(params), []
    for grad in grads:
        update, opt = step(grad, opt, params)
        params = optax.apply_updates(params, update)
        updates.append(jax.device_get(update))
    return updates


def assert_close(updates, expected, rtol=1e-5):
    for mine, other in zip(updates, expected, strict=True):
        for name in SIZES:
            np.testing.assert_allclose(
                mine[name], other[name], rtol=rtol, atol=0, err_msg=name
            )


@pytest.mark.parametrize("style", ["standard", "tf"])
@pytest.mark.parametrize(
    ("b1", "b2", "eps"), [(0.9, 0.999, 1e-5), (0.9, 0.95, 1e-8), (0.0, 0.0, 1e-5)]
)
def test_adam_matches_the_oracle(style, b1, b2, eps):
    grads = gradients(7)
    made = optimizers.adam(0.01, b1=b1, b2=b2, eps=eps, style=style)
    settings = {"b1": b1, "b2": b2, "eps": eps, "style": style}
    expected = oracle(grads, rate=lambda step: 0.01, **settings)
    # optax takes 1 - b2^t in float32, with 4 digits of it at t = 1.
    assert_close(run(made, grads), expected, rtol=1e-4 if style == "standard" else 1e-5)


@pytest.mark.parametrize("style", ["standard", "tf"])
@pytest.mark.parametrize("b1", [0.9, 0.0])
def test_m_in_bfloat16_is_rounded_once_an_update(style, b1):
    """The step uses m before rounding."""
    grads = gradients(7)
    settings = {"b1": b1, "b2": 0.999, "eps": 1e-5, "style": style}
    updates = run(optimizers.adam(0.01, mu_dtype="bfloat16", **settings), grads)
    expected = oracle(grads, rate=lambda step: 0.01, hold=bfloat16, **settings)
    assert_close(updates, expected, rtol=1e-4)


def bfloat16(x: float) -> float:
    return float(np.float32(x).astype(ml_dtypes.bfloat16))


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("style", ["standard", "tf"])
def test_what_the_moments_take(style):
    """4 + 4 bytes per parameter, or 2 + 4, and two counters of updates."""
    params = {"kernel": jnp.zeros((30, 7)), "bias": jnp.zeros(10)}
    schedule = optax.linear_schedule(0.1, 0.0, 4)
    for mu_dtype, num_bytes in {"float32": 8, "bfloat16": 6}.items():
        made = optimizers.adam(schedule, style=style, mu_dtype=mu_dtype)
        opt = made.init(params)
        assert storage.nbytes(opt) == 220 * num_bytes + 2 * 4
        _, after = made.update(params, opt, params)
        shapes = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(opt)]
        assert [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(after)] == shapes


@pytest.mark.slow
def test_m_nears_a_constant_gradient_and_v_follows_it():
    """m within the 4% of its rounding; v moves by 0.1%, which bfloat16 would lose."""
    made = optimizers.adam(1.0, mu_dtype="bfloat16")
    grad = {"x": jnp.linspace(1.0, 2.0, 50)}
    opt = made.init(grad)
    opt = (opt[0]._replace(nu={"x": jnp.ones(50)}), *opt[1:])
    for _ in range(100):
        _, opt = made.update(grad, opt, grad)
    np.testing.assert_allclose(opt[0].mu["x"].astype(float), grad["x"], rtol=0.04)
    squares = np.asarray(grad["x"], np.float64) ** 2
    expected = squares + 0.999**100 * (1 - squares)
    np.testing.assert_allclose(opt[0].nu["x"], expected, rtol=1e-4)
    assert bfloat16(0.999 * 1 + 0.001 * 4) == 1


@pytest.mark.parametrize(
    "rule",
    [
        options.AdamW(weight_decay=0.5),
        options.Muon(weight_decay=0.5),
        options.Adafactor(weight_decay=0.5),
    ],
)
def test_weight_decay_does_not_move_a_buffer(rule):
    """`layer_scale` has no gradient; other parameters without one decay."""
    params = {
        "layers": {"layer_scale": jnp.full((2, 1), 0.3), "bias": jnp.ones((2, 3))}
    }
    chosen = options.Optimizer(learning_rate=0.1, optimizer=rule)
    updates = chosen.make(1)
    step, _ = updates.update(
        jax.tree.map(jnp.zeros_like, params), updates.init(params), params
    )
    assert not np.any(step["layers"]["layer_scale"])
    assert np.all(step["layers"]["bias"] < 0)


def test_standard_is_optax_s_own_to_the_bit():
    grads = gradients(5)
    schedule = optax.linear_schedule(0.1, 0.0, 5)
    updates = run(optimizers.adam(schedule), grads)
    expected = run(optax.adam(schedule, eps=1e-5), grads)
    chex.assert_trees_all_equal(updates, expected)


@pytest.mark.slow
def test_tf_is_adam_with_another_eps_in_every_step():
    """The eps is eps/sqrt(1 - b2^t), 32 times as large in the first step."""
    factor = 1 / math.sqrt(1 - 0.999)
    assert factor == pytest.approx(31.6, abs=0.03)
    grads = gradients(3)
    updates = run(optimizers.adam(0.01, style="tf"), grads)
    for t in range(1, 4):
        eps = 1e-5 / math.sqrt(1 - 0.999**t)
        expected = run(optax.adam(0.01, eps=eps), grads[:t])
        assert_close(updates[t - 1 : t], expected[-1:], rtol=1e-4)


@pytest.mark.slow
def test_tf_holds_small_gradients_back_early_and_agrees_late():
    """With a constant gradient g: lr·g/(g + eps) against lr·g/(g + 31.6 eps)."""
    grads = [{name: np.full((2, 3), 1e-5, np.float32) for name in SIZES}] * 2
    standard = run(optimizers.adam(1.0), grads)
    tf = run(optimizers.adam(1.0, style="tf"), grads)
    assert float(standard[0]["near"][0, 0]) == pytest.approx(-1 / 2, rel=1e-4)
    assert float(tf[0]["near"][0, 0]) == pytest.approx(-1 / 32.6, rel=1e-3)
    # Late in a run the two corrections are 1, and the steps the same.
    params = {"x": jnp.ones(3)}
    late = optax.ScaleByAdamState(
        count=jnp.int32(20_000),
        mu={"x": jnp.full(3, 1e-5)},
        nu={"x": jnp.full(3, 1e-9)},
    )
    updates = {}
    for style in ("standard", "tf"):
        made = optimizers.adam(0.01, style=style)
        state = (late, *made.init(params)[1:])
        updates[style] = made.update({"x": jnp.full(3, 1e-5)}, state, params)[0]["x"]
    np.testing.assert_allclose(updates["tf"], updates["standard"], rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("style", ["standard", "tf"])
def test_schedules_chains_and_states(style):
    """The learning rate has its own counter, and clipping by norm comes first."""
    schedule = optax.linear_schedule(0.1, 0.0, 4)
    made = optimizers.adam(schedule, style=style)
    grads = gradients(5)
    settings = {"b1": 0.9, "b2": 0.999, "eps": 1e-5, "style": style}
    expected = oracle(grads, rate=lambda t: 0.1 * max(1 - t / 4, 0.0), **settings)
    updates = run(made, grads)
    assert_close(updates[:4], expected[:4], rtol=1e-4)
    assert not any(leaf.any() for leaf in updates[4].values())

    clipped = [{name: g / norm(grad) for name, g in grad.items()} for grad in grads]
    chain = optax.chain(optax.clip_by_global_norm(1.0), made)
    assert min(norm(grad) for grad in grads) > 1
    assert_close(run(chain, grads)[:4], run(made, clipped)[:4], rtol=1e-4)

    opt = made.init(START)
    moments = opt[0]
    assert isinstance(moments, optax.ScaleByAdamState)
    _, opt = made.update(grads[0], opt, START)
    assert int(opt[0].count) == int(opt[1].count) == 1
    other = optimizers.adam(schedule, style="tf").init(START)
    assert jax.tree.structure(other) == jax.tree.structure(opt)


def norm(tree) -> float:
    return math.sqrt(sum(float((np.float64(x) ** 2).sum()) for x in tree.values()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"style": "torch"},
            r"style: expected one of 'standard', 'tf', got 'torch'; choose",
        ),
        (
            {"mu_dtype": "float16"},
            r"mu_dtype: expected one of 'float32', 'bfloat16', got 'float16'",
        ),
        ({"eps": 0.0}, r"eps: expected .* above 0, got 0"),
        ({"b1": 1.0}, r"b1: expected a number of at least 0 and below 1, got 1.0"),
        ({"b2": -0.1}, r"b2: expected a number of at least 0 and below 1, got -0.1"),
        ({"b2": float("nan")}, r"b2: expected .* got nan"),
        ({"learning_rate": -1.0}, r"learning_rate: expected .* 0 or more, got -1"),
        ({"learning_rate": float("nan")}, r"learning_rate: expected .* got nan"),
    ],
)
def test_options_that_cannot_be(options, message):
    with pytest.raises(checks.InputError, match=message):
        optimizers.adam(**{"learning_rate": 0.1, **options})
