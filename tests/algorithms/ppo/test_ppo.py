import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rlhf_jax import (
    batch,
    critic,
    frozen,
    kl_control,
    masked,
    policy,
    ppo,
    state,
)
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient.corrections import Recompute
from rlhf_jax.algorithms.policy_gradient.recipe import Clip, FixedLength
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels
from rlhf_jax.roles.reference.lifecycle import Lifecycle

UPDATE = "rlhf_jax.algorithms.policy_gradient.update"
LR = 0.1
POLICY = toys.params()
CRITIC = toys.scorer(seed=1)
BASE = ppo.PPO(
    model=toys.GPT2,
    critic_model=toys.GPT2,
    policy_optimizer=optax.sgd(LR),
    critic_optimizer=optax.sgd(LR),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    num_epochs=1,
)
ITERATION = dataclasses.replace(BASE, num_epochs=2, num_minibatches=2)
ALONE = dataclasses.replace(BASE, num_minibatches=4)  # of one row each
KEY = jax.random.key(9)

update = toys.jit(ppo.update, static_argnames=("recipe",))
learn = toys.jit(ppo.learn, static_argnames=("recipe",))


def fresh(
    settings: ppo.PPO = BASE, *, controller=None, policy=POLICY
) -> state.TrainState:
    return state.ppo_state(
        policy=jax.tree.map(jnp.copy, policy),
        critic=jax.tree.map(jnp.copy, CRITIC),
        policy_optimizer=settings.policy_optimizer,
        critic_optimizer=settings.critic_optimizer,
        kl=kl_control.fixed(0.1) if controller is None else controller,
    )


def reward(rollout: batch.Rollout) -> jax.Array:
    """The share of even response tokens."""
    even = (rollout.tokens % 2 == 0).astype(jnp.float32)
    return masked.masked_mean(even, mask=rollout.response_mask, axis=1)


def close(left, right, *, rtol=1e-4, atol=1e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), left, right
    )


def weights(current: state.TrainState):
    return current.policy, current.critic


def distance(left, right) -> float:
    return float(optax.tree.norm(jax.tree.map(jnp.subtract, left, right)))


@pytest.fixture(scope="module")
def rollout():
    return toys.sampled(POLICY)


@pytest.fixture(scope="module")
def experience(rollout):
    return toys.experience(rollout)


@pytest.fixture(scope="module")
def updated(experience):
    """The state after one epoch with one minibatch."""
    return update(fresh(), experience=experience, key=KEY, recipe=BASE)


# One update, by hand.


def by_hand(params, experience):
    """PPO's loss from all logits, as a mean over tokens, and its parts."""
    policy_params, critic_params = params
    e = experience
    logits = policy.logits(policy_params, model=toys.GPT2, tokens=e.tokens, mask=e.mask)
    chances = jax.nn.softmax(logits / 0.7)[:, :-1]
    picked = (jax.nn.one_hot(e.tokens[:, 1:], 13) * chances).sum(-1)
    m = e.response_mask[:, 1:].astype(jnp.float32)
    ratio = jnp.where(m > 0, picked / jnp.exp(e.old_logprobs[:, 1:]), 1.0)
    gain = jnp.minimum(
        ratio * e.advantages[:, 1:], jnp.clip(ratio, 0.8, 1.2) * e.advantages[:, 1:]
    )
    v = critic.values(critic_params, model=toys.GPT2, tokens=e.tokens, mask=e.mask)
    v, old, target = v[:, 1:], e.old_values[:, 1:], e.returns[:, 1:]
    near = jnp.minimum(jnp.maximum(v, old - 0.2), old + 0.2)
    squares = jnp.maximum((v - target) ** 2, (near - target) ** 2) / 2
    policy_part = -(gain * m).sum() / m.sum()
    value_part = (squares * m).sum() / m.sum()
    return policy_part + 0.1 * value_part, (policy_part, value_part, ratio, m)


@pytest.fixture(scope="module")
def hand_made(experience):
    gradient = toys.jit(jax.value_and_grad(by_hand, has_aux=True))
    return gradient((POLICY, CRITIC), experience)


