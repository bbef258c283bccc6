import functools
import itertools
import re
from types import MappingProxyType

import chex
import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from tiers import one_in

from rlhf_jax import losses, masked
from rlhf_jax.functional import checks

pytestmark = pytest.mark.usefixtures("strict_dtypes")

MASK = np.array(
    [[0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0, 0, 0, 0]],
    bool,
)
RNG = np.random.default_rng(3)


def normal(scale: float, *shape: int) -> np.ndarray:
    return RNG.normal(0, scale, shape).astype(np.float32)


OLD = -np.abs(normal(1.0, 4, 6))
POLICY = {
    "logprobs": OLD + normal(0.3, 4, 6),
    "old_logprobs": OLD,
    "advantages": normal(1.0, 4, 6),
}
VALUE = {
    "values": normal(1.0, 4, 6),
    "old_values": normal(1.0, 4, 6),
    "returns": normal(1.0, 4, 6),
}
LANGUAGE = {"logprobs": OLD}
ENTROPY = {"entropy": np.abs(normal(2.0, 4, 6))}
PAIRS = {"chosen": normal(1.0, 5), "rejected": normal(1.0, 5)}
MARGIN = np.array([0.0, 0.5, 1.0, 0.1, 0.0], np.float32)


def of_counts(loss, mask, num_tokens, num_responses, options, arrays):
    return loss(
        **arrays,
        **options,
        mask=mask,
        num_tokens=num_tokens,
        num_responses=num_responses,
    )


def policy_loss(mask=MASK, *counts, options=MappingProxyType({}), **arrays):
    options = {"clip_range": 0.2, **options}
    return of_counts(losses.policy_loss, mask, *both(counts), options, arrays)


def value_loss(mask=MASK, *counts, options=MappingProxyType({}), **arrays):
    options = {"clip_range": 0.2, **options}
    return of_counts(losses.value_loss, mask, *both(counts), options, arrays)


def entropy_bonus(mask=MASK, *counts, options=MappingProxyType({}), **arrays):
    return of_counts(losses.entropy_bonus, mask, *both(counts), options, arrays)


def language_model_loss(mask=MASK, *counts, **arrays):
    return losses.language_model_loss(**arrays, mask=mask, num_tokens=both(counts)[0])


def both(counts):
    """Counts of tokens and responses; None counts the mask."""
    return counts or (None, None)


BY_RESPONSE = {"aggregation": "sequence_mean"}
OVER_5 = {"aggregation": "constant", "loss_scale_factor": 5.0}
BOUNDED = {"clip_range_high": 0.28, "dual_clip": 1.3, **BY_RESPONSE}

# The loss, its arrays and the one argument that a gradient may reach.
PER_TOKEN = {
    "policy": (policy_loss, POLICY, "logprobs"),
    "policy_bounded": (
        functools.partial(policy_loss, options=BOUNDED),
        POLICY,
        "logprobs",
    ),
    "policy_over_5": (
        functools.partial(policy_loss, options=OVER_5),
        POLICY,
        "logprobs",
    ),
    "value": (value_loss, VALUE, "values"),
    "value_by_response": (
        functools.partial(value_loss, options=BY_RESPONSE),
        VALUE,
        "values",
    ),
    "value_over_5": (
        functools.partial(value_loss, options=OVER_5),
        VALUE,
        "values",
    ),
    "entropy": (entropy_bonus, ENTROPY, "entropy"),
    "entropy_over_5": (
        functools.partial(entropy_bonus, options=OVER_5),
        ENTROPY,
        "entropy",
    ),
    "entropy_by_response": (
        functools.partial(entropy_bonus, options=BY_RESPONSE),
        ENTROPY,
        "entropy",
    ),
    "language_model": (language_model_loss, LANGUAGE, "logprobs"),
}


def means(stats: masked.Stats) -> dict[str, float]:
    return {name: float(x) for name, x in masked.mean_stats(stats).items()}


# What each sums to over MASK, of 8 tokens in 3 responses.
SUMS = {"token_mean": 1.0, "sequence_mean": 1.0, "constant": 8 / 15}


def cuts(rows: int):
    """All ways to cut rows into contiguous parts."""
    for marks in itertools.product((False, True), repeat=rows - 1):
        ends = [0, *(i + 1 for i, cut in enumerate(marks) if cut), rows]
        yield [slice(a, b) for a, b in itertools.pairwise(ends)]


