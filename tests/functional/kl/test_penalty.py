"""The KL penalty: its values by NumPy, its gradients by a world that is enumerated.

The world has three tokens, the first of which ends a response, of at most three.
Its 15 responses are rows of one batch whose first column is the prompt. A model is a
table of logits, one row for each of the 13 prefixes.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys
from tiers import one_in

from rlhf_jax import kl, kl_penalty
from rlhf_jax.functional.kl.gradients import is_kl, terms
from rlhf_jax.functional.kl.penalty import Penalty

pytestmark = pytest.mark.usefixtures("strict_dtypes", "quick_compilation")

ESTIMATORS = ("k1", "k2", "k3", "exact")
RNG = np.random.default_rng(0)


def normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return RNG.normal(0, scale, shape).astype(np.float32)


def penalties(**options) -> list[Penalty]:
    """Every allowed choice of these options, with defaults for the others."""
    choices = []
    for values in itertools.product(*options.values()):
        try:
            choices.append(Penalty(**dict(zip(options, values, strict=True))))
        except ValueError:
            continue
    return choices


def words(penalty: Penalty) -> str:
    """A penalty as text, for the ids of tests."""
    default = Penalty()
    fields = [field.name for field in dataclasses.fields(Penalty)]
    changed = [
        name for name in fields if getattr(penalty, name) != getattr(default, name)
    ]
    return "-".join(str(getattr(penalty, name)) for name in changed) or "default"


# --- values, by NumPy ---------------------------------------------------------------

MASK = np.array(
    [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    bool,
)
OLD = -np.abs(normal(4, 6))
IN_LOSS_K3 = Penalty(value_estimator="k3", placement="loss")
LOGPROBS = OLD + normal(4, 6, scale=0.3)
REF = OLD + normal(4, 6, scale=0.5)
EXACT = np.abs(normal(4, 6))
WEIGHTS = np.where(MASK, np.abs(normal(4, 6)), 0.0).astype(np.float32)
ARRAYS = {
    "logprobs": LOGPROBS,
    "old_logprobs": OLD,
    "ref_logprobs": REF,
    "exact": EXACT,
    "weights": WEIGHTS,
}


def loss_of(penalty, mask=MASK, **arrays):
    return kl_penalty.kl_loss(penalty=penalty, mask=mask, **{**ARRAYS, **arrays})


def reward_of(penalty, mask=MASK, **arrays):
    names = ("logprobs", "ref_logprobs", "exact")
    arrays = {name: {**ARRAYS, **arrays}[name] for name in names}
    return kl_penalty.reward_kl(penalty=penalty, mask=mask, **arrays)


def oracle(penalty, logprobs, old, ref, exact, mask) -> tuple[np.ndarray, int, int]:
    """The value of every token, and the numbers of estimates and of clipped ones."""
    values, clipped, estimates = np.zeros(mask.shape), 0, 0
    logprobs, old, ref, exact = (
        np.asarray(x, np.float64) for x in (logprobs, old, ref, exact)
    )
    reverse = penalty.direction == "reverse"
    x = logprobs - ref if reverse else ref - logprobs
    log_weight = (logprobs if reverse else ref) - old

    def estimate(x, exact):
        ratio = np.exp(-x)
        values = {"k1": x, "k2": x**2 / 2, "k3": ratio - 1 - np.log(ratio)}
        return {**values, "exact": exact}[penalty.value_estimator]

    def clip(value):
        limit = np.inf if penalty.clip is None else penalty.clip
        return min(max(value, -limit), limit), abs(value) > limit

    for b in range(mask.shape[0]):
        columns = [t for t in range(mask.shape[1]) if mask[b, t]]
        cells = [(t, [t], columns[: i + 1]) for i, t in enumerate(columns)]
        if penalty.per == "response":
            cells = [(columns[-1], columns, columns)] if columns else []
        for t, summed, before in cells:
            weight = 1.0
            if penalty.importance_weights == "token":
                weight = np.exp(log_weight[b, t])
            elif penalty.importance_weights == "prefix":
                weight = np.exp(sum(log_weight[b, s] for s in before))
            value = estimate(sum(x[b, s] for s in summed), exact[b, summed].sum())
            values[b, t], over = clip(weight * value)
            clipped, estimates = clipped + over, estimates + 1
            if penalty.per == "length":
                values[b, t] /= len(columns)
    return values, clipped, estimates


EVERY_VALUE = penalties(
    value_estimator=ESTIMATORS,
    placement=("both",),
    direction=("reverse", "forward"),
    per=("token", "response", "length"),
    importance_weights=(None, "token", "prefix"),
    clip=(None, 0.3),
)


def test_every_choice_of_the_value_is_listed():
    """3 sampled x (reverse 8, forward 5) and exact x (reverse 6, forward 6), clip 2."""
    assert len(EVERY_VALUE) == 2 * (3 * (8 + 5) + 6 + 6)


@pytest.mark.parametrize("penalty", one_in(2, EVERY_VALUE), ids=words)
def test_value_matches_the_oracle(penalty):
    expected, clipped, estimates = oracle(penalty, LOGPROBS, OLD, REF, EXACT, MASK)
    output, stats = loss_of(penalty)
    near = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(output, (WEIGHTS * expected).sum(), **near)
    length = MASK.sum(1, keepdims=True) if penalty.per == "length" else 1
    np.testing.assert_allclose(stats["loss/kl"][0], (expected * length).sum(), **near)
    np.testing.assert_array_equal(stats["loss/kl"][1], MASK.sum())
    # Reverse weights are 1 where the policy samples; forward ones are π_ref/π.
    expected, reward_clipped, _ = oracle(penalty, OLD, OLD, REF, EXACT, MASK)
    output, reward_stats = reward_of(penalty, logprobs=OLD)
    assert output.dtype == jnp.float32
    np.testing.assert_allclose(output, expected, **near)
    # Of k3 and with weights alone, and of these numbers none: float32 holds them all.
    overflow = stats.pop("loss/kl_overflowfrac", None)
    reward_overflow = reward_stats.pop("penalty/overflowfrac", None)
    of_k3, weighted = penalty.value_estimator == "k3", penalty.importance_weights
    for output, counts_clipped in (
        (overflow, of_k3 or weighted),
        (reward_overflow, of_k3 or (weighted and penalty.direction == "forward")),
    ):
        assert (
            np.array_equal(output, (0, estimates)) if counts_clipped else output is None
        )
    if penalty.clip is None:
        assert stats.keys() == {"loss/kl"}
        assert not reward_stats
    else:
        assert np.array_equal(stats["loss/kl_clipfrac"], (clipped, estimates))
        shares = reward_stats["penalty/clipfrac"]
        assert np.array_equal(shares, (reward_clipped, estimates))


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("penalty", one_in(9, EVERY_VALUE[::2]), ids=words)
def test_equal_models_are_not_penalised_at_any_temperature(penalty):
    logits = normal(*MASK.shape, 5)
    for temperature in (0.3, 0.7, 1.5):
        same = jax.nn.log_softmax(logits / np.float32(temperature))[..., 0]
        exact = kl.exact(logits, logits, temperature=temperature)
        arrays = {"logprobs": same, "ref_logprobs": same, "exact": exact}
        np.testing.assert_array_equal(reward_of(penalty, **arrays)[0], 0.0)
        loss, stats = loss_of(penalty, **arrays)
        np.testing.assert_array_equal(loss, 0.0)
        np.testing.assert_array_equal(stats["loss/kl"][0], 0.0)


def gradients_of(penalty, mask=MASK, **arrays):
    """The gradients of the loss in every array."""

    def loss(arrays):
        return kl_penalty.kl_loss(penalty=penalty, mask=mask, **arrays)[0]

    return jax.grad(loss)({**ARRAYS, **arrays})


SOME = penalties(
    value_estimator=("k3",),
    grad_estimator=("k1", "k2", "k3", "exact"),
    placement=("loss",),
    per=("token", "response"),
    direction=("reverse", "forward"),
    importance_weights=(None, "prefix"),
    clip=(None, 0.3),
)[::5]  # each value of each option is among them


@pytest.mark.slow
@pytest.mark.parametrize("penalty", one_in(4, SOME), ids=words)
def test_garbage_under_the_mask_changes_nothing(penalty):
    poisoned = {name: oracles.poison(x, MASK) for name, x in ARRAYS.items()}
    for of in (loss_of, reward_of):
        output, expected = of(penalty, **poisoned), of(penalty)
        for value, same in zip(
            jax.tree.leaves(output), jax.tree.leaves(expected), strict=True
        ):
            np.testing.assert_array_equal(value, same)
    output, expected = gradients_of(penalty, **poisoned), gradients_of(penalty)
    for name in ARRAYS:
        np.testing.assert_array_equal(output[name], expected[name])


@pytest.mark.slow
@pytest.mark.parametrize("penalty", SOME, ids=words)
def test_micro_batches_add_up(penalty):
    (whole, stats), gradients = loss_of(penalty), gradients_of(penalty)
    total, sums, gradients_of_parts = 0.0, [], []
    for rows in (slice(0, 1), slice(1, 4)):
        arrays = {name: x[rows] for name, x in ARRAYS.items()}
        loss, part = loss_of(penalty, MASK[rows], **arrays)
        total += float(loss)
        sums.append(jax.tree.leaves(part))
        gradients_of_parts.append(
            gradients_of(penalty, MASK[rows], **arrays)["logprobs"]
        )
    np.testing.assert_allclose(total, whole, rtol=1e-6)
    for left, right, both in zip(*sums, jax.tree.leaves(stats), strict=True):
        np.testing.assert_allclose(left + right, both, rtol=1e-6)
    np.testing.assert_allclose(
        np.concatenate(gradients_of_parts), gradients["logprobs"], rtol=1e-6
    )


@pytest.mark.parametrize("penalty", one_in(3, SOME), ids=words)
def test_the_gradient_reaches_the_policy_alone(penalty):
    output = gradients_of(penalty)
    for name in ("old_logprobs", "ref_logprobs", "weights"):
        np.testing.assert_array_equal(output[name], 0.0)
    uses_exact = penalty.grad_estimator == "exact"
    assert np.any(output["exact"] != 0) == uses_exact
    assert np.any(output["logprobs"] != 0) == (not uses_exact)
    gradient_of_reward = jax.grad(lambda x: jnp.sum(reward_of(penalty, logprobs=x)[0]))
    np.testing.assert_array_equal(gradient_of_reward(LOGPROBS), 0.0)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize(
    ("value", "grad"), one_in(3, itertools.product(ESTIMATORS, ESTIMATORS))
)
def test_one_estimator_for_the_value_another_for_the_gradient(value, grad):
    mixed = Penalty(value, grad, "loss")
    output, gradients = loss_of(mixed)[0], gradients_of(mixed)
    np.testing.assert_array_equal(output, loss_of(Penalty(value, None, "loss"))[0])
    expected = gradients_of(Penalty(grad, None, "loss"))
    for name in ("logprobs", "exact"):
        np.testing.assert_allclose(gradients[name], expected[name], rtol=1e-6)


def test_length_divides_each_response_by_its_own():
    lengths = np.maximum(MASK.sum(1, keepdims=True), 1).astype(np.float32)
    for estimator in ESTIMATORS:
        token = Penalty(estimator, placement="loss")
        length = dataclasses.replace(token, per="length")
        output = gradients_of(length)
        expected = gradients_of(token, weights=WEIGHTS / lengths)
        for name in ("logprobs", "exact"):
            np.testing.assert_allclose(output[name], expected[name], rtol=1e-6)


# --- clipping -----------------------------------------------------------------------


def test_a_clipped_estimate_is_bounded_counted_and_without_slope():
    x = np.array([[0.1, -0.2, 3.0, -50.0, 700.0, -700.0]], np.float32)
    zeros, ones = np.zeros_like(x), np.ones_like(x)
    over = np.array([[False, False, True, True, True, True]])
    for estimator, at_limit in (("k1", np.sign(x)), ("k2", ones), ("k3", ones)):
        penalty = Penalty(estimator, placement="both", clip=1.0)

        def loss(x, penalty=penalty):
            return kl_penalty.kl_loss(
                penalty=penalty,
                logprobs=x,
                old_logprobs=zeros,
                ref_logprobs=zeros,
                mask=ones > 0,
                weights=ones,
            )

        (_, stats), slope = toys.jit(jax.value_and_grad(loss, has_aux=True))(x)
        assert np.array_equal(stats["loss/kl_clipfrac"], (4, 6))
        np.testing.assert_array_equal(slope[over], 0.0)
        assert np.all(np.isfinite(slope))
        assert np.all(np.asarray(slope)[~over] != 0)
        reward_kl = toys.jit(functools.partial(kl_penalty.reward_kl, penalty=penalty))
        value, stats = reward_kl(logprobs=x, ref_logprobs=zeros, mask=ones > 0)
        assert np.array_equal(stats["penalty/clipfrac"], (4, 6))
        np.testing.assert_array_equal(value[over], (1.0 * at_limit)[over])


@pytest.mark.parametrize("log_weight", one_in(3, [-30.0, None, 5.0]))
@pytest.mark.parametrize(
    "x", one_in(3, [-1e4, -119.0, -100.0, -90.0, -85.0, -21.0, -1.0, 50.0])
)
def test_k3_in_the_loss_has_its_slope_wherever_that_is_finite(x, log_weight):
    """w·(1 - exp(-x)), compared by its log where float64 overflows too."""
    weight = 1.0 if log_weight is None else np.exp(log_weight)
    of_ratio = -x + np.log(weight)
    overflowing = of_ratio > np.log(np.finfo(np.float32).max)
    slope = weight - np.exp(min(of_ratio, 88.72))
    value = weight * (x - 1) + np.exp(min(of_ratio, 88.72))

    def cell(value):
        return np.full((1, 1), value, np.float32)

    penalty = Penalty(
        "k3", placement="loss", importance_weights=None if weight == 1 else "token"
    )

    def loss(logprobs):
        return kl_penalty.kl_loss(
            penalty=penalty,
            logprobs=logprobs,
            old_logprobs=cell(x - (log_weight or 0.0)),
            ref_logprobs=cell(0),
            mask=cell(1) > 0,
            weights=cell(1),
        )

    of_loss = toys.jit(jax.value_and_grad(loss, has_aux=True))
    (output, stats), gradient = of_loss(cell(x))
    np.testing.assert_allclose(output, value, rtol=1e-4)
    np.testing.assert_allclose(gradient[0, 0], slope, rtol=1e-4)
    assert np.array_equal(stats["loss/kl_overflowfrac"], (overflowing, 1))
    reward_kl = toys.jit(functools.partial(kl_penalty.reward_kl, penalty=Penalty("k3")))
    value, stats = reward_kl(logprobs=cell(x), ref_logprobs=cell(0), mask=cell(1) > 0)
    expected = min(np.exp(min(-x, 200)), np.exp(88.72)) - 1 + x
    np.testing.assert_allclose(value, [[expected]], rtol=1e-4)
    assert np.array_equal(stats["penalty/overflowfrac"], (-x > 88.72, 1))


@pytest.mark.slow
@pytest.mark.parametrize("penalty", [Penalty(), kl_penalty.UNBIASED_K3, IN_LOSS_K3])
def test_a_token_that_a_model_never_draws_has_a_finite_penalty(penalty):
    """Impossible for policy, reference or both; the limit of ρ·k3 is π_ref/μ."""
    never = -np.inf
    arrays = {
        "logprobs": jnp.array([[never, -1.0, never, -1.0]]),
        "ref_logprobs": jnp.array([[-2.0, never, never, -1.0]]),
        "mask": jnp.ones((1, 4), bool),
    }

    def loss(logprobs):
        return kl_penalty.kl_loss(
            penalty=penalty,
            old_logprobs=jnp.full((1, 4), -1.5),
            weights=jnp.array([[1.0, 0.0, 0.0, 0.0]]),
            **arrays | {"logprobs": logprobs},
        )[0]

    value, gradient = jax.value_and_grad(loss)(arrays["logprobs"])
    assert np.all(np.isfinite(gradient))
    if penalty == kl_penalty.UNBIASED_K3:
        assert float(value) == pytest.approx(np.exp(-2.0 + 1.5), rel=2e-3)
    else:
        assert np.isfinite(value)
        reward, _ = kl_penalty.reward_kl(penalty=penalty, **arrays)
        assert np.all(np.isfinite(reward))


@pytest.mark.slow
@pytest.mark.parametrize("x", one_in(3, [-3.0, 0.0, 2.0]))
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_a_weight_beyond_float32_leaves_value_and_slope_finite(estimator, x):
    """With a drift of 0.2 nats per token a prefix weight is e^100 at token 500."""
    value = {"k1": x, "k2": x * x / 2, "k3": np.expm1(-x) + x}[estimator]
    slope = {"k1": 1.0, "k2": x, "k3": -np.expm1(-x)}[estimator]
    length = 520
    penalty = Penalty(
        estimator,
        grad_estimator=estimator,
        placement="loss",
        importance_weights="prefix",
    )

    def row(value):
        return np.full((1, length), value, np.float32)

    def loss(logprobs):
        return kl_penalty.kl_loss(
            penalty=penalty,
            logprobs=logprobs,
            old_logprobs=row(x - 0.2),
            ref_logprobs=row(0),
            mask=row(1) > 0,
            weights=row(1 / length),
        )

    (output, stats), gradient = jax.value_and_grad(loss, has_aux=True)(row(x))
    assert np.isfinite(output)
    log_weights = 0.2 * np.arange(1, length + 1)
    near = log_weights < 84
    expected = np.exp(log_weights[near]) * slope / length
    np.testing.assert_allclose(gradient[0][near], expected, rtol=1e-3)
    far = np.asarray(gradient[0][log_weights > 89])
    assert np.isfinite(far).all()
    assert (np.sign(far) == np.sign(slope)).all()
    assert (np.abs(far) >= 1e34 * np.abs(np.sign(slope))).all()
    overflowing = log_weights > np.log(2.0**128) - np.log(max(2, 4 * abs(value)))
    overflow = stats["loss/kl_overflowfrac"]
    np.testing.assert_allclose(overflow, (overflowing.sum(), length), atol=1)


# --- Monte Carlo --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mu", "spreads", "bias_of_k2"),
    [(0.1, (20, 1.42, 1.42), 0.0025), (1.0, (2, 1.73, 1.70), 0.25)],
)
def test_published_table_from_samples(mu, spreads, bias_of_k2):
    """std and bias over KL = μ²/2 for π = N(0, 1), π_ref = N(μ, 1); 200,000 samples."""
    count = 200_000
    samples = np.random.default_rng(7).normal(size=(1, count))
    logprobs = (-(samples**2) / 2).astype(np.float32)
    ref_logprobs = (-((samples - mu) ** 2) / 2).astype(np.float32)
    truth = mu**2 / 2
    for estimator, spread in zip(("k1", "k2", "k3"), spreads, strict=True):
        value, _ = kl_penalty.reward_kl(
            penalty=Penalty(estimator),
            logprobs=logprobs,
            ref_logprobs=ref_logprobs,
            mask=np.ones((1, count), bool),
        )
        value = np.asarray(value, np.float64)
        bias = bias_of_k2 if estimator == "k2" else 0.0
        assert value.std() / truth == pytest.approx(spread, rel=0.03)
        error = 4 * spread / np.sqrt(count)  # four standard errors of the mean
        assert value.mean() / truth - 1 == pytest.approx(bias, abs=error)


# --- gradients, by enumeration ------------------------------------------------------

END, WIDTH, LENGTH = 0, 3, 3
PREFIXES = [
    prefix
    for length in range(LENGTH)
    for prefix in itertools.product(range(WIDTH), repeat=length)
]
OPEN = np.array([END not in prefix for prefix in PREFIXES])  # those that go on
RESPONSES = [
    (*prefix, word)
    for prefix in itertools.product(range(1, WIDTH), repeat=LENGTH - 1)
    for word in range(WIDTH)
]
RESPONSES += [(END,), *((word, END) for word in range(1, WIDTH))]
COLUMNS = 1 + LENGTH
WORLD_MASK = np.array(
    [[0 < t <= len(response) for t in range(COLUMNS)] for response in RESPONSES]
)


def entries(response) -> list[tuple[int, int]]:
    """(row of the table, token) of each column; (0, 0) for prompt and padding."""
    cells = [(PREFIXES.index(response[:t]), response[t]) for t in range(len(response))]
    return [(0, 0), *cells, *[(0, 0)] * (LENGTH - len(response))]


ROWS, WORDS = np.moveaxis(np.array([entries(response) for response in RESPONSES]), 2, 0)
POLICY, OLDER, REFERENCE = (normal(len(PREFIXES), WIDTH) for _ in range(3))
NUM_ALONE = 1  # words alone in a top-k KL of three


def world_logprobs(table):
    return jax.nn.log_softmax(table)[ROWS, WORDS]


def response_logprobs(table):
    return jnp.sum(world_logprobs(table), axis=1, where=WORLD_MASK)


def reached(table):
    """f32[13]: the probability of each prefix, 0 if a response ended earlier."""
    logs = jax.nn.log_softmax(table)
    logprobs = []
    for prefix in PREFIXES:
        steps = [(PREFIXES.index(prefix[:t]), prefix[t]) for t in range(len(prefix))]
        logprobs.append(sum((logs[row, word] for row, word in steps), jnp.zeros(())))
    return jnp.where(OPEN, jnp.exp(jnp.stack(logprobs)), 0.0)


def divergences(table, *, direction="reverse", num_alone=None):
    """f32[13]: the KL at each prefix, over all tokens or `num_alone` and a bucket."""
    policy, reference = jax.nn.softmax(table), jax.nn.softmax(REFERENCE)
    if num_alone is not None:
        order = np.argsort(-POLICY, axis=1)
        policy, reference = (
            jnp.concatenate(
                [
                    jnp.take_along_axis(x, order[:, :num_alone], axis=1),
                    jnp.take_along_axis(x, order[:, num_alone:], axis=1).sum(1)[
                        :, None
                    ],
                ],
                axis=1,
            )
            for x in (policy, reference)
        )
    first, second = policy, reference
    if direction == "forward":
        first, second = reference, policy
    return jnp.sum(first * jnp.log(first / second), axis=1)


def target(name: str, penalty: Penalty, prefixes_of) -> np.ndarray:
    """The gradient that a name stands for, at POLICY; fixed prefixes are `prefixes_of`.

    It calls nothing of the tested module.
    """
    num_alone = NUM_ALONE if name.startswith("top-k ") else None
    name = name.removeprefix("top-k ")
    fixed = toys.jit(reached)(prefixes_of)
    ref_logprobs = world_logprobs(REFERENCE)
    likelihood = jnp.exp(response_logprobs(REFERENCE))

    def half_squares(table):
        x = jnp.where(WORLD_MASK, world_logprobs(table) - ref_logprobs, 0.0)
        if penalty.per == "response":
            return jnp.sum(x, axis=1) ** 2 / 2
        return jnp.sum(x**2, axis=1) / 2

    def half_squares_at_prefixes(table):
        x = jax.nn.log_softmax(table) - jax.nn.log_softmax(REFERENCE)
        return jnp.sum(jax.nn.softmax(REFERENCE) * x**2, axis=1) / 2

    at_prefixes = functools.partial(divergences, num_alone=num_alone)
    forward = functools.partial(at_prefixes, direction="forward")
    policy = lambda table: jnp.exp(response_logprobs(table))  # noqa: E731
    log_ratio = lambda table: response_logprobs(table) - jnp.log(likelihood)  # noqa: E731
    values = {
        "full reverse": (
            (lambda table: jnp.sum(policy(table) * log_ratio(table)))
            if num_alone is None
            else (lambda table: jnp.sum(reached(table) * at_prefixes(table)))
        ),
        "full forward": lambda table: -jnp.sum(likelihood * log_ratio(table)),
        "fixed-state reverse": lambda table: jnp.sum(fixed * at_prefixes(table)),
        "fixed-state forward": lambda table: jnp.sum(fixed * forward(table)),
        "own-prefix forward": lambda table: jnp.sum(reached(table) * forward(table)),
        "mean k2": lambda table: jnp.sum(policy(table) * half_squares(table)),
        "reference's mean k2": lambda table: jnp.sum(likelihood * half_squares(table)),
        "fixed-state k2": lambda table: jnp.sum(
            fixed * half_squares_at_prefixes(table)
        ),
    }
    if num_alone is not None and name == "full forward":
        ref_reached = reached(REFERENCE)
        return jax.grad(lambda table: jnp.sum(ref_reached * forward(table)))(POLICY)
    if name.startswith("score half of weighted "):
        # E_π[∇log π · cost], the cost by the NumPy oracle: its weights are π_ref/π.
        exact = np.zeros(WORLD_MASK.shape)
        if penalty.value_estimator == "exact":
            num_alone = NUM_ALONE if penalty.top_k else None
            exact = divergences(POLICY, direction="forward", num_alone=num_alone)[ROWS]
        logprobs = world_logprobs(POLICY)
        cost, _, _ = oracle(
            penalty, logprobs, logprobs, ref_logprobs, exact, WORLD_MASK
        )
        cost = cost.sum(1).astype(np.float32)
        values[name] = lambda table: jnp.sum(policy(table) * cost)
    return toys.jit(jax.grad(values[name]))(POLICY)


def targets(penalty: Penalty, prefixes_of=POLICY) -> np.ndarray:
    gradient = np.zeros(POLICY.shape)
    for name, times in penalty.terms.items():
        gradient += times * np.asarray(target(name, penalty, prefixes_of), np.float64)
    return gradient


def exact_of(table, penalty: Penalty):
    """The exact KL from logits, as in a run."""
    options = {"direction": penalty.direction}
    if penalty.top_k is not None:
        return kl.top_k(table, REFERENCE, k=penalty.top_k, **options)[ROWS]
    return kl.exact(table, REFERENCE, **options)[ROWS]


@functools.partial(toys.jit, static_argnames=("penalty",))
def loss_gradient(penalty: Penalty, sampled_from) -> np.ndarray:
    """The mean gradient of a response's loss over samples of `sampled_from`."""
    likelihood = jnp.exp(response_logprobs(sampled_from))
    weights = jnp.where(WORLD_MASK, likelihood[:, None], 0.0)

    def loss(table):
        return kl_penalty.kl_loss(
            penalty=penalty,
            logprobs=world_logprobs(table),
            old_logprobs=world_logprobs(sampled_from),
            ref_logprobs=world_logprobs(REFERENCE),
            mask=WORLD_MASK,
            weights=weights,
            exact=exact_of(table, penalty),
        )[0]

    return jax.grad(loss)(POLICY)


