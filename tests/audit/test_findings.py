"""Findings for losses with known gradients, and for planted faults."""

import audited_losses
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from audited_losses import FAULTS

from rlhf_jax import audit, kl_penalty
from rlhf_jax.audit.expected import REWARD
from rlhf_jax.functional.kl import gradients

WORLDS = {world.name: world for world in audit.every()}
STOP, STALE = WORLDS["stop token"], WORLDS["stale sampler"]


def found(loss, world=STOP, **options):
    gradient = audit.expected_gradient(loss, world, **options)
    return audit.of_gradient(gradient, world=world, **options)


@pytest.mark.parametrize(
    ("loss", "verdict"),
    [
        (audited_losses.k1, audit.ZERO),
        (audited_losses.k2, gradients.FIXED_REVERSE),
        (audited_losses.k3, gradients.FIXED_FORWARD),
        (audited_losses.k2_of_responses, gradients.FULL_REVERSE),
        (audited_losses.exact, gradients.FIXED_REVERSE),
        (audited_losses.k1_in_reward, gradients.FULL_REVERSE),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
@pytest.mark.cases(quick=3)
def test_a_loss_has_the_gradient_that_the_literature_gives_it(loss, verdict):
    one = found(loss)
    assert one.verdict == verdict
    if verdict != audit.ZERO:
        # Three responses a group, each with the whole gradient.
        assert one.fits[verdict].scale == pytest.approx(3.0, abs=1e-4)
        assert one.by_depth == pytest.approx((1.0, 1.0, 1.0), abs=1e-4)


@pytest.mark.slow
def test_the_same_in_every_world_but_the_stale_one():
    for loss, verdict in (
        (audited_losses.k1, audit.ZERO),
        (audited_losses.k3, gradients.FIXED_FORWARD),
    ):
        *others, stale = audit.of_loss(loss)
        assert [one.verdict for one in others] == [verdict] * 3
        assert stale.verdict == audit.NONE
    weighted = audit.of_loss(audited_losses.weighted_k2_of_responses)
    assert [one.verdict for one in weighted] == [gradients.FULL_REVERSE] * 4


def test_beta_stands_beside_the_reward():
    one = found(audited_losses.objective, with_rewards=True)
    assert one.verdict == gradients.FULL_REVERSE
    assert one.fits[one.nearest].beta == pytest.approx(0.3, abs=1e-4)
    # A loss that reads no reward has none, and not rounding's millions.
    one = found(audited_losses.k2, with_rewards=True)
    assert one.fits[one.nearest].beta is None


def test_a_reward_alone_is_the_reward():
    """Any KL in addition, with β = 0, fits no worse."""

    def reinforce(batch):
        logprobs = audited_losses.own(batch, batch.logprobs).sum(axis=1)
        return -jnp.sum(logprobs * batch.rewards)

    assert found(reinforce, with_rewards=True).verdict == REWARD
    assert REWARD not in found(audited_losses.k2).fits  # none were drawn


def test_a_small_coefficient_does_not_make_it_zero():
    assert found(lambda batch: 1e-5 * audited_losses.k2(batch)).verdict == (
        gradients.FIXED_REVERSE
    )


def test_a_gradient_of_another_world_is_refused():
    with pytest.raises(ValueError, match=r"expected the gradient of 'fixed length'"):
        audit.of_gradient(jnp.zeros((2, 3)), world=WORLDS["fixed length"])


@pytest.mark.parametrize(
    "loss", [lambda batch: batch.logprobs, lambda batch: jnp.sum(batch.mask)]
)
def test_a_loss_is_one_float(loss):
    with pytest.raises(AssertionError, match=r"shape|type"):
        audit.expected_gradient(loss, STOP)


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.cases(quick=3)
def test_a_planted_fault_is_found(fault):
    right, wrong = FAULTS[fault]
    world = STALE if right is audited_losses.weighted_k2_of_responses else STOP
    before, after = found(right, world), found(wrong, world)
    assert before.verdict in (
        *(gradients.FULL_REVERSE, gradients.FIXED_REVERSE, gradients.FIXED_FORWARD),
    )
    assert after.verdict != before.verdict


def of_penalty(penalty):
    """The loss of a penalty per response, by the library's public functions."""

    def loss(batch):
        shared = {"penalty": penalty, "logprobs": batch.logprobs, "mask": batch.mask}
        shared["ref_logprobs"] = batch.ref_logprobs
        now, ref = (jax.nn.log_softmax(one) for one in (batch.logits, batch.ref_logits))
        if penalty.direction == "forward":
            exact = jnp.sum(jnp.exp(ref) * (ref - now), axis=-1)
        else:
            exact = jnp.sum(jnp.exp(now) * (now - ref), axis=-1)
        total = jnp.zeros(())
        if penalty.placement in ("reward", "both"):
            kl, _ = kl_penalty.reward_kl(**shared, exact=jax.lax.stop_gradient(exact))
            to_go = jnp.cumsum(kl[:, ::-1], axis=1)[:, ::-1]
            total += jnp.sum(jnp.where(batch.mask, batch.logprobs * to_go, 0.0))
        if penalty.placement in ("loss", "both"):
            ones = jnp.where(batch.mask, 1.0, 0.0)
            in_loss, _ = kl_penalty.kl_loss(
                **shared, old_logprobs=batch.old_logprobs, weights=ones, exact=exact
            )
            total += in_loss
        return total

    return loss


PENALTIES = [
    kl_penalty.Penalty(value_estimator=estimator, placement=placement, per=per)
    for estimator in ("k1", "k2", "k3", "exact")
    for placement in ("reward", "loss", "both")
    for per in ("token", "response")
]


@pytest.mark.parametrize(
    "penalty",
    PENALTIES,
    ids=lambda one: f"{one.value_estimator}-{one.placement}-{one.per}",
)
@pytest.mark.cases(quick=2)
def test_the_librarys_own_table_from_its_public_functions(penalty):
    one = found(of_penalty(penalty))
    named = penalty.gradient
    known = {*audit.targets(STOP), audit.ZERO}
    assert one.verdict == (named if named in known else audit.NONE), named


def distinct():
    """One penalty per token for each distinct gradient."""
    every = (
        kl_penalty.Penalty(
            value_estimator=estimator,
            placement=placement,
            direction=direction,
            importance_weights=weights if estimator != "exact" else None,
        )
        for direction, weights in (("reverse", None), ("forward", "token"))
        for placement in ("reward", "loss", "both")
        for estimator in ("k1", "k2", "k3", "exact")
    )
    return {penalty.gradient: penalty for penalty in reversed([*every])}


def beside_the_targets(world):
    """{name: f32[states, V]}: gradients of no KL, by sums over responses."""

    def taken(table):
        of_tokens = jax.nn.log_softmax(table)[world.states, world.tokens]
        return jnp.where(world.mask, of_tokens, 0.0)

    ref_logprobs, ref = taken(world.reference), jax.nn.log_softmax(world.reference)

    def sums(table):
        logprobs, words = taken(table), jax.nn.log_softmax(table)
        own = jnp.exp(logprobs.sum(axis=1))
        fixed = jax.lax.stop_gradient(own)
        x = logprobs - ref_logprobs
        forward, squares = (
            jnp.where(world.mask, per_state[world.states], 0.0).sum(axis=1)
            for per_state in (
                jnp.sum(jnp.exp(ref) * (ref - words), axis=1),
                jnp.sum(jnp.exp(ref) * 0.5 * (ref - words) ** 2, axis=1),
            )
        )
        found = {
            gradients.MEAN_K2: own @ (0.5 * x**2).sum(axis=1),
            gradients.OWN_PREFIX_FORWARD: own @ forward,
            gradients.FIXED_K2: fixed @ squares,
        }
        for name, k in {
            "k1": -x,
            "k2": 0.5 * x**2,
            "k3": jnp.exp(x) - 1 - x,
        }.items():
            weighted = jax.lax.stop_gradient((jnp.exp(-x) * k).sum(axis=1))
            score = fixed @ (weighted * logprobs.sum(axis=1))
            found[gradients.SCORE_HALF + name] = score
        return found

    return jax.jacrev(sums)(jnp.asarray(world.policy))


@pytest.mark.parametrize("name", distinct())
@pytest.mark.cases(quick=5)
def test_each_of_the_librarys_17_gradients_is_the_sum_that_its_name_says(name):
    """By the public functions alone, since the verdict names only KLs."""
    assert len(distinct()) == 17
    penalty = distinct()[name]
    known = {**audit.targets(STOP), **beside_the_targets(STOP)}
    expected = jnp.zeros_like(STOP.policy)
    for term, times in penalty.terms.items():
        expected += 3 * times * known[term]  # three responses a group
    measured = audit.expected_gradient(of_penalty(penalty), STOP)
    np.testing.assert_allclose(measured, expected, atol=1e-5)


def test_weights_by_length():
    def mean_of_responses(batch):
        squares = audited_losses.log_ratio(batch) ** 2
        return audited_losses.per_response(batch, squares)

    assert audit.by_length(mean_of_responses) == pytest.approx({1: 3, 2: 1.5, 3: 1})
    assert audit.by_length(audited_losses.k2) == pytest.approx({1: 1, 2: 1, 3: 1})
    # The log ratio of the whole response multiplies each of its tokens.
    whole = audit.by_length(audited_losses.k2_of_responses)
    assert whole == pytest.approx({1: 1 / 3, 2: 2 / 3, 3: 1})


def test_where_a_loss_blows_up():
    slopes = audit.by_log_ratio(audited_losses.k3)
    assert slopes["reference"][20.0] == pytest.approx(1.0)  # 1 - e^-20
    assert slopes["reference"][-20.0] == pytest.approx(np.exp(20) - 1, rel=1e-5)
    assert slopes["reference"][-100.0] == np.inf
    assert len({*slopes["sampler"].values()}) == 1  # it does not read the sampler


def test_a_loss_that_is_no_number_has_no_verdict():
    assert found(lambda batch: jnp.sum(batch.logprobs) * jnp.nan).verdict == audit.NONE


def test_a_loss_of_torch_has_the_same_gradient():
    torch = pytest.importorskip("torch")

    def k3(batch):
        x = batch.ref_logprobs - batch.logprobs
        return ((torch.exp(x) - x - 1) * batch.mask).sum()

    loss = audit.from_torch(k3)
    measured = audit.expected_gradient(loss, STOP)
    expected = audit.expected_gradient(audited_losses.k3, STOP)
    np.testing.assert_allclose(measured, expected, atol=1e-6)
    # Of one group too, which no `vmap` hands over.
    value = audited_losses.k3(audit.example())
    assert loss(audit.example()) == pytest.approx(float(value))
    assert audit.by_length(loss) == pytest.approx({1: 1, 2: 1, 3: 1})


def test_a_loss_of_torch_in_float64_or_of_constants():
    pytest.importorskip("torch")
    double = audit.from_torch(lambda batch: (batch.logprobs.double() ** 2).sum())
    batch = audit.example(1)
    measured = jax.grad(lambda x: double(batch._replace(logprobs=x)))(batch.logprobs)
    np.testing.assert_allclose(measured, 2 * batch.logprobs)
    constant = audit.from_torch(lambda batch: batch.ref_logprobs.sum())
    assert all(np.isnan(weight) for weight in audit.by_length(constant).values())