def test_token_weights_by_hand():
    """The drawing of the docstring: 3, 1 and 0 tokens."""
    mask = np.array([[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]], bool)
    weights = losses.token_weights(mask)
    np.testing.assert_allclose(weights, mask / 4, rtol=1e-6)
    weights = losses.token_weights(mask, aggregation="sequence_mean")
    rows = np.array([[1 / 6], [1 / 2], [0]])
    np.testing.assert_allclose(weights, mask * rows, rtol=1e-6)
    weights = losses.token_weights(mask, aggregation="constant", loss_scale_factor=4.0)
    np.testing.assert_allclose(weights, mask / 8, rtol=1e-6)
    assert not losses.token_weights(np.zeros_like(mask)).any()


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("aggregation", SUMS)
def test_token_weights_of_any_parts_are_those_of_the_whole(aggregation):
    counts = {"num_tokens": jnp.float32(8), "num_responses": jnp.float32(3)}
    options = OVER_5 if aggregation == "constant" else {"aggregation": aggregation}
    whole = np.asarray(losses.token_weights(MASK, **options))
    assert whole.sum() == pytest.approx(SUMS[aggregation], rel=1e-6)
    for parts in cuts(len(MASK)):
        weights = [
            losses.token_weights(MASK[rows], **options, **counts) for rows in parts
        ]
        np.testing.assert_array_equal(np.concatenate(weights), whole)


@pytest.mark.slow
def test_responses_of_one_length_weigh_the_same_either_way():
    """With unequal lengths the tokens of the short response weigh more."""
    even = np.tile(np.array([0, 1, 1, 1, 0, 0], bool), (4, 1))
    for options in ({}, BY_RESPONSE):
        losses_of = [policy_loss(m, options=options, **POLICY)[0] for m in (even, MASK)]
        if not options:
            by_token = losses_of
        else:
            assert float(losses_of[0]) == pytest.approx(float(by_token[0]), rel=1e-5)
            assert abs(float(losses_of[1] - by_token[1])) > 1e-2


@pytest.mark.parametrize(
    "options",
    [
        {},
        BY_RESPONSE,
        OVER_5,
        {"clip_range": 0.1, "clip_range_high": 0.28},
        {"clip_range": 0.3, "clip_range_high": 0.05},
        {"dual_clip": 1.3},
        {"dual_clip": 1e3},
        BOUNDED,
    ],
    ids=lambda options: " ".join(options) or "plain",
)
def test_policy_loss_matches_the_oracle(options):
    arguments = {"clip_range": 0.2, **options}
    loss, stats = losses.policy_loss(**POLICY, mask=MASK, **arguments)
    terms = oracles.policy_terms(**POLICY, mask=MASK, **for_oracle(arguments))
    assert 0 < sum(terms["clipped"]) < 8  # both sides of the clip are visited
    expected = oracles.aggregate(
        terms["loss"],
        MASK,
        options.get("aggregation", "token_mean"),
        options.get("loss_scale_factor"),
    )
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    # Diagnostics are means over tokens, whatever the loss is a mean of.
    logged = {
        "loss/policy": expected,
        "policy/approxkl": np.mean(terms["approxkl"]),
        "policy/clipfrac": np.mean(terms["clipped"]),
        "policy/overflowfrac": 0.0,
        "policy/ratio_mean": np.mean(terms["ratio"]),
        "policy/ratio_max": np.max(terms["ratio"]),
    }
    if "dual_clip" in options:
        share = np.mean(terms["dual_clipped"])
        assert (share > 0) == (options["dual_clip"] < 2)
        logged["policy/dual_clipfrac"] = share
    assert means(stats) == pytest.approx(logged, rel=1e-5)


def for_oracle(options):
    """The arguments by the oracle's names."""
    named = {"clip": options["clip_range"]}
    if "clip_range_high" in options:
        named["clip_high"] = options["clip_range_high"]
    if "dual_clip" in options:
        named["dual_clip"] = options["dual_clip"]
    return named


HIGH = {"clip_range_high": 0.28}
DUAL = {"dual_clip": 3.0}