@functools.partial(toys.jit, static_argnames=("penalty",))
def reward_gradient(penalty: Penalty) -> np.ndarray:
    """The mean over the policy's samples of Σ_t ∇log π_t · (rewards from t on)."""
    logprobs = world_logprobs(POLICY)
    paid, _ = kl_penalty.reward_kl(
        penalty=penalty,
        logprobs=logprobs,
        ref_logprobs=world_logprobs(REFERENCE),
        mask=WORLD_MASK,
        exact=exact_of(POLICY, penalty),
    )
    to_go = jnp.cumsum(paid[:, ::-1], axis=1)[:, ::-1]
    likelihood = jnp.exp(response_logprobs(POLICY))[:, None]
    factor = jnp.where(WORLD_MASK, likelihood * to_go, 0.0)
    return jax.grad(lambda table: jnp.sum(factor * world_logprobs(table)))(POLICY)


CHOICES = {
    "value_estimator": ESTIMATORS,
    "direction": ("reverse", "forward"),
    "per": ("token", "response"),
    "importance_weights": (None, "token", "prefix"),
    "top_k": (None, NUM_ALONE),
}


@pytest.mark.cases(quick=1, slow=10)
@pytest.mark.parametrize(
    "penalty",
    one_in(18, penalties(**CHOICES, placement=("loss",))),
    ids=words,
)
def test_expected_gradient_in_the_loss_is_the_named_one(penalty):
    output = loss_gradient(penalty, POLICY)
    np.testing.assert_allclose(output, targets(penalty), atol=1e-5)
    if penalty.importance_weights is not None:
        # On samples of an older policy, whose prefixes only a prefix's weight undoes.
        prefixes = POLICY if penalty.importance_weights == "prefix" else OLDER
        output = loss_gradient(penalty, OLDER)
        np.testing.assert_allclose(output, targets(penalty, prefixes), atol=1e-5)


