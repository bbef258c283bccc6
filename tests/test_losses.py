import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest

from rlhf_jax import losses, masked

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
PAIRS = {"chosen": normal(1.0, 5), "rejected": normal(1.0, 5)}
MARGIN = np.array([0.0, 0.5, 1.0, 0.1, 0.0], np.float32)


def policy_loss(mask=MASK, num_tokens=None, **arrays):
    return losses.policy_loss(
        **arrays, mask=mask, clip_range=0.2, num_tokens=num_tokens
    )


def value_loss(mask=MASK, num_tokens=None, **arrays):
    return losses.value_loss(**arrays, mask=mask, clip_range=0.2, num_tokens=num_tokens)


def language_model_loss(mask=MASK, num_tokens=None, **arrays):
    return losses.language_model_loss(**arrays, mask=mask, num_tokens=num_tokens)


# The loss, its arrays and the one argument that a gradient may reach.
PER_TOKEN = {
    "policy": (policy_loss, POLICY, "logprobs"),
    "value": (value_loss, VALUE, "values"),
    "language_model": (language_model_loss, LANGUAGE, "logprobs"),
}


def means(stats: masked.Stats) -> dict[str, float]:
    return {name: float(x) for name, x in masked.mean_stats(stats).items()}


def test_policy_loss_matches_the_oracle():
    loss, stats = policy_loss(**POLICY)
    terms = oracles.policy_terms(**POLICY, mask=MASK, clip=0.2)
    assert 0 < sum(terms["clipped"]) < 8  # both sides of the clip are visited
    assert float(loss) == pytest.approx(np.mean(terms["loss"]), rel=1e-5)
    assert means(stats) == pytest.approx(
        {
            "loss/policy": np.mean(terms["loss"]),
            "policy/approxkl": np.mean(terms["approxkl"]),
            "policy/clipfrac": np.mean(terms["clipped"]),
            "policy/ratio_mean": np.mean(terms["ratio"]),
            "policy/ratio_max": np.max(terms["ratio"]),
        },
        rel=1e-5,
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient"),
    [
        (1.5, 1.0, -1.2, 0.0),  # good and already likelier: clipped, no pull
        (1.5, -1.0, 1.5, 1.5),  # bad and likelier: the full pull back
        (0.5, 1.0, -0.5, -0.5),  # good and less likely: the full pull back
        (0.5, -1.0, 0.8, 0.0),  # bad and already less likely: clipped
        (1.1, 2.0, -2.2, -2.2),  # inside: -ρA
    ],
)
def test_the_five_cases_of_the_clip(ratio, advantage, loss, gradient):
    def of(logprobs):
        return losses.policy_loss(
            logprobs=logprobs,
            old_logprobs=jnp.zeros((1, 1)),
            advantages=jnp.full((1, 1), advantage),
            mask=jnp.ones((1, 1), jnp.bool_),
            clip_range=0.2,
        )[0]

    found, slope = jax.value_and_grad(of)(jnp.log(jnp.full((1, 1), ratio)))
    assert float(found) == pytest.approx(loss, rel=1e-5)
    assert float(slope[0, 0]) == pytest.approx(gradient, rel=1e-5)


def test_before_any_update_the_policy_loss_is_the_policy_gradient():
    """Ratio 1: the loss is -mean A, its gradient -A/N, nothing is clipped."""
    arrays = POLICY | {"logprobs": OLD}
    loss, stats = policy_loss(**arrays)
    expected = -oracles.masked_mean(POLICY["advantages"], MASK)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    found = means(stats)
    assert found["policy/approxkl"] == found["policy/clipfrac"] == 0.0
    assert found["policy/ratio_mean"] == found["policy/ratio_max"] == 1.0
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


def test_pairwise_identities():
    same = {"chosen": PAIRS["chosen"], "rejected": PAIRS["chosen"]}
    loss, stats = losses.pairwise_loss(**same)
    assert float(loss) == pytest.approx(np.log(2), rel=1e-6)
    assert means(stats)["pairwise/accuracy"] == 0.0  # a tie is a miss
    shifted = {name: x + np.float32(3) for name, x in PAIRS.items()}
    found, expected = losses.pairwise_loss(**shifted), losses.pairwise_loss(**PAIRS)
    assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-5)
    far = {"chosen": jnp.array([-500.0]), "rejected": jnp.array([500.0])}
    assert float(losses.pairwise_loss(**far)[0]) == pytest.approx(1000.0)


def test_pairwise_gradient_is_the_chance_of_the_wrong_answer():
    def loss(chosen, rejected, margin):
        return losses.pairwise_loss(chosen=chosen, rejected=rejected, margin=margin)[0]

    found = jax.grad(loss, (0, 1, 2))(PAIRS["chosen"], PAIRS["rejected"], MARGIN)
    lead = np.float64(PAIRS["chosen"]) - PAIRS["rejected"] - MARGIN
    wrong = 1 / (1 + np.exp(lead)) / 5
    np.testing.assert_allclose(found[0], -wrong, rtol=1e-5)
    np.testing.assert_allclose(found[1], wrong, rtol=1e-5)
    np.testing.assert_array_equal(found[2], np.zeros(5))


def test_language_model_loss_matches_the_oracle():
    loss, stats = language_model_loss(**LANGUAGE)
    expected = oracles.language_model_loss(OLD, MASK)
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert means(stats) == pytest.approx({"loss/language_model": expected}, rel=1e-5)
    uniform = language_model_loss(logprobs=np.full((4, 6), -np.log(50), np.float32))
    assert float(uniform[0]) == pytest.approx(np.log(50), rel=1e-6)