@pytest.mark.slow
def test_an_update_is_one_step_down_the_gradient(updated, hand_made):
    after, _ = updated
    _, grads = hand_made
    expected = jax.tree.map(lambda w, g: w - LR * g, (POLICY, CRITIC), grads)
    close(weights(after), expected, rtol=1e-4, atol=2e-6)
    assert distance(after.policy, POLICY) > 0.01
    assert distance(after.critic, CRITIC) > 0.001
    assert int(after.step) == 1


@pytest.mark.slow
def test_the_stats_of_an_update(updated, hand_made, experience):
    (_, (policy_part, value_part, ratio, m)), grads = hand_made
    means = masked.mean_stats(updated[1])
    inside = np.asarray(m) > 0
    ratios = np.asarray(ratio, np.float64)[inside]
    advantages = np.asarray(experience.advantages)[:, 1:][inside]
    clipped = np.clip(ratios, 0.8, 1.2) * advantages < ratios * advantages
    expected = {
        "loss/policy": policy_part,
        "loss/value": value_part,
        "policy/approxkl": (np.log(ratios) ** 2 / 2).mean(),
        "policy/clipfrac": clipped.mean(),
        "policy/overflowfrac": 0.0,
        "policy/ratio_mean": ratios.mean(),
        "policy/ratio_max": ratios.max(),
        "policy/sampler_mismatch": np.abs(np.log(ratios)).mean(),
        "policy/grad_norm": optax.tree.norm(grads[0]),
        "critic/grad_norm": optax.tree.norm(grads[1]),
        "update/skipped": 0.0,
        "update/skipped_in_a_row": 0.0,
    }
    assert 0 < clipped.mean() < 1
    assert means.keys() == {*expected, "value/clipfrac"}
    for name, value in expected.items():
        np.testing.assert_allclose(means[name], value, rtol=1e-3, err_msg=name)


@pytest.mark.slow
def test_before_any_update_the_ratio_is_one(rollout, experience):
    """approxkl is 0 for any samples, because the policy has not changed yet."""
    own = dataclasses.replace(experience, old_logprobs=rollout.old_logprobs)
    _, stats = update(fresh(), experience=own, key=KEY, recipe=BASE)
    means = masked.mean_stats(stats)
    np.testing.assert_allclose(means["policy/ratio_mean"], 1.0, atol=1e-5)
    np.testing.assert_allclose(means["policy/ratio_max"], 1.0, atol=1e-5)
    np.testing.assert_allclose(means["policy/approxkl"], 0.0, atol=1e-9)
    assert means["policy/clipfrac"] == 0


# What must not matter.


@pytest.mark.slow
def test_rows_may_come_in_any_order(updated, experience):
    order = jnp.asarray([2, 0, 3, 1])
    shuffled = jax.tree.map(lambda leaf: leaf[order], experience)
    after, stats = update(fresh(), experience=shuffled, key=KEY, recipe=BASE)
    close(weights(after), weights(updated[0]))
    close(masked.mean_stats(stats), masked.mean_stats(updated[1]))


@pytest.mark.slow
def test_garbage_under_the_masks_changes_nothing(updated, experience):
    response = np.asarray(experience.response_mask)
    names = ("old_logprobs", "ref_logprobs", "old_values", "advantages", "returns")
    poisoned = {
        name: jnp.asarray(oracles.poison(getattr(experience, name), response))
        for name in (*names, "token_rewards")
    }
    tokens = jnp.where(experience.mask, experience.tokens, 11)
    after, stats = update(
        fresh(),
        experience=dataclasses.replace(experience, tokens=tokens, **poisoned),
        key=KEY,
        recipe=BASE,
    )
    assert toys.leaves_equal(after.policy, updated[0].policy)
    assert toys.leaves_equal(after.critic, updated[0].critic)
    assert toys.leaves_equal(stats, updated[1])


@pytest.mark.slow
def test_wider_padding_changes_nothing(updated, experience):
    wider = jax.tree.map(lambda leaf: jnp.pad(leaf, ((0, 0), (3, 0))), experience)
    after, stats = update(fresh(), experience=wider, key=KEY, recipe=BASE)
    close(weights(after), weights(updated[0]))
    close(masked.mean_stats(stats), masked.mean_stats(updated[1]))