@pytest.mark.parametrize(
    "penalty", one_in(9, penalties(**CHOICES, placement=("reward",))), ids=words
)
def test_expected_gradient_in_the_reward_is_the_named_one(penalty):
    np.testing.assert_allclose(reward_gradient(penalty), targets(penalty), atol=1e-5)


@pytest.mark.slow
def test_the_world_tells_the_gradients_apart():
    """Otherwise the tests above could pass by chance."""
    names = ["full reverse", "full forward", "fixed-state reverse"]
    names += ["fixed-state forward", "own-prefix forward", "mean k2"]
    names += ["reference's mean k2", "fixed-state k2"]
    gradients = [np.asarray(target(name, Penalty(), POLICY)) for name in names]
    for left, right in itertools.combinations(gradients, 2):
        assert np.abs(left - right).max() > 0.01
    fixed = [target("fixed-state reverse", Penalty(), x) for x in (POLICY, OLDER)]
    assert np.abs(np.asarray(fixed[0]) - np.asarray(fixed[1])).max() > 0.01


def test_both_is_the_sum_of_the_two():
    both = penalties(**CHOICES, grad_estimator=(None, *ESTIMATORS), placement=("both",))
    assert len(both) > 150
    for penalty in both:
        parts = dataclasses.replace(penalty, placement="loss").terms
        shared = {
            "direction": penalty.direction,
            "per_response": penalty.per == "response",
        }
        shared["importance_weights"] = penalty.importance_weights
        shared["top_k"] = penalty.top_k is not None
        value = penalty.value_estimator
        reward = terms(in_reward=value, in_loss=None, **shared)
        for name in {**parts, **reward}:
            total = parts.get(name, 0) + reward.get(name, 0)
            assert penalty.terms.get(name, 0) == total


