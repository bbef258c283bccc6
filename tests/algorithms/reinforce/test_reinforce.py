"""REINFORCE++: a whole algorithm in one short folder, against loops and by hand."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax import kl_control, masked, policy, state
from rlhf_jax.algorithms import reinforce
from rlhf_jax.algorithms.batch import Rollout, Scored
from rlhf_jax.roles.reference.frozen import FrozenModels

KEY = jax.random.key(3)
LR = 0.1
POLICY = toys.params()
OTHER = toys.params(seed=1)
BASE = reinforce.REINFORCE(
    model=toys.GPT2,
    policy_optimizer=optax.sgd(LR),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    temperature=0.7,
    aggregation="constant",
)
MASK = np.array([[0, 0, 1, 1, 1, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 0, 0]], bool)


def scored_by_hand(kl=True):
    """Rows of 3, 4 and 1 response tokens, with arbitrary numbers."""
    rng = np.random.default_rng(0)
    numbers = rng.normal(size=(3, *MASK.shape)).astype(np.float32)
    old, ref, kls = (np.where(MASK, of, 0.0) for of in numbers)
    rollout = Rollout(
        tokens=jnp.asarray(rng.integers(0, 13, MASK.shape), jnp.int32),
        mask=jnp.ones(MASK.shape, bool),
        response_mask=jnp.asarray(MASK),
        old_logprobs=jnp.asarray(old, jnp.float32),
        entropy=jnp.zeros(MASK.shape, jnp.float32),
        index=jnp.arange(3, dtype=jnp.int32),
        sample=jnp.zeros(3, jnp.int32),
    )
    return Scored(
        rollout=rollout,
        scores=jnp.asarray([1.0, -0.5, 2.25], jnp.float32),
        values=None,
        ref_logprobs=jnp.asarray(ref, jnp.float32),
        kl=jnp.asarray(kls, jnp.float32) if kl else None,
    )


@pytest.mark.parametrize("kl", [True, False])
@pytest.mark.parametrize("whiten", [True, False])
def test_experience_against_loops(kl, whiten):
    scored = scored_by_hand(kl)
    experience, stats = dataclasses.replace(BASE, whiten_advantages=whiten).experience(
        scored, kl_coef=jnp.float32(0.3)
    )
    kls = np.asarray(scored.kl) if kl else np.zeros(MASK.shape)
    rewards = oracles.token_rewards(np.asarray(scored.scores), kls, MASK, 0.3)
    expected = np.zeros(MASK.shape)
    for b, t in oracles.entries(MASK):
        expected[b, t] = sum(rewards[b, u] for u in range(t, MASK.shape[1]))
    if whiten:
        expected = oracles.masked_whiten(expected, MASK)
    np.testing.assert_allclose(experience.advantages, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(experience.token_rewards, rewards, atol=1e-6)
    np.testing.assert_array_equal(experience.response_mask, MASK)
    np.testing.assert_array_equal(experience.tokens, scored.rollout.tokens)
    np.testing.assert_array_equal(experience.mask, scored.rollout.mask)
    np.testing.assert_array_equal(experience.old_logprobs, scored.rollout.old_logprobs)
    np.testing.assert_array_equal(experience.ref_logprobs, scored.ref_logprobs)
    assert stats == {}


@pytest.mark.slow
def test_an_update_is_one_step_up_the_policy_gradient():
    """On-policy it is Σ A ∇ log π over rows times a constant, from all logits."""
    settings = dataclasses.replace(BASE, whiten_advantages=False)
    start = state.grpo_state(
        policy=jax.tree.map(jnp.copy, POLICY),
        policy_optimizer=settings.policy_optimizer,
        kl=kl_control.fixed(0.3),
    )
    program = toys.jit(
        functools.partial(reinforce.iteration, recipe=settings, reward=score)
    )
    after, stats, scored = program(
        start,
        prompts=toys.prompts(),
        frozen=FrozenModels(reference=toys.freeze(OTHER)),
        key=KEY,
    )
    rollout = scored.rollout
    mask = np.asarray(rollout.response_mask)
    rewards = oracles.token_rewards(
        np.asarray(scored.scores), np.asarray(scored.kl), mask, 0.3
    )
    to_go = np.cumsum(rewards[:, ::-1], axis=1)[:, ::-1] * mask

    def by_hand(params):
        logits = policy.logits(
            params, model=toys.GPT2, tokens=rollout.tokens, mask=rollout.mask
        )
        chances = jax.nn.log_softmax(logits / 0.7)[:, :-1]
        picked = (jax.nn.one_hot(rollout.tokens[:, 1:], 13) * chances).sum(-1)
        picked = jnp.where(mask[:, 1:], picked, 0.0)
        return -(picked * jnp.asarray(to_go[:, 1:], jnp.float32)).sum() / (
            len(mask) * toys.SIZE
        )

    grads = toys.jit(jax.grad(by_hand))(POLICY)
    expected = jax.tree.map(lambda p, g: p - LR * g, POLICY, grads)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5),
        after.policy,
        expected,
    )
    kl = float(masked.mean_stats(stats)["objective/kl"])
    logratio = np.asarray(rollout.old_logprobs) - np.asarray(scored.ref_logprobs)
    assert kl == pytest.approx((logratio * mask).sum(axis=1).mean(), rel=1e-4)
    assert not any(name.startswith(("critic/", "value/", "group/")) for name in stats)


def score(rollout):
    """Rewards even tokens."""
    even = (rollout.tokens % 2 == 0) & rollout.response_mask
    return even.sum(axis=1, dtype=jnp.float32)


def test_the_published_recipe():
    assert reinforce.PUBLISHED.whiten_advantages
    assert reinforce.PUBLISHED.num_epochs == 1
    assert reinforce.PUBLISHED.penalty.gradient == "full reverse"
    assert BASE.rows_per_prompt == 1
    assert hash(BASE) == hash(dataclasses.replace(BASE))