@pytest.mark.long  # test_ppo_by_hand.py has them against all logits
def test_micro_batches_change_nothing(updated, experience):
    parts = dataclasses.replace(BASE, micro_batch_size=1)
    after, stats = update(fresh(), experience=experience, key=KEY, recipe=parts)
    close(weights(after), weights(updated[0]))
    close(masked.mean_stats(stats), masked.mean_stats(updated[1]))


# Epochs and minibatches. Rows are named by their tokens; no model runs.


def visits(monkeypatch, *, key, num_epochs=3, num_minibatches=2, rows=8):
    """rows[epoch, minibatch, row], in the order of the update."""
    visited = []

    def record(current, *, minibatch, **_):
        jax.debug.callback(
            lambda rows: visited.append(np.asarray(rows)),
            minibatch.tokens[:, 0],
            ordered=True,
        )
        nothing = {"policy/sampler_mismatch": (jnp.zeros(()), jnp.ones(()))}
        return current, jnp.bool_(False), nothing

    monkeypatch.setattr(f"{UPDATE}._step", record)
    per_token = jnp.zeros((rows, 2))
    index = jnp.arange(rows, dtype=jnp.int32)
    numbered = batch.Experience(
        tokens=jnp.stack([index, index], axis=1),
        mask=per_token == 0,
        response_mask=per_token == 0,
        value_mask=per_token == 0,
        old_logprobs=per_token,
        ref_logprobs=None,
        old_values=per_token,
        token_rewards=per_token,
        advantages=per_token,
        returns=per_token,
    )
    settings = dataclasses.replace(
        BASE, num_epochs=num_epochs, num_minibatches=num_minibatches
    )
    ppo.update(fresh(), experience=numbered, key=key, recipe=settings)
    jax.effects_barrier()
    return np.array(visited).reshape(num_epochs, num_minibatches, -1)


@pytest.mark.slow
def test_every_epoch_visits_every_row_once_in_an_order_of_its_own(monkeypatch):
    visited = visits(monkeypatch, key=KEY)
    for epoch in visited:
        assert sorted(epoch.ravel()) == list(range(8))
    orders = {tuple(epoch.ravel()) for epoch in visited}
    orders |= {tuple(e.ravel()) for e in visits(monkeypatch, key=jax.random.key(1))}
    assert len(orders) == 6


@pytest.mark.slow
def test_each_random_key_is_used_once(monkeypatch):
    """Keys of sampler rows and positions and of update epochs, over several steps."""
    current, experience = fresh(), toys.experience(toys.sampled(POLICY))
    used = []

    def recorded(draw):
        def drawn(key, *args):
            data = jax.random.key_data(key)
            jax.debug.callback(lambda key: used.append(tuple(key.tolist())), data)
            return draw(key, *args)

        return drawn

    for name in ("uniform", "permutation"):
        monkeypatch.setattr(jax.random, name, recorded(getattr(jax.random, name)))
    mismatch = {"policy/sampler_mismatch": (jnp.zeros(()), jnp.ones(()))}
    monkeypatch.setattr(f"{UPDATE}._step", lambda state, **_: (state, False, mismatch))

    @toys.jit
    def step(current, experience, key):
        rollout = ppo.sample(
            current.policy, prompts=toys.prompts(), key=key, recipe=ITERATION
        )
        update = ppo.update(current, experience=experience, key=key, recipe=ITERATION)
        return rollout, update

    num_positions = 0
    for number in range(3):
        rollout, _ = step(current, experience, jax.random.fold_in(KEY, number))
        jax.effects_barrier()
        longest = rollout.response_mask.sum(axis=1).max()
        num_positions += int(longest)
    assert len(used) == 4 * num_positions + 3 * ITERATION.num_epochs
    assert len(set(used)) == len(used)


# The whole iteration.


@pytest.fixture(scope="module")
def reference():
    return toys.freeze(POLICY)