@pytest.mark.parametrize(
    ("options", "gradient"),
    [
        ({}, "full reverse"),
        ({"per": "response"}, "full reverse"),
        ({"value_estimator": "exact"}, "full reverse - fixed-state reverse"),
        ({"value_estimator": "k2"}, "mean k2 - fixed-state reverse"),
        ({"value_estimator": "k3"}, "full reverse - fixed-state forward"),
        ({"placement": "loss"}, "zero"),
        ({"placement": "loss", "per": "response"}, "zero"),
        ({"placement": "loss", "grad_estimator": "k2"}, "fixed-state reverse"),
        (
            {"placement": "loss", "grad_estimator": "k2", "per": "response"},
            "full reverse",
        ),
        ({"placement": "loss", "grad_estimator": "k3"}, "fixed-state forward"),
        (
            {"placement": "loss", "grad_estimator": "k3", "per": "response"},
            "full forward",
        ),
        ({"placement": "loss", "grad_estimator": "exact"}, "fixed-state reverse"),
        ({"placement": "both"}, "full reverse"),
        ({"placement": "both", "value_estimator": "exact"}, "full reverse"),
        (
            {"placement": "both", "value_estimator": "exact", "grad_estimator": "k2"},
            "full reverse",
        ),
        ({"placement": "both", "value_estimator": "k3"}, "full reverse"),
        ({"placement": "both", "value_estimator": "k2"}, "mean k2"),
        (
            {"placement": "both", "grad_estimator": "k2"},
            "full reverse + fixed-state reverse",
        ),
        (
            {"placement": "both", "grad_estimator": "k2", "per": "response"},
            "2 × full reverse",
        ),
        (
            {
                "placement": "loss",
                "direction": "forward",
                "importance_weights": "prefix",
            },
            "full forward",
        ),
        (
            {"placement": "loss", "direction": "forward", "value_estimator": "exact"},
            "fixed-state forward",
        ),
        *(
            (
                {
                    "placement": "loss",
                    "direction": "forward",
                    "value_estimator": "k2",
                    "importance_weights": weights,
                },
                gradient,
            )
            for weights, gradient in (
                ("token", "fixed-state k2"),
                ("prefix", "reference's mean k2"),
            )
        ),
        (
            {"placement": "both", "direction": "forward", "value_estimator": "exact"},
            "own-prefix forward",
        ),
        (
            {"placement": "loss", "value_estimator": "exact", "top_k": 8},
            "top-k fixed-state reverse",
        ),
        ({"per": "length"}, "full reverse, each response's divided by its length"),
        ({"placement": None}, "none"),
    ],
)
def test_names_of_gradients(options, gradient):
    """The table of PPO_DETAILS and its consequences."""
    penalty = Penalty(**options)
    assert penalty.gradient == gradient
    is_one = gradient.removeprefix("2 × ").removeprefix("top-k ") in (
        *("full reverse", "full forward", "fixed-state reverse", "fixed-state forward"),
        "none",  # measured only: nothing to warn of
    )
    assert (penalty.warning is None) == is_one
    if penalty.warning is not None:
        assert gradient in penalty.warning