@pytest.mark.parametrize(
    ("ratio", "advantage", "options", "loss", "gradient"),
    [
        (1.5, 1.0, {}, -1.2, 0.0),  # good and already likelier: clipped, no pull
        (1.5, -1.0, {}, 1.5, 1.5),  # bad and likelier: the full pull back
        (0.5, 1.0, {}, -0.5, -0.5),  # good and less likely: the full pull back
        (0.5, -1.0, {}, 0.8, 0.0),  # bad and already less likely: clipped
        (1.1, 2.0, {}, -2.2, -2.2),  # inside: -ρA
        (1.25, 1.0, HIGH, -1.25, -1.25),  # clip-higher: still inside
        (1.5, 1.0, HIGH, -1.28, 0.0),  # and its upper end
        (0.5, -1.0, HIGH, 0.8, 0.0),  # the lower end is ε's
        (0.75, -1.0, HIGH, 0.8, 0.0),
        (2.9, -1.0, DUAL, 2.9, 2.9),  # bad and likelier, up to c
        (5.0, -1.0, DUAL, 3.0, 0.0),  # beyond c: bounded, no pull
        (5.0, -2.0, DUAL, 6.0, 0.0),
        (5.0, 1.0, DUAL, -1.2, 0.0),  # a good one is none of its business
        (0.5, -1.0, DUAL, 0.8, 0.0),
        (1e30, -1.0, DUAL, 3.0, 0.0),
    ],
)
def test_the_cases_of_the_clip(ratio, advantage, options, loss, gradient):
    loss_value, slope, _ = surrogate(np.log(ratio), advantage, options)
    assert float(loss_value) == pytest.approx(loss, rel=1e-5)
    assert float(slope) == pytest.approx(gradient, rel=1e-5)


@functools.cache
def surrogate_with(**options):
    """One compiled program for all numbers with one choice of options."""

    def of(logprobs, advantage):
        return losses.policy_loss(
            logprobs=logprobs,
            old_logprobs=jnp.zeros((1, 1)),
            advantages=advantage,
            mask=jnp.ones((1, 1), jnp.bool_),
            clip_range=0.2,
            **options,
        )

    return jax.jit(jax.value_and_grad(of, has_aux=True))


def surrogate(log_ratio, advantage, options):
    """The loss of one token, its derivative in the log-prob, and statistics."""
    cells = (np.full((1, 1), number, np.float32) for number in (log_ratio, advantage))
    (loss_value, stats), slope = surrogate_with(**options)(*cells)
    return loss_value, slope[0, 0], stats


def test_the_dual_clip_holds_where_the_ratio_itself_overflows():
    loss_value, slope, _ = surrogate(200.0, -2.0, DUAL)
    assert (float(loss_value), float(slope)) == (pytest.approx(6.0), 0.0)


LOG_RATIOS = [-1e4, -100, -1, 0, 0.1, 1, 79, 85, 88, 89, 95, 100, 120, 1e4, np.inf]


@pytest.mark.parametrize("options", [{}, HIGH, DUAL, HIGH | DUAL])
@pytest.mark.parametrize(
    "advantage", [0.0, 1e-8, 1.0, 1e10, -1e-8, -1e-30, -1.0, -1e10]
)
def test_the_gradient_is_that_of_the_formula_wherever_it_is_finite(advantage, options):
    """By hand in float64, where exp(1e4) overflows too and its log decides."""
    low, high = 0.8, 1 + options.get("clip_range_high", 0.2)
    largest = np.log(np.finfo(np.float32).max)
    for log_ratio in LOG_RATIOS:
        expected, slope, overflows = 0.0, 0.0, False
        if advantage > 0:
            ratio = np.exp(min(log_ratio, 10.0))
            expected = -min(ratio, high) * advantage
            slope = -ratio * advantage if ratio < high else 0.0
        elif advantage < 0:
            if log_ratio > np.log(options.get("dual_clip", np.inf)):
                expected = -options["dual_clip"] * advantage
            elif log_ratio < np.log(low):
                expected = -low * advantage
            else:
                log_size = log_ratio + np.log(-advantage)
                overflows = log_size > largest
                expected = slope = np.exp(min(log_size, 88.72))
                slope = 0.0 if np.isinf(log_ratio) else slope
        loss_value, gradient, stats = surrogate(log_ratio, advantage, options)
        case = f"log-ratio {log_ratio}"
        np.testing.assert_allclose(loss_value, expected, 3e-5, 1e-32, err_msg=case)
        np.testing.assert_allclose(gradient, slope, 3e-5, 1e-32, err_msg=case)
        assert float(stats["policy/overflowfrac"][0]) == overflows, case


