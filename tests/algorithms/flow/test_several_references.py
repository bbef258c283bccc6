"""The KL to several references: a weighted sum, by hand and by identities."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from rlhf_jax import frozen, grpo, kl_control, masked, ppo, state
from rlhf_jax.algorithms import batch
from rlhf_jax.algorithms.flow import objective, score
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_REWARD, Penalty
from rlhf_jax.roles.reference.frozen import FrozenModels, Further

MASK = np.array([[0, 0, 1, 1, 1], [0, 0, 1, 1, 0]], bool)
NOISE = np.random.default_rng(0).normal(size=(4, *MASK.shape))
NOISE = np.where(MASK, NOISE, 0.0).astype(np.float32)
LOGPROBS, FIRST, SECOND, THIRD = NOISE
SHAPE = {"model": toys.GPT2, "max_new_tokens": 3, "temperature": 1.0}
REFERENCES = {
    "b": Further(None, jnp.asarray(SECOND), 0.5),
    "c": Further(None, jnp.asarray(THIRD), 0.0),
}


def scored(penalty=IN_REWARD, *, ref_logprobs=FIRST):
    """A scored rollout with made-up log-probs; no model is run."""
    zeros = jnp.zeros(MASK.shape, jnp.int32)
    rollout = batch.Rollout(
        tokens=zeros,
        mask=jnp.ones(MASK.shape, bool),
        response_mask=jnp.asarray(MASK),
        old_logprobs=jnp.asarray(LOGPROBS),
        entropy=jnp.zeros(MASK.shape, jnp.float32),
        index=zeros[:, 0],
        sample=zeros[:, 0],
    )
    return score.score(
        rollout,
        scores=jnp.zeros(2, jnp.float32),
        reference=None,
        penalty=penalty,
        ref_logprobs=None if ref_logprobs is None else jnp.asarray(ref_logprobs),
        **SHAPE,
    )


@pytest.mark.slow
def test_the_kl_to_each_is_of_the_episodes_that_began():
    of_two = scored()
    alone = jnp.asarray(MASK) & (jnp.arange(2) == 0)[:, None]
    of_one = dataclasses.replace(
        of_two,
        rollout=dataclasses.replace(of_two.rollout, response_mask=alone),
        row_mask=jnp.asarray([True, False]),
    )
    output, _ = objective.add_further(
        of_one, further=REFERENCES, penalty=IN_REWARD, **SHAPE
    )
    total, count = output.kl_stats["objective/kl_b"]
    assert float(count) == 1
    assert float(total) == pytest.approx((LOGPROBS - SECOND)[0].sum(), abs=1e-5)


def test_the_reward_gets_the_weighted_sum_and_each_kl_is_logged():
    penalty = Penalty(clip=0.7)
    output, beside = objective.add_further(
        scored(penalty), further=REFERENCES, penalty=penalty, **SHAPE
    )
    first, second, third = (
        LOGPROBS - ref_logprobs for ref_logprobs in (FIRST, SECOND, THIRD)
    )
    clipped = np.clip(first, -0.7, 0.7) + 0.5 * np.clip(second, -0.7, 0.7)
    np.testing.assert_allclose(output.kl, np.where(MASK, clipped, 0.0), atol=1e-6)
    means = masked.mean_stats(output.kl_stats)
    assert float(means["objective/kl_b"]) == pytest.approx(second.sum() / 2, abs=1e-5)
    assert float(means["objective/kl_c"]) == pytest.approx(third.sum() / 2, abs=1e-5)
    cut = np.abs([first, second, third])[:, MASK] > 0.7
    assert float(means["penalty/clipfrac"]) == pytest.approx(cut.mean())
    assert 0 < cut.mean() < 1
    assert [beside[name].weight for name in ("b", "c")] == [0.5, 0.0]
    np.testing.assert_array_equal(beside["b"].logprobs, SECOND)
    np.testing.assert_array_equal(output.ref_logprobs, FIRST)


def test_in_the_loss_alone_no_reward_has_it():
    penalty = Penalty("k2", placement="loss")
    output, beside = objective.add_further(
        scored(penalty), further=REFERENCES, penalty=penalty, **SHAPE
    )
    assert output.kl is None
    assert "objective/kl_b" in output.kl_stats
    np.testing.assert_array_equal(beside["c"].logprobs, THIRD)


def test_what_is_missing_is_named():
    with pytest.raises(InputError, match=r"first reference with the .* b, c, got none"):
        objective.add_further(
            scored(ref_logprobs=None), further=REFERENCES, penalty=IN_REWARD, **SHAPE
        )
    with pytest.raises(InputError, match="reference b: expected its parameters or"):
        objective.add_further(
            scored(), further={"b": Further(None)}, penalty=IN_REWARD, **SHAPE
        )
    with pytest.raises(InputError, match="reference b: expected policy and reference"):
        objective.add_further(
            scored(),
            further=REFERENCES,
            penalty=Penalty("exact"),
            policy=toys.params(),
            **SHAPE,
        )


# Whole iterations.

GRPO = grpo.GRPO(
    model=toys.GPT2,
    policy_optimizer=optax.sgd(0.1),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    group_size=2,
)
WIDE = dataclasses.replace(toys.LLAMA, hidden_size=32)
KEY = jax.random.key(3)
ROLLOUT = functools.cache(lambda: toys.sampled(toys.params(), lengths=(4, 4, 2, 2)))


def learned(recipe, kl_coef, **frozen_models):
    learn = toys.jit(functools.partial(ppo.learn, recipe=recipe))
    return learn(
        state.grpo_state(
            policy=jax.tree.map(jnp.copy, toys.params()),
            policy_optimizer=recipe.policy_optimizer,
            kl=kl_control.fixed(kl_coef),
        ),
        rollout=dataclasses.replace(
            ROLLOUT(), index=jnp.array([0, 0, 1, 1], jnp.int32)
        ),
        scores=jnp.array([1.0, 0.0, -1.0, 2.0], jnp.float32),
        key=KEY,
        frozen=FrozenModels(**frozen_models),
    )


@pytest.mark.slow
def test_an_iteration_hands_them_on_to_the_loss():
    """Checks shapes without compiling. Exact KL in the loss needs the models."""
    recipe = dataclasses.replace(
        GRPO,
        penalty=Penalty("k3", grad_estimator="exact", placement="loss"),
        max_new_tokens=3,
    )
    params = toys.shapes(toys.GPT2)
    wide = functools.partial(frozen.freeze, model=WIDE)
    other = jax.eval_shape(wide, toys.shapes(WIDE))
    start = functools.partial(
        state.grpo_state,
        policy_optimizer=recipe.policy_optimizer,
        kl=kl_control.fixed(0.3),
    )
    train = jax.eval_shape(lambda policy: start(policy=policy), params)
    models = FrozenModels(
        reference=jax.eval_shape(frozen.freeze, params),
        further={"b": Further(other, weight=0.5)},
    )
    _, stats, _ = jax.eval_shape(
        functools.partial(
            grpo.iteration,
            recipe=recipe,
            reward=lambda rollout: jnp.zeros(len(rollout.tokens), jnp.float32),
            prompts=toys.prompts((2, 2), width=2),
            key=KEY,
        ),
        train,
        frozen=models,
    )
    assert "objective/kl_b" in stats
    assert {"loss/kl", "loss/kl_overflowfrac"} <= set(stats)
    _, experience, _, _ = jax.eval_shape(
        functools.partial(ppo.make_experience, recipe=recipe),
        train,
        rollout=scored().rollout,
        scores=jax.ShapeDtypeStruct((2,), jnp.float32),
        frozen=models,
    )
    assert experience.further["b"].logprobs.shape == MASK.shape
    assert experience.further["b"].weight == 0.5


PENALTIES = {
    "k1 in the reward": IN_REWARD,
    "k2 in the loss": Penalty("k2", placement="loss"),
    "k3 in both": Penalty("k3", placement="both"),
    "exact in both": Penalty("exact", placement="both"),
    "exact of the top 3 in the loss": Penalty("exact", placement="loss", top_k=3),
}


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_the_same_reference_twice_is_one_with_the_sum_of_the_weights(penalty):
    recipe = dataclasses.replace(GRPO, penalty=penalty, micro_batch_size=2)
    same = toys.freeze(toys.params(seed=5))
    twice, stats, _ = learned(
        recipe, 0.2, reference=same, further={"b": Further(same, weight=0.5)}
    )
    once, expected, _ = learned(recipe, 0.3, reference=same)
    assert not toys.leaves_equal(once.policy, toys.params())
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6),
        twice.policy,
        once.policy,
    )
    means, ones = masked.mean_stats(stats), masked.mean_stats(expected)
    np.testing.assert_allclose(
        means["objective/rlhf_reward"], ones["objective/rlhf_reward"], atol=1e-5
    )
    np.testing.assert_allclose(means["objective/kl_b"], ones["objective/kl"], atol=1e-5)
    if penalty.in_loss:
        np.testing.assert_allclose(means["loss/kl"], 1.5 * ones["loss/kl"], rtol=1e-4)


@pytest.mark.long
@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("penalty", PENALTIES.values(), ids=PENALTIES)
def test_a_weight_of_0_changes_nothing_but_is_measured(penalty):
    recipe = dataclasses.replace(GRPO, penalty=penalty)
    one = toys.freeze(toys.params(seed=5))
    other = frozen.freeze(toys.params(WIDE, seed=7), dtype="int8", model=WIDE)
    alone, _, _ = learned(recipe, 0.3, reference=one)
    watched, stats, _ = learned(
        recipe, 0.3, reference=one, further={"b": Further(other, weight=0.0)}
    )
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
        watched.policy,
        alone.policy,
    )
    assert abs(float(masked.mean_stats(stats)["objective/kl_b"])) > 0.01
    heavy, _, _ = learned(
        recipe, 0.3, reference=one, further={"b": Further(other, weight=2.0)}
    )
    moved = jax.tree.map(jnp.subtract, heavy.policy, alone.policy)
    assert float(optax.tree.norm(moved)) > 1e-4


def test_each_is_scored_as_the_first(monkeypatch):
    """The policy and its packing are passed on, because exact KL needs them."""
    calls = []

    def recorded(rollout, **options):
        calls.append(options)
        return scored(options["penalty"], ref_logprobs=SECOND)

    monkeypatch.setattr(objective, "score", recorded)
    policy, packing = object(), object()
    objective.add_further(
        scored(),
        further={"b": REFERENCES["b"]},
        penalty=IN_REWARD,
        policy=policy,
        packing=packing,
        **SHAPE,
    )
    (options,) = calls
    assert options["policy"] is policy
    assert options["packing"] is packing
    assert options["reference"] is REFERENCES["b"].frozen
    assert options["ref_logprobs"] is REFERENCES["b"].logprobs