@pytest.fixture(scope="module")
def learned(reference):
    """ppo.learn, compiled once for all values of the config."""

    @toys.jit
    def compiled(current, rollout, scores, changed, policy_lr, critic_lr):
        clips = {n: x for n, x in changed.items() if n in CLIPS}
        settings = dataclasses.replace(
            ITERATION,
            policy_optimizer=optax.sgd(policy_lr),
            critic_optimizer=optax.sgd(critic_lr),
            surrogate=Clip(**clips),
            **{n: x for n, x in changed.items() if n not in CLIPS},
        )
        return ppo.learn(
            current,
            rollout=rollout,
            scores=scores,
            frozen=FrozenModels(reference=reference),
            key=KEY,
            recipe=settings,
        )

    return compiled


def adaptive():
    return kl_control.Adaptive(target=0.8, unit="response", horizon=40).controller(0.3)


@pytest.fixture(scope="module")
def iteration(reference):
    """A compiled iteration from a policy that differs from the reference."""
    compiled = (
        toys.jit(
            ppo.iteration,
            static_argnames=("recipe", "reward"),
            donate_argnames=("state",),
        )
        .lower(
            away(),
            prompts=toys.prompts(),
            frozen=FrozenModels(reference=reference),
            reward=reward,
            key=KEY,
            recipe=ITERATION,
        )
        .compile()
    )

    def run(current, key=KEY):
        frozen = FrozenModels(reference=reference)
        return compiled(current, prompts=toys.prompts(), frozen=frozen, key=key)

    run.compiled = compiled
    return run


def away() -> state.TrainState:
    moved = toys.perturbed(POLICY, seed=2, scale=0.05)
    return fresh(ITERATION, controller=adaptive(), policy=moved)


@pytest.mark.slow
def test_an_iteration_is_sample_then_reward_then_learn(iteration, learned):
    after, stats, scored = iteration(away())
    sample = toys.jit(ppo.sample, static_argnames=("recipe",))
    current = away()
    rollout = sample(current.policy, prompts=toys.prompts(), key=KEY, recipe=ITERATION)
    parts, part_stats, part_scored = learned(
        current, rollout, reward(rollout), PLAIN, LR, LR
    )
    np.testing.assert_array_equal(scored.rollout.tokens, part_scored.rollout.tokens)
    close(after, parts, atol=1e-6)
    means, of_parts = masked.mean_stats(stats), masked.mean_stats(part_stats)
    # In standard deviations, of what rounding makes of weights that are 1.
    weight_z = means.pop("trust/weight_z") - of_parts.pop("trust/weight_z")
    assert abs(float(weight_z)) < 1e-3
    close(means, of_parts, atol=1e-5)


@pytest.mark.slow
def test_the_state_is_donated_and_the_reference_is_not(iteration, reference):
    memory = iteration.compiled.memory_analysis()
    current = away()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(current))
    assert memory.alias_size_in_bytes >= size
    iteration(current)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(current.policy))
    frozen.verify(reference)


@pytest.mark.slow
def test_a_reference_frozen_from_the_donated_policy_stands_still(reference):
    """The reference is a copy; the update overwrites the policy's buffers."""
    own = jax.tree.map(jnp.copy, POLICY)
    frozen_policy = frozen.freeze(own)
    start = fresh()
    start = dataclasses.replace(start, policy=own)

    @functools.partial(jax.jit, donate_argnames=("state",))
    def overwrite(state):
        return jax.tree.map(lambda leaf: leaf + 1, state)

    overwrite(start)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(own))
    frozen.verify(frozen_policy)
    assert toys.leaves_equal(frozen_policy.stored, reference.stored)


@pytest.mark.slow
def test_the_same_key_gives_the_same_bits_and_another_does_not(iteration):
    first, again = iteration(away()), iteration(away())
    other = iteration(away(), jax.random.key(10))
    assert toys.leaves_equal(first, again)
    assert not toys.leaves_equal(first[2].rollout.tokens, other[2].rollout.tokens)
    assert distance(first[0].policy, other[0].policy) > 1e-4