ORACLES = {
    "policy": lambda a: np.mean(oracles.policy_terms(**a, mask=MASK, clip=0.2)["loss"]),
    "value": lambda a: np.mean(oracles.value_terms(**a, mask=MASK, clip=0.2)["loss"]),
    "language_model": lambda a: oracles.language_model_loss(**a, mask=MASK),
}


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


@pytest.mark.parametrize("name", PER_TOKEN)
def test_no_gradient_flows_into_the_statistics(name: str):
    loss, arrays, _ = PER_TOKEN[name]

    def total(arrays):
        return sum(masked.mean_stats(loss(**arrays)[1]).values(), jnp.float32(0))

    for gradient in jax.grad(total)(arrays).values():
        np.testing.assert_array_equal(gradient, np.zeros((4, 6)))


@pytest.mark.parametrize("name", PER_TOKEN)
def test_garbage_changes_neither_value_nor_gradient(name: str):
    loss, arrays, _ = PER_TOKEN[name]
    dirty = {key: oracles.poison(x, MASK) for key, x in arrays.items()}
    both = jax.jit(jax.value_and_grad(lambda a: loss(**a), has_aux=True))
    jax.tree.map(np.testing.assert_array_equal, both(dirty), both(arrays))


@pytest.mark.parametrize("name", PER_TOKEN)
def test_micro_batches_add_up_to_the_minibatch(name: str):
    """Unequal parts, one of them without a single response token."""
    loss, arrays, trained = PER_TOKEN[name]
    both = jax.jit(jax.value_and_grad(lambda a, m, n: loss(m, n, **a), has_aux=True))
    (whole, stats), gradient = both(arrays, MASK, None)
    count = jnp.sum(MASK)
    parts = [
        both({k: x[rows] for k, x in arrays.items()}, MASK[rows], count)
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


@pytest.mark.parametrize("name", PER_TOKEN)
def test_padding_and_row_order_change_nothing(name: str):
    loss, arrays, _ = PER_TOKEN[name]
    sides = ((0, 1), (2, 3))
    order = np.array([2, 3, 1, 0])
    expected = loss(**arrays)
    wide = loss(np.pad(MASK, sides), **{k: np.pad(x, sides) for k, x in arrays.items()})
    rows = loss(MASK[order], **{k: x[order] for k, x in arrays.items()})
    for found in (wide, rows):
        assert float(found[0]) == pytest.approx(float(expected[0]), rel=1e-6)
        assert means(found[1]) == pytest.approx(means(expected[1]), rel=1e-6)


@pytest.mark.parametrize("name", PER_TOKEN)
def test_an_empty_mask_gives_0_and_no_gradient(name: str):
    loss, arrays, _ = PER_TOKEN[name]
    nothing = np.zeros_like(MASK)
    found, gradients = jax.value_and_grad(lambda a: loss(nothing, **a)[0])(arrays)
    assert float(found) == 0.0
    for gradient in gradients.values():
        np.testing.assert_array_equal(gradient, np.zeros((4, 6)))


def explained(values, returns, mask=MASK) -> float:
    stats = losses.explained_variance(values=values, returns=returns, mask=mask)
    return means(stats)["value/explained_variance"]


def test_explained_variance():
    values, returns = VALUE["values"], VALUE["returns"]
    expected = oracles.explained_variance(values, returns, MASK)
    assert explained(values, returns) == pytest.approx(expected, rel=1e-5)
    assert explained(returns, returns) == 1.0
    assert explained(np.ones_like(returns), returns) == pytest.approx(0.0, abs=1e-6)
    poisoned = oracles.poison(values, MASK), oracles.poison(returns, MASK)
    assert explained(*poisoned) == explained(values, returns)
    # Far from 0 the digits of the variance are kept; constant returns explain nothing.
    far = explained(values + np.float32(1000), returns + np.float32(1000))
    assert far == pytest.approx(expected, abs=1e-3)
    assert explained(values, np.ones_like(returns)) == 0.0


def test_wrong_input_says_what_to_do():
    with pytest.raises(ValueError, match=r"logprobs \(4, 6\), old_logprobs \(4, 5\), "):
        policy_loss(**POLICY | {"old_logprobs": OLD[:, 1:]})
    with pytest.raises(TypeError, match=r"logprobs: expected float32, got bfloat16; "):
        policy_loss(**POLICY | {"logprobs": OLD.astype(jnp.bfloat16)})
    with pytest.raises(TypeError, match=r"mask: expected bool, got int32; make masks"):
        value_loss(MASK.astype(np.int32), **VALUE)
    with pytest.raises(ValueError, match=r"clip_range: expected .* above 0, got 0"):
        losses.value_loss(**VALUE, mask=MASK, clip_range=0.0)
    with pytest.raises(ValueError, match=r"count: expected shape \(\), got \(4,\)"):
        language_model_loss(MASK, jnp.ones(4), **LANGUAGE)
    with pytest.raises(ValueError, match=r"chosen \(5,\), rejected \(4,\), margin"):
        losses.pairwise_loss(chosen=PAIRS["chosen"], rejected=PAIRS["rejected"][1:])
    with pytest.raises(ValueError, match=r"chosen: expected shape \(any\), got \(5, 1"):
        losses.pairwise_loss(**{k: x[:, None] for k, x in PAIRS.items()})