def test_dividing_by_a_length_that_the_policy_chooses_moves_the_length():
    """k1 in the loss, with zero gradient otherwise, then has that of E[1 / length]."""
    output = loss_gradient(Penalty(placement="loss", per="length"), POLICY)
    lengths = WORLD_MASK.sum(1).astype(np.float32)

    def inverse_length(table):
        return jnp.sum(jnp.exp(response_logprobs(table)) / lengths)

    np.testing.assert_allclose(output, jax.grad(inverse_length)(POLICY), atol=1e-6)
    assert np.abs(np.asarray(output)).max() > 0.01


# --- bad input ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"value_estimator": "k4"},
            r"value_estimator: expected one of 'k1', .* got 'k4'",
        ),
        ({"grad_estimator": "k2"}, r"grad_estimator: expected None where .* got k2;"),
        ({"placement": None, "grad_estimator": "k2"}, r"\(placement None\), got k2;"),
        ({"direction": "forward"}, r"expected token or prefix for k1 of a forward KL"),
        (
            {
                "direction": "forward",
                "value_estimator": "exact",
                "grad_estimator": "k3",
                "placement": "loss",
            },
            r"expected token or prefix for k3 of a forward KL",
        ),
        ({"importance_weights": "prefix"}, r"each weight is 1"),
        (
            {"importance_weights": "prefix", "grad_estimator": "k2"},
            r"(?s)grad_estimator: expected None where.*\nimportance_weights: .* is 1",
        ),
        (
            {"importance_weights": "token", "placement": "loss", "per": "response"},
            r"expected prefix or none for one response, got token",
        ),
        (
            {
                "importance_weights": "token",
                "placement": "loss",
                "value_estimator": "exact",
            },
            r"expected prefix or none for an exact estimator, got token",
        ),
        ({"clip": 0.0}, r"clip: expected a finite number above 0, got 0.0"),
        ({"clip": float("nan")}, r"clip: expected a finite number above 0, got nan"),
        ({"top_k": 8}, r"top_k: expected 1 token or more, and an exact .* 8 with k1;"),
        ({"top_k": 0, "value_estimator": "exact"}, r"top_k: expected .* got 0 with"),
    ],
)
def test_a_choice_that_cannot_be_or_does_nothing_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Penalty(**options)