@pytest.mark.slow
def test_the_controller_moves_by_its_formula(iteration):
    after, stats, scored = iteration(away())
    response = np.asarray(scored.rollout.response_mask)
    x = oracles.k1(scored.rollout.old_logprobs, scored.ref_logprobs)
    kl = x[response].sum() / 4
    assert abs(kl) > 0.01
    expected = oracles.adaptive_kl_coef(0.3, kl, 4, target=0.8, horizon=40)
    np.testing.assert_allclose(after.kl.kl_coef, expected, rtol=1e-5)
    means = masked.mean_stats(stats)
    np.testing.assert_allclose(means["objective/kl_coef"], 0.3, rtol=1e-6)  # as used
    np.testing.assert_allclose(means["objective/kl"], kl, rtol=1e-3)


@pytest.mark.slow
def test_the_scores_moments_count_every_score(iteration):
    one, _, first = iteration(away())
    two, _, second = iteration(one, jax.random.key(10))
    both = np.concatenate([first.scores, second.scores])
    assert float(two.scores.count) == 8
    np.testing.assert_allclose(two.scores.mean, both.mean(), rtol=1e-5)
    np.testing.assert_allclose(two.scores.variance, both.var(), rtol=1e-4)


@pytest.mark.slow
def test_every_token_has_the_version_that_drew_it(iteration):
    one, _, first = iteration(away())
    _, _, second = iteration(one, jax.random.key(10))
    for version, scored in enumerate((first, second)):
        drawn = np.asarray(scored.rollout.response_mask)
        np.testing.assert_array_equal(scored.rollout.version, version * drawn)


# Options.


@pytest.mark.long  # test_ppo_details.py has it by hand
def test_whitening_over_the_minibatch(experience):
    """Minibatches of one row, so every row is whitened separately."""
    settings = dataclasses.replace(ALONE, whiten_advantages="minibatch")
    output, _ = update(fresh(), experience=experience, key=KEY, recipe=settings)
    advantages, mask = (
        np.array(a) for a in (experience.advantages, experience.response_mask)
    )
    for b in range(4):
        advantages[b] = oracles.masked_whiten(advantages[b], mask[b])
    by_hand = dataclasses.replace(experience, advantages=jnp.asarray(advantages))
    expected, _ = update(fresh(), experience=by_hand, key=KEY, recipe=ALONE)
    close(weights(output), weights(expected))


@pytest.mark.slow
def test_scores_are_normalised_then_the_missing_stop_is_scored(rollout, reference):
    settings = dataclasses.replace(
        BASE,
        scores=ScoreShaping(normalise=True, missing_stop_score=-1.0),
        sampler_correction=Recompute(),
    )
    off = dataclasses.replace(rollout, old_logprobs=rollout.old_logprobs - 0.25)
    scores = jnp.asarray([1.0, 2.0, 3.0, 6.0], jnp.float32)
    after, stats, scored = learn(
        fresh(),
        rollout=off,
        scores=scores,
        frozen=FrozenModels(reference=reference),
        key=KEY,
        recipe=settings,
    )
    means = masked.mean_stats(stats)
    # Mean 3, variance 3.5.
    normal = (np.array([1.0, 2.0, 3.0, 6.0]) - 3) / 3.5**0.5
    stopped = (np.isin(rollout.tokens, toys.STOP) & rollout.response_mask).any(axis=1)
    assert 0 < stopped.sum() < 4
    expected = np.where(stopped, normal, -1.0)
    np.testing.assert_allclose(scored.scores, expected, rtol=1e-5)
    np.testing.assert_allclose(means["objective/scores"], 3.0)  # as the reward said
    np.testing.assert_allclose(means["response/eos_fraction"], stopped.mean())
    # The trainer's log-probs are used; how far the sampler's were is logged.
    np.testing.assert_allclose(means["policy/sampler_mismatch"], 0.25, rtol=1e-4)
    np.testing.assert_allclose(means["policy/ratio_mean"], 1.0, atol=1e-5)
    np.testing.assert_allclose(scored.kl, 0.0, atol=2e-5)

    broken, broken_stats, _ = learn(
        after,
        rollout=off,
        scores=scores.at[int(stopped.argmax())].set(jnp.nan),
        frozen=FrozenModels(reference=reference),
        key=KEY,
        recipe=settings,
    )
    assert toys.leaves_equal(weights(broken), weights(after))
    assert toys.leaves_equal(broken.scores, after.scores)
    assert int(broken.skipped) == 1
    assert int(broken.step) == 2
    assert masked.mean_stats(broken_stats)["update/skipped"] == 1