def test_what_is_no_number_stays_visible():
    for log_ratio, advantage in ((np.nan, 0.0), (np.nan, -1.0), (0.0, np.nan)):
        loss_value, _, _ = surrogate(log_ratio, advantage, {})
        assert np.isnan(loss_value)


@pytest.mark.slow
def test_before_any_update_the_policy_loss_is_the_policy_gradient():
    """At ratio 1 the loss is -mean A, its gradient -A/N, and nothing is clipped."""
    arrays = POLICY | {"logprobs": OLD}
    loss, stats = policy_loss(**arrays)
    expected = -oracles.masked_mean(POLICY["advantages"], MASK)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    numbers = means(stats)
    assert numbers["policy/approxkl"] == numbers["policy/clipfrac"] == 0.0
    assert numbers["policy/ratio_mean"] == numbers["policy/ratio_max"] == 1.0
    gradient = jax.grad(lambda x: policy_loss(**arrays | {"logprobs": x})[0])(OLD)
    expected = np.where(MASK, -POLICY["advantages"] / 8, 0.0)
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@pytest.mark.parametrize("clip_range", [None, 0.2, 10.0])
def test_value_loss_matches_the_oracle(clip_range: float | None):
    loss, stats = losses.value_loss(**VALUE, mask=MASK, clip_range=clip_range)
    terms = oracles.value_terms(**VALUE, mask=MASK, clip=clip_range)
    assert (sum(terms["clipped"]) > 0) == (clip_range == 0.2)
    assert float(loss) == pytest.approx(np.mean(terms["loss"]), rel=1e-5)
    assert means(stats) == pytest.approx(
        {
            "loss/value": np.mean(terms["loss"]),
            "value/clipfrac": np.mean(terms["clipped"]),
        },
        rel=1e-5,
    )


def test_value_loss_of_the_returns_themselves_is_0():
    same = dict.fromkeys(VALUE, VALUE["returns"])
    loss, stats = value_loss(**same)
    assert float(loss) == 0.0
    assert means(stats)["value/clipfrac"] == 0.0


def test_values_inside_the_range_are_not_counted_as_clipped():
    moved = VALUE["old_values"] + normal(0.05, 4, 6)
    _, stats = value_loss(**VALUE | {"values": moved})
    assert means(stats)["value/clipfrac"] == 0.0


@pytest.mark.parametrize("margin", [None, MARGIN])
def test_pairwise_loss_matches_the_oracle(margin):
    loss, stats = losses.pairwise_loss(**PAIRS, margin=margin)
    terms = oracles.pairwise_losses(
        **PAIRS, margin=np.zeros(5) if margin is None else margin
    )
    lead = PAIRS["chosen"] - PAIRS["rejected"]
    assert float(loss) == pytest.approx(np.mean(terms), rel=1e-5)
    assert means(stats) == pytest.approx(
        {
            "loss/pairwise": np.mean(terms),
            "pairwise/accuracy": np.mean(lead > 0),
            "pairwise/lead": np.mean(lead),
        },
        rel=1e-5,
    )
    assert 0 < np.mean(lead > 0) < 1