def test_an_exact_estimator_needs_more_than_logprobs():
    penalty = Penalty("k1", "exact", "loss")
    assert penalty.needs_logits
    assert penalty.loss_needs_logits
    assert not penalty.reward_needs_logits
    message = r"exact: expected the exact KL .* got log-probs only; pass kl.exact_from"
    with pytest.raises(ValueError, match=message):
        loss_of(penalty, exact=None)
    with pytest.raises(ValueError, match=message):
        reward_of(Penalty("exact"), exact=None)
    assert not Penalty("exact").loss_needs_logits


def test_statistics_are_float32():
    _, stats = loss_of(Penalty(placement="loss", clip=0.5, value_estimator="k3"))
    assert stats.keys() >= {"loss/kl", "loss/kl_clipfrac", "loss/kl_overflowfrac"}
    assert {leaf.dtype for leaf in jax.tree.leaves(stats)} == {jnp.dtype("float32")}


def test_one_token_may_be_treated_by_itself():
    assert Penalty(value_estimator="exact", top_k=1).top_k == 1


def test_wrong_arrays_say_what_to_do():
    with pytest.raises(ValueError, match=r"mask: expected shape \(any, any\), got \("):
        reward_of(Penalty(), mask=MASK[0], logprobs=REF[0], ref_logprobs=REF[0])
    with pytest.raises(ValueError, match=r"expected arrays of one shape, got logprobs"):
        loss_of(Penalty(), ref_logprobs=REF[:, 1:])
    with pytest.raises(TypeError, match=r"mask: expected bool, got int"):
        reward_of(Penalty(), mask=MASK.astype(np.int32))
    with pytest.raises(TypeError, match=r"weights: expected float32, got float16"):
        loss_of(Penalty(), weights=WEIGHTS.astype(np.float16))


def test_a_warning_says_where_which_estimator_stands():
    in_loss = Penalty(placement="loss").warning
    assert in_loss is not None
    assert in_loss.startswith("KL penalty (k1 in the loss, reverse, per token)")
    in_reward = Penalty("k3").warning
    assert in_reward is not None
    assert in_reward.startswith("KL penalty (k3 in the reward, reverse, per token)")
    assert is_kl({"full reverse": 2})
    assert not is_kl({"full reverse": 0})