@pytest.mark.slow
def test_a_broken_minibatch_is_skipped_alone(experience):
    """Row 2 is broken: its minibatch is skipped, and the other three are not."""
    broken = dataclasses.replace(
        experience, returns=experience.returns.at[2].set(jnp.inf)
    )
    after, stats = update(fresh(), experience=broken, key=KEY, recipe=ALONE)
    means = masked.mean_stats(stats)
    assert means["update/skipped"] == 0.25
    assert means["update/skipped_in_a_row"] == 1
    assert all(np.isfinite(value) for value in means.values())
    response = np.asarray(experience.response_mask)
    num_tokens = response.sum() - response[2].sum()
    assert float(stats["loss/policy"][1]) == num_tokens
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after))
    assert distance(after.policy, POLICY) > 0.01


# Every field of the configuration changes something.

CLIPS = {"clip_range", "clip_range_high"}  # of the surrogate
CHANGED = {
    "gamma": 0.9,
    "lam": 0.5,
    "clip_range": 0.01,
    "clip_range_high": 0.05,
    "value_clip_range": 100.0,
    "vf_coef": 0.5,
    "temperature": 0.9,
}
REBUILT = {
    "model": dataclasses.replace(toys.GPT2, norm_eps=0.1),
    "critic_model": dataclasses.replace(toys.GPT2, norm_eps=0.1),
    "policy_optimizer": optax.sgd(2 * LR),
    "critic_optimizer": optax.sgd(2 * LR),
    "max_new_tokens": 4,
    "stop_ids": (5, 6),
    "penalty": Penalty(value_estimator="k3", placement="loss"),
    "lifecycle": Lifecycle(kl_every=4, scale_kl_coef=True),
    "scores": ScoreShaping(normalise=True),
    "whiten_rewards": "rollout",
    "whiten_advantages": None,
    "whiten_ddof": 1,
    "value_after_stop": True,
    "entropy_coef": 0.1,
    "aggregation": "sequence_mean",
    "critic_warmup": 1,
    "num_epochs": 1,
    "num_minibatches": 1,
}


# One by its stats; one must change nothing; one is of test_lora.py, the others of
# test_ppo_details.py and test_ppo_by_hand.py.
ABOVE = {
    *("micro_batch_size", "lora", "fixed_length"),
    "continuous_batching",  # must change nothing: test_continuous_batching.py
    # test_corrections.py
    "sampler_correction",
    "loss_scale_factor",  # test_ppo_by_hand.py, test_grpo.py
    # test_published.py, test_surrogates.py, test_packed_learning.py
    "surrogate",
    "off_policy_mask",  # test_left_out.py, test_policy_losses.py
    *("ptx_coef", "shared_trunk", "stop_approxkl", "max_ratio_mean"),
    "token_choice",  # test_chosen_tokens.py
    "entropy_control",  # test_entropy_target.py
    "gradient_penalty",  # test_gradient_penalty.py
    "routing_replay",  # test_replayed_routing.py
    "balance_coef",  # test_experts.py
}


def test_no_field_is_forgotten_here():
    fields = {field.name for field in dataclasses.fields(ppo.PPO)}
    assert {*CHANGED, *REBUILT, *ABOVE} - CLIPS == fields


PLAIN = {name: getattr(ITERATION, name) for name in CHANGED if name not in CLIPS}
PLAIN |= dict.fromkeys(CLIPS, ITERATION.surrogate.clip_range)


@pytest.fixture(scope="module")
def numbers(rollout, learned):
    """The state after `learn`, for values of the config."""

    def run(changed, *, policy_lr=LR, critic_lr=LR):
        current = fresh(ITERATION, controller=adaptive())
        after, _, _ = learned(
            current, rollout, 3 * reward(rollout), changed, policy_lr, critic_lr
        )
        return after

    return run, PLAIN


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGED)
def test_no_number_of_the_config_is_inert(numbers, name):
    run, plain = numbers
    before, after = run(plain), run(plain | {name: CHANGED[name]})
    assert distance(weights(before), weights(after)) > 1e-5