@pytest.mark.slow
def test_pairwise_identities():
    same = {"chosen": PAIRS["chosen"], "rejected": PAIRS["chosen"]}
    loss, stats = losses.pairwise_loss(**same)
    assert float(loss) == pytest.approx(np.log(2), rel=1e-6)
    assert means(stats)["pairwise/accuracy"] == 0.0  # a tie is a miss
    shifted = {name: x + np.float32(3) for name, x in PAIRS.items()}
    output, expected = losses.pairwise_loss(**shifted), losses.pairwise_loss(**PAIRS)
    assert float(output[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    far = {"chosen": jnp.array([-500.0]), "rejected": jnp.array([500.0])}
    assert float(losses.pairwise_loss(**far)[0]) == pytest.approx(1000.0)


@pytest.mark.slow
def test_pairwise_gradient_is_the_chance_of_the_wrong_answer():
    def loss(chosen, rejected, margin):
        return losses.pairwise_loss(chosen=chosen, rejected=rejected, margin=margin)[0]

    gradients = jax.grad(loss, (0, 1, 2))(PAIRS["chosen"], PAIRS["rejected"], MARGIN)
    lead = np.float64(PAIRS["chosen"]) - PAIRS["rejected"] - MARGIN
    wrong = 1 / (1 + np.exp(lead)) / 5
    np.testing.assert_allclose(gradients[0], -wrong, rtol=1e-5)
    np.testing.assert_allclose(gradients[1], wrong, rtol=1e-5)
    np.testing.assert_array_equal(gradients[2], np.zeros(5))


def test_language_model_loss_matches_the_oracle():
    loss, stats = language_model_loss(**LANGUAGE)
    expected = oracles.language_model_loss(OLD, MASK)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert means(stats) == pytest.approx({"loss/language_model": expected}, rel=1e-5)
    uniform = language_model_loss(logprobs=np.full((4, 6), -np.log(50), np.float32))
    assert float(uniform[0]) == pytest.approx(np.log(50), rel=1e-6)


def policy_oracle(options, aggregation):
    def value(arrays):
        terms = oracles.policy_terms(**arrays, mask=MASK, **options)["loss"]
        return oracles.aggregate(terms, MASK, aggregation, 5.0)

    return value


def value_oracle(aggregation):
    def value(arrays):
        terms = oracles.value_terms(**arrays, mask=MASK, clip=0.2)["loss"]
        return oracles.aggregate(terms, MASK, aggregation, 5.0)

    return value


def entropy_oracle(aggregation):
    def value(arrays):
        terms = [-float(arrays["entropy"][i]) for i in oracles.entries(MASK)]
        return oracles.aggregate(terms, MASK, aggregation, 5.0)

    return value


ORACLES = {
    "policy": policy_oracle({"clip": 0.2}, "token_mean"),
    "policy_bounded": policy_oracle(
        {"clip": 0.2, "clip_high": 0.28, "dual_clip": 1.3}, "sequence_mean"
    ),
    "policy_over_5": policy_oracle({"clip": 0.2}, "constant"),
    "value": value_oracle("token_mean"),
    "value_over_5": value_oracle("constant"),
    "entropy_over_5": entropy_oracle("constant"),
    "value_by_response": value_oracle("sequence_mean"),
    "entropy": entropy_oracle("token_mean"),
    "entropy_by_response": entropy_oracle("sequence_mean"),
    "language_model": lambda a: oracles.language_model_loss(**a, mask=MASK),
}
LOGGED = {name: f"loss/{re.split('_b|_over', name)[0]}" for name in PER_TOKEN}


@pytest.mark.parametrize("name", PER_TOKEN)
def test_the_loss_is_what_is_logged_of_it(name: str):
    loss, arrays, _ = PER_TOKEN[name]
    output, stats = loss(**arrays)
    assert float(output) == pytest.approx(ORACLES[name](arrays), rel=1e-5)
    assert means(stats)[LOGGED[name]] == pytest.approx(float(output), rel=1e-6)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_gradient_matches_finite_differences_and_reaches_one_argument(name: str):
    loss, arrays, trained = PER_TOKEN[name]
    gradients = jax.grad(lambda a: loss(**a)[0])(arrays)
    expected = oracles.numerical_gradient(
        lambda x: float(ORACLES[name](arrays | {trained: x})), arrays[trained]
    )
    np.testing.assert_allclose(gradients[trained], expected, rtol=1e-4, atol=1e-6)
    for other in arrays.keys() - {trained}:
        np.testing.assert_array_equal(gradients[other], np.zeros((4, 6)))


@pytest.mark.cases(quick=4)
@pytest.mark.parametrize("name", PER_TOKEN)
def test_no_gradient_flows_into_the_statistics(name: str):
    loss, arrays, _ = PER_TOKEN[name]

    def total(arrays):
        return sum(masked.mean_stats(loss(**arrays)[1]).values(), jnp.float32(0))

    for gradient in jax.grad(total)(arrays).values():
        np.testing.assert_array_equal(gradient, np.zeros((4, 6)))


@pytest.mark.parametrize("name", one_in(2, PER_TOKEN))
def test_garbage_changes_neither_value_nor_gradient(name: str):
    loss, arrays, _ = PER_TOKEN[name]
    dirty = {key: oracles.poison(x, MASK) for key, x in arrays.items()}
    pair = jax.jit(jax.value_and_grad(lambda a: loss(**a), has_aux=True))
    chex.assert_trees_all_equal(pair(dirty), pair(arrays))


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("name", one_in(3, PER_TOKEN))
def test_micro_batches_add_up_to_the_minibatch(name: str):
    """The parts are unequal, and one has no response token."""
    loss, arrays, trained = PER_TOKEN[name]
    pair = jax.jit(jax.value_and_grad(lambda a, m, *n: loss(m, *n, **a), has_aux=True))
    (whole, stats), gradient = pair(arrays, MASK)
    counts = jnp.sum(MASK), jnp.sum(MASK.any(axis=1))
    parts = [
        pair({k: x[rows] for k, x in arrays.items()}, MASK[rows], *counts)
        for rows in (slice(0, 2), slice(2, 3), slice(3, 4))
    ]
    assert float(sum(part[0][0] for part in parts)) == pytest.approx(
        float(whole), rel=1e-5
    )
    added = parts[0][0][1]
    for part in parts[1:]:
        added = masked.add_stats(added, part[0][1])
    assert means(added) == pytest.approx(means(stats), rel=1e-5)
    np.testing.assert_allclose(
        np.concatenate([part[1][trained] for part in parts]),
        gradient[trained],
        rtol=1e-5,
        atol=1e-7,
    )


def test_micro_batches_of_pairs_add_up():
    whole, stats = losses.pairwise_loss(**PAIRS, margin=MARGIN)
    parts = [
        losses.pairwise_loss(
            chosen=PAIRS["chosen"][rows],
            rejected=PAIRS["rejected"][rows],
            margin=MARGIN[rows],
            num_pairs=jnp.float32(5),
        )
        for rows in (slice(0, 2), slice(2, 5))
    ]
    assert float(parts[0][0] + parts[1][0]) == pytest.approx(float(whole), rel=1e-5)
    added = masked.add_stats(parts[0][1], parts[1][1])
    assert means(added) == pytest.approx(means(stats), rel=1e-5)


@pytest.mark.cases(quick=2)
@pytest.mark.parametrize("name", one_in(2, PER_TOKEN))
def test_padding_and_row_order_change_nothing(name: str):
    loss, arrays, _ = PER_TOKEN[name]
    sides = ((0, 1), (2, 3))
    order = np.array([2, 3, 1, 0])
    expected = loss(**arrays)
    wide = loss(np.pad(MASK, sides), **{k: np.pad(x, sides) for k, x in arrays.items()})
    rows = loss(MASK[order], **{k: x[order] for k, x in arrays.items()})
    for output in (wide, rows):
        assert float(output[0]) == pytest.approx(float(expected[0]), rel=1e-6)
        assert means(output[1]) == pytest.approx(means(expected[1]), rel=1e-6)


@pytest.mark.cases(quick=4)
@pytest.mark.parametrize("name", PER_TOKEN)
def test_an_empty_mask_gives_0_and_no_gradient(name: str):
    loss, arrays, _ = PER_TOKEN[name]
    nothing = np.zeros_like(MASK)
    output, gradients = jax.value_and_grad(lambda a: loss(nothing, **a)[0])(arrays)
    assert float(output) == 0.0
    for gradient in gradients.values():
        np.testing.assert_array_equal(gradient, np.zeros((4, 6)))


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_a_minibatch_of_nothing_is_0(aggregation):
    """The counts of tokens and responses are 0."""
    loss, _ = losses.entropy_bonus(
        entropy=jnp.asarray(OLD),
        mask=jnp.zeros(MASK.shape, bool),
        aggregation=aggregation,
        num_tokens=jnp.zeros(()),
        num_responses=jnp.zeros(()),
    )
    assert float(loss) == 0.0


def explained(values, returns, mask=MASK) -> float:
    stats = losses.explained_variance(values=values, returns=returns, mask=mask)
    return means(stats)["value/explained_variance"]


def test_explained_variance():
    values, returns = VALUE["values"], VALUE["returns"]
    expected = oracles.explained_variance(values, returns, MASK)
    assert explained(values, returns) == pytest.approx(expected, rel=1e-5)
    assert explained(returns, returns) == 1.0
    # Its weight is what there is to explain, so that batches add up.
    stats = losses.explained_variance(values=values, returns=returns, mask=MASK)
    spread = np.square(returns[MASK] - returns[MASK].mean()).sum()
    weight = stats["value/explained_variance"][1]
    assert float(weight) == pytest.approx(spread, rel=1e-5)
    assert explained(np.ones_like(returns), returns) == pytest.approx(0.0, abs=1e-6)
    poisoned = oracles.poison(values, MASK), oracles.poison(returns, MASK)
    assert explained(*poisoned) == explained(values, returns)
    # Far from 0 the digits of the variance are kept; constant returns explain nothing.
    far = explained(values + np.float32(1000), returns + np.float32(1000))
    assert far == pytest.approx(expected, abs=1e-3)
    assert explained(values, np.ones_like(returns)) == 0.0


def test_wrong_input_says_what_to_do():
    with pytest.raises(TypeError, match=r"values: expected float32, got int32"):
        explained(np.ones(MASK.shape, np.int32), VALUE["returns"])
    with pytest.raises(ValueError, match=r"logprobs \(4, 6\), old_logprobs \(4, 5\), "):
        policy_loss(**POLICY | {"old_logprobs": OLD[:, 1:]})
    with pytest.raises(TypeError, match=r"logprobs: expected float32, got bfloat16; "):
        policy_loss(**POLICY | {"logprobs": OLD.astype(jnp.bfloat16)})
    with pytest.raises(TypeError, match=r"mask: expected bool, got int32; make masks"):
        value_loss(MASK.astype(np.int32), **VALUE)
    with pytest.raises(ValueError, match=r"clip_range: expected .* above 0, got 0"):
        losses.value_loss(**VALUE, mask=MASK, clip_range=0.0)
    with pytest.raises(ValueError, match=r"num_tokens: expected shape \(\), got \(4,"):
        language_model_loss(MASK, jnp.ones(4), None, **LANGUAGE)
    with pytest.raises(ValueError, match=r"num_tokens: expected shape \(\), got \(4,"):
        policy_loss(MASK, jnp.ones(4), None, **POLICY)
    with pytest.raises(ValueError, match=r"chosen \(5,\), rejected \(4,\), margin"):
        losses.pairwise_loss(chosen=PAIRS["chosen"], rejected=PAIRS["rejected"][1:])
    with pytest.raises(ValueError, match=r"chosen: expected shape \(any\), got \(5, 1"):
        losses.pairwise_loss(**{k: x[:, None] for k, x in PAIRS.items()})


@pytest.mark.parametrize("bad", [0.0, -0.1, float("nan")])
def test_clip_ranges_that_are_none(bad: float):
    for name in ("clip_range", "clip_range_high"):
        with pytest.raises(
            ValueError, match=rf"{name}: expected .* above 0, got {bad}"
        ):
            policy_loss(options={name: bad}, **POLICY)


@pytest.mark.parametrize("bad", [1.0, 0.5, -3.0, float("nan"), float("inf")])
def test_a_dual_clip_is_above_1(bad: float):
    with pytest.raises(
        checks.InputError, match=r"dual_clip: .* above 1, got .*; choose"
    ):
        policy_loss(options={"dual_clip": bad}, **POLICY)


def test_aggregations_that_cannot_be():
    with pytest.raises(checks.InputError, match=r"aggregation: .* got 'mean'; choose"):
        losses.token_weights(MASK, aggregation="mean")
    with pytest.raises(
        ValueError, match=r"mask: expected shape \(any, any\), got \(6,"
    ):
        losses.token_weights(MASK[0], aggregation="sequence_mean")
    # A micro-batch that is given the one count which is not read would not add up.
    one = jnp.float32(8)
    with pytest.raises(ValueError, match=r"num_responses: .* sequence_mean divides by"):
        losses.token_weights(MASK, aggregation="sequence_mean", num_tokens=one)
    with pytest.raises(ValueError, match=r"num_tokens: .* got num_responses alone; "):
        losses.token_weights(MASK, num_responses=one)