@pytest.mark.slow
def test_each_role_has_an_optimizer_of_its_own(numbers):
    """If one has a learning rate of 0, the other still trains as before."""
    run, plain = numbers
    both = run(plain)
    policy_still, critic_still = run(plain, policy_lr=0.0), run(plain, critic_lr=0.0)
    assert toys.leaves_equal(policy_still.policy, POLICY)
    assert toys.leaves_equal(critic_still.critic, CRITIC)
    close(policy_still.critic, both.critic)
    close(critic_still.policy, both.policy)
    assert distance(both.policy, POLICY) > 1e-3
    assert distance(both.critic, CRITIC) > 1e-3


@pytest.mark.slow
def test_values_are_those_of_the_critic_s_own_model(rollout):
    other = dataclasses.replace(BASE, critic_model=REBUILT["critic_model"])
    values = ppo.values(fresh(), rollout=rollout, recipe=other)
    expected = critic.values(
        CRITIC,
        model=REBUILT["critic_model"],
        tokens=rollout.tokens,
        mask=rollout.mask,
    )
    close(values, jnp.where(rollout.response_mask, expected, 0.0))


@pytest.mark.long  # of each another test says what it does
@pytest.mark.parametrize("name", REBUILT)
def test_no_other_field_of_the_config_is_inert(name, reference):
    def run(settings):
        return toys.jit(ppo.iteration, static_argnames=("recipe", "reward"))(
            away(),
            prompts=toys.prompts(),
            frozen=FrozenModels(reference=reference),
            reward=reward,
            key=KEY,
            recipe=settings,
        )

    before = run(ITERATION)
    after = run(dataclasses.replace(ITERATION, **{name: REBUILT[name]}))
    assert distance(weights(before[0]), weights(after[0])) > 1e-6


# Bad input.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_minibatches": 3}, "num_minibatches to divide the 4 rows of a batch, go"),
        ({"num_minibatches": 8}, "num_minibatches to divide the 4 rows of a batch, go"),
        (
            {"num_minibatches": 2, "micro_batch_size": 4},
            "micro_batch_size to divide the 2 rows of a minib",
        ),
        ({"micro_batch_size": 0}, "micro_batch_size to divide the 4 rows"),
    ],
)
def test_sizes_that_do_not_divide_stop_before_sampling(changes, message, experience):
    settings = dataclasses.replace(BASE, **changes)
    with pytest.raises(checks.InputError, match=message):
        ppo.sample(None, prompts=toys.prompts(width=8), key=KEY, recipe=settings)
    with pytest.raises(checks.InputError, match=message):
        ppo.update(fresh(), experience=experience, key=KEY, recipe=settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "temperature: expected a finite number above 0"),
        (
            {"continuous_batching": 0},
            "continuous_batching: expected a finite number above 0, got 0",
        ),
        ({"num_epochs": 0}, "num_epochs: expected"),
        ({"max_new_tokens": 0}, "max_new_tokens: expected a finite number above 0"),
        ({"gamma": -0.1}, "gamma: expected a number from 0 to 1, got -0.1"),
        ({"lam": 9.5}, r"lam: expected a number from 0 to 1, got 9\.5"),
        ({"vf_coef": -0.1}, "vf_coef: expected"),
        ({"value_clip_range": 0.0}, "value_clip_range: expected"),
        (
            {"whiten_advantages": "batch"},
            "expected one of 'rollout', 'minibatch', None",
        ),
        (
            {"scores": ScoreShaping(missing_stop_score=-1.0), "stop_ids": ()},
            "stop_ids to look for, got no",
        ),
        (
            {"fixed_length": FixedLength(), "stop_ids": ()},
            "fixed_length: expected stop_ids",
        ),
        (
            {
                "fixed_length": FixedLength(),
                "stop_ids": (),
                "aggregation": "prompt_mean",
            },
            r"fixed_length: expected stop_ids .*\naggregation: expected groups",
        ),
        ({"max_ratio_mean": 0.5}, "max_ratio_mean: expected a number above 1"),
        ({"stop_approxkl": 0.0}, "stop_approxkl: expected a finite number above 0"),
        ({"entropy_coef": -0.1}, "entropy_coef: expected a finite number, 0 or more"),
        ({"ptx_coef": float("nan")}, "ptx_coef: expected a finite number, 0 or more"),
        ({"aggregation": "mean"}, "aggregation: expected one of 'token_mean', 'seque"),
        ({"loss_scale_factor": 4.0}, "loss_scale_factor: expected None with aggregati"),
        (
            {"aggregation": "constant", "loss_scale_factor": -1.0},
            "loss_scale_factor: expected a finite number above 0",
        ),
        ({"whiten_ddof": 2}, "whiten_ddof: expected one of 0, 1, got 2"),
        (
            {"whiten_rewards": "minibatch", "whiten_advantages": "rollout"},
            "whiten_rewards: expected 'rollout' or None where advantages are whitened",
        ),
        (
            {
                "shared_trunk": True,
                "critic_model": dataclasses.replace(toys.GPT2, norm_eps=0.1),
            },
            "one shape of policy and critic with shared_trunk",
        ),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(checks.InputError, match=message):
        dataclasses.replace(BASE, **changes)


@pytest.mark.parametrize("shape", [(4, 1), (), (3,)])
def test_a_reward_of_another_shape(rollout, shape):
    with pytest.raises(checks.InputError, match="expected the reward to return 4 numb"):
        ppo.learn(
            fresh(),
            rollout=rollout,
            scores=jnp.zeros(shape),
            frozen=NO_MODELS,
            key=KEY,
            recipe=BASE,
        )


# It learns, and the penalty holds it back.


@pytest.fixture(scope="module")
def train(reference):
    optimizer = optax.adam(1e-2, eps=1e-5)
    settings = dataclasses.replace(
        BASE,
        num_epochs=2,
        policy_optimizer=optimizer,
        critic_optimizer=optimizer,
    )
    step = toys.jit(ppo.iteration, static_argnames=("recipe", "reward"))

    def run(kl_coef: float, num_steps: int = 15):
        current, rows = fresh(settings, controller=kl_control.fixed(kl_coef)), []
        many = toys.prompts(lengths=(4, 2, 3, 1) * 4)
        for number in range(num_steps):
            current, stats, _ = step(
                current,
                prompts=many,
                frozen=FrozenModels(reference=reference),
                reward=reward,
                key=jax.random.fold_in(KEY, number),
                recipe=settings,
            )
            rows.append(jax.device_get(masked.mean_stats(stats)))
        return rows

    return run


@pytest.mark.slow
def test_ppo_raises_the_reward_and_a_higher_penalty_holds_the_kl(train):
    free, penalised = train(0.0), train(1.0)
    scores = [row["objective/scores"] for row in free]
    assert np.mean(scores[:2]) < 0.5
    assert np.mean(scores[-5:]) > 0.8
    assert abs(free[0]["objective/kl"]) < 1e-3
    assert penalised[-1]["objective/kl"] < 0.5 * free[-1]["objective/kl"]


@pytest.mark.long
def test_an_iteration_is_the_same_on_eight_devices(reference):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    whole = NamedSharding(mesh, PartitionSpec())
    by_rows = NamedSharding(mesh, PartitionSpec("data"))
    many = toys.prompts(lengths=(4, 2, 3, 1) * 4)
    step = jax.jit(ppo.iteration, static_argnames=("recipe", "reward"))
    fixed = {"reward": reward, "key": KEY, "recipe": ITERATION}
    one = step(away(), prompts=many, frozen=FrozenModels(reference=reference), **fixed)
    eight = step(
        jax.device_put(away(), whole),
        prompts=jax.device_put(many, by_rows),
        frozen=FrozenModels(reference=jax.device_put(reference, whole)),
        **fixed,
    )
    np.testing.assert_array_equal(one[2].rollout.tokens, eight[2].rollout.tokens)
    close(one[0], eight[0], atol=1e-5)
    close(toys.means(one[1]), toys.means(eight[1]), atol=1e-5)
