"""The published details of PPO around its models: scores, rewards, values, updates.

Details that need the models are tested in test_ppo_by_hand.py.
"""

import dataclasses
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax import batch, kl_control, masked, ppo, rewards, state
from rlhf_jax.algorithms.flow import rollout, score, shaping
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient.recipe import FixedLength
from rlhf_jax.algorithms.ppo import gae_experience, recipe
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.penalty import Penalty

KEY = jax.random.key(9)
FIXED = {
    "model": toys.GPT2,
    "critic_model": toys.GPT2,
    "policy_optimizer": optax.sgd(0.1),
    "critic_optimizer": optax.sgd(0.1),
    "max_new_tokens": 8,
    "stop_ids": toys.STOP,
}
BASE = ppo.PPO(**FIXED, num_epochs=1)


def close(left, right, *, rtol=1e-4, atol=1e-5):
    np.testing.assert_allclose(left, right, rtol=rtol, atol=atol)


# --- truncation ---------------------------------------------------------------


def plain_rollout(tokens, response_mask) -> batch.Rollout:
    rows = len(tokens)
    numbers = jnp.where(response_mask, -1.0, 0.0)
    return batch.Rollout(
        tokens=jnp.asarray(tokens, jnp.int32),
        mask=jnp.ones(tokens.shape, bool),
        response_mask=jnp.asarray(response_mask),
        old_logprobs=numbers,
        entropy=-numbers,
        index=jnp.arange(rows),
        sample=jnp.zeros(rows, jnp.int32),
    )


def test_truncation_after_16_tokens_as_published():
    """Full stops (13) at 3, 15, 16 and 20 of 24 tokens; one row has none from 16 on."""
    responses = np.full((4, 24), 7)
    for row, stops in enumerate([(3, 16, 20), (20,), (3, 15), (16,)]):
        responses[row, list(stops)] = 13
    tokens = np.concatenate([np.full((4, 5), 13), responses], axis=1)  # prompts too
    whole = plain_rollout(tokens, np.arange(29)[None] >= np.full((4, 1), 5))
    short = rollout.truncate(whole, stop_ids=(13,), after=16)
    mask = np.asarray(short.response_mask)[:, 5:]
    np.testing.assert_array_equal(mask, ~oracles.oai_truncated(responses, 13, 16))
    assert mask.sum(axis=1).tolist() == [17, 21, 24, 17]
    ended = np.asarray(score.ended(short, stop_ids=(13,)))
    np.testing.assert_array_equal(ended, oracles.oai_valid(responses, 13, 16))
    shaped = shaping.shape(
        jnp.full(4, 0.5),
        moments=rewards.no_moments(),
        rollout=short,
        stop_ids=(13,),
        shaping=recipe.OPENAI_2019.scores,
    )
    np.testing.assert_array_equal(shaped, [0.5, 0.5, -1.0, 0.5])


# --- scores -------------------------------------------------------------------

SHORT = np.array(
    [[0, 0, 1, 1, 1, 0], [0, 0, 1, 0, 0, 0], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1, 0, 0]],
    bool,
)
ENDED = np.array([True, False, True, False])


@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("length_penalty", [0.0, 0.125])
@pytest.mark.parametrize(
    "missing", [{}, {"missing_stop_score": -1.0}, {"missing_stop_penalty": 2.0}]
)
def test_scores_are_normalised_clipped_charged_for_length_and_for_no_end(
    normalise, clip, length_penalty, missing
):
    """In this order; N+'s EOS trick replaces the score, TRL's subtracts from it."""
    tokens = np.full(SHORT.shape, 5)
    for row, last in enumerate(SHORT.sum(axis=1) + 1):
        tokens[row, last] = 1 if ENDED[row] else 5
    tokens[:, :2] = 1  # in the prompt it ends nothing
    scores = np.array([3.0, -0.25, 0.25, 1.0])
    moments = rewards.update_moments(rewards.no_moments(), jnp.asarray([1.0, 2.0, 9.0]))
    shaped = shaping.shape(
        jnp.asarray(scores, jnp.float32),
        moments=moments,
        rollout=plain_rollout(tokens, SHORT),
        stop_ids=(1,),
        shaping=ScoreShaping(
            normalise=normalise, clip=clip, length_penalty=length_penalty, **missing
        ),
    )
    expected = []
    for row, number in enumerate(scores):
        if normalise:
            number = (number - 4.0) / (38 / 3) ** 0.5  # of 1, 2 and 9
        if clip is not None:
            number = min(max(number, -clip), clip)
        number -= length_penalty * SHORT[row].sum()
        if not ENDED[row]:
            number = missing.get(
                "missing_stop_score", number - missing.get("missing_stop_penalty", 0.0)
            )
        expected.append(number)
    np.testing.assert_allclose(shaped, expected, rtol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, r"clip: expected .* above 0, got 0\.0"),
        ({"length_penalty": -0.1}, r"length_penalty: expected .* 0 or more, got -0\.1"),
        ({"missing_stop_penalty": -1.0}, r"missing_stop_penalty: .* 0 or more, got -1"),
        (
            {"missing_stop_penalty": 1.0, "missing_stop_score": -1.0},
            r"one of missing_stop_score and missing_stop_penalty, got -1\.0 and 1\.0",
        ),
    ],
)
def test_a_shaping_that_cannot_be(options, message):
    with pytest.raises(checks.InputError, match=message):
        ScoreShaping(**options)


def test_equal_scores_are_normalised_to_0():
    equal = jnp.full(4, 0.3, jnp.float32)
    shaped = shaping.shape(
        equal,
        moments=rewards.update_moments(rewards.no_moments(), equal),
        rollout=plain_rollout(np.full(SHORT.shape, 5), SHORT),
        stop_ids=(1,),
        shaping=ScoreShaping(normalise=True),
    )
    np.testing.assert_array_equal(shaped, 0.0)


# --- rewards, values, advantages ----------------------------------------------


def scored(*, scores, kl, values, mask) -> batch.Scored:
    tokens = np.full(mask.shape, 5)
    return batch.Scored(
        rollout=plain_rollout(tokens, mask),
        scores=jnp.asarray(scores, jnp.float32),
        values=jnp.asarray(values, jnp.float32),
        ref_logprobs=None,
        kl=jnp.asarray(kl, jnp.float32),
    )


@pytest.mark.parametrize(("ddof", "first"), [(0, 0.0508), (1, 0.1394)])
def test_whitened_rewards_of_a_rollout_have_the_published_number(ddof, first):
    """Rewards 1.2 to 2.0; with γ = λ = 1 and values 0 a return is the sum to come."""
    token_rewards = np.linspace(1.2, 2.0, 9).reshape(3, 3)
    made = gae_experience(
        scored(
            scores=np.zeros(3),
            kl=-token_rewards,
            values=np.zeros((3, 3)),
            mask=np.ones((3, 3), bool),
        ),
        kl_coef=1.0,
        gamma=1.0,
        lam=1.0,
        whiten_rewards="rollout",
        whiten_advantages=None,
        whiten_ddof=ddof,
    )
    returns = np.asarray(made.returns)
    assert returns[0, 0] - returns[0, 1] == pytest.approx(first, abs=5e-5)
    np.testing.assert_allclose(made.token_rewards, token_rewards, rtol=1e-6)
    np.testing.assert_array_equal(made.advantages, made.returns)


@pytest.mark.parametrize("whiten_rewards", [False, True])
def test_the_value_after_the_stop_as_published(whiten_rewards):
    """The score is a column after the last token, or on it if the row is full."""
    rng = np.random.default_rng(3)
    kl, values = rng.normal(size=(2, *SHORT.shape))
    scores, last = np.array([1.0, -2.0, 0.5, 3.0]), SHORT[:, 2:].sum(axis=1) - 1
    known = SHORT | np.pad(SHORT[:, :-1], ((0, 0), (1, 0)))
    made = gae_experience(
        # As `score.score` leaves them, 0 where nothing is known.
        scored(
            scores=scores,
            kl=np.where(SHORT, kl, 0.0),
            values=np.where(known, values, 0.0),
            mask=SHORT,
        ),
        kl_coef=0.05,
        gamma=1.0,
        lam=0.95,
        whiten_rewards="rollout" if whiten_rewards else None,
        whiten_advantages="rollout",
        value_after_stop=True,
    )
    advantages, returns, counted = oracles.n_plus(
        kl[:, 2:],
        scores,
        values[:, 2:],
        last,
        kl_coef=0.05,
        lam=0.95,
        whiten_rewards=whiten_rewards,
    )
    assert np.asarray(made.token_rewards)[0, 5] == 1.0  # after its last token
    assert np.asarray(made.token_rewards)[2, 5] > 0.5 - 0.2  # on it: the row is full
    assert not np.asarray(made.value_mask)[:, :2].any()
    np.testing.assert_array_equal(np.asarray(made.value_mask)[:, 2:], counted)
    assert counted.sum(axis=1).tolist() == [4, 2, 4, 3]
    close(made.advantages[:, 2:], advantages, rtol=1e-5, atol=1e-6)
    close(made.returns[:, 2:], np.where(counted, returns, 0.0), rtol=1e-5, atol=1e-6)


# --- the update, around a loss of one number ----------------------------------


def numbered(rows=4, columns=6, *, seed=0, garbage=False) -> batch.Experience:
    """Rows of several lengths, named by their tokens; the last has one more value."""
    rng = np.random.default_rng(seed)
    lengths = np.array([3, 1, 4, 2] * (rows // 4))[:, None]
    place = np.arange(columns)[None, :]
    mask = (place >= 2) & (place < 2 + lengths)
    value_mask = (place >= 2) & (place < 3 + lengths)
    under = (
        oracles.poison if garbage else (lambda x, unpadded: np.where(unpadded, x, 0.0))
    )

    def noise(unpadded):
        return jnp.asarray(under(rng.normal(size=mask.shape), unpadded), jnp.float32)

    return batch.Experience(
        tokens=jnp.asarray(np.arange(rows)[:, None] + 0 * place, jnp.int32),
        mask=jnp.asarray(mask),
        response_mask=jnp.asarray(mask),
        value_mask=jnp.asarray(value_mask),
        old_logprobs=jnp.zeros(mask.shape, jnp.float32),
        ref_logprobs=None,
        old_values=noise(value_mask),
        token_rewards=noise(value_mask),
        advantages=noise(mask),
        returns=noise(value_mask),
    )


@pytest.fixture
def calls_of_loss(monkeypatch):
    """Replaces PPO's loss and returns the list of its calls.

    Its gradient is 1 for each of two numbers, policy and critic. Its approxkl is that
    of the log-ratio policy - old_logprobs.
    """
    calls = []

    def loss(policy, critic, *, experience, num_tokens, num_values, num_responses, **_):
        jax.debug.callback(
            lambda *arguments: calls.append(jax.tree.map(np.asarray, arguments)),
            *(experience, num_tokens, num_values, num_responses),
            ordered=True,
        )
        mask = experience.response_mask
        share = mask.sum() / num_tokens
        weight = mask.sum(dtype=jnp.float32)
        moved = jax.lax.stop_gradient(policy) - experience.old_logprobs
        stats = {
            "policy/approxkl": (masked.masked_sum(0.5 * moved**2, mask=mask), weight),
            "policy/ratio_mean": (masked.masked_sum(jnp.exp(moved), mask=mask), weight),
            "policy/sampler_mismatch": (weight, weight),
        }
        return share * (policy + critic), stats

    monkeypatch.setattr("rlhf_jax.algorithms.ppo.recipe.ppo_loss", loss)
    return calls


def two_numbers(settings: ppo.PPO, *, policy=0.0) -> state.TrainState:
    return state.ppo_state(
        policy=jnp.float32(policy),
        critic=jnp.float32(0.0),
        policy_optimizer=settings.policy_optimizer,
        critic_optimizer=settings.critic_optimizer,
        kl=kl_control.fixed(0.1),
    )


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize(
    ("whiten_rewards", "whiten_advantages", "ddof"),
    [("minibatch", "minibatch", 0), ("minibatch", None, 1), (None, "minibatch", 1)],
)
def test_whitening_over_the_minibatch_runs_gae_there(
    calls_of_loss, whiten_rewards, whiten_advantages, ddof
):
    """Never over a micro-batch, and values outside the masks have no effect."""
    settings = dataclasses.replace(
        BASE,
        whiten_rewards=whiten_rewards,
        whiten_advantages=whiten_advantages,
        whiten_ddof=ddof,
        num_minibatches=2,
        micro_batch_size=1,
    )
    experience = numbered()
    ppo.update(
        two_numbers(settings),
        experience=numbered(garbage=True),
        key=KEY,
        recipe=settings,
    )
    jax.effects_barrier()
    visited = [int(part.tokens[0, 0]) for part, *_ in calls_of_loss]
    assert sorted(visited) == [0, 1, 2, 3]
    expected = {}
    for rows in (visited[:2], visited[2:]):
        part = jax.tree.map(lambda leaf, rows=rows: np.asarray(leaf)[rows], experience)
        mask, value_mask = part.response_mask, part.value_mask
        advantages, returns = part.advantages, part.returns
        if whiten_rewards:
            whitened = oracles.masked_whiten(
                part.token_rewards, value_mask, False, ddof
            )
            advantages, returns = oracles.gae(
                whitened, part.old_values, value_mask, 1.0, 0.95
            )
        if whiten_advantages:
            advantages = oracles.masked_whiten(advantages, mask, True, ddof)
        for i, row in enumerate(rows):
            expected[row] = (
                advantages[i][mask[i]],
                returns[i][value_mask[i]],
                (mask.sum(), value_mask.sum(), 2),  # of the minibatch
            )
    for row, (part, *counts) in zip(visited, calls_of_loss, strict=True):
        advantages, returns, sizes = expected[row]
        mask, value_mask = part.response_mask[0], part.value_mask[0]
        close(part.advantages[0][mask], advantages, rtol=1e-4, atol=1e-5)
        close(part.returns[0][value_mask], returns, rtol=1e-4, atol=1e-5)
        assert tuple(counts) == sizes


def test_updates_end_with_the_approximate_kl(calls_of_loss):
    """Steps of 0.1: ½(0.4)² = 0.08 is the first above 0.05, before the fifth step."""
    settings = dataclasses.replace(
        BASE, num_epochs=4, num_minibatches=2, stop_approxkl=0.05
    )
    start, experience = two_numbers(settings), numbered()
    after, stats = ppo.update(start, experience=experience, key=KEY, recipe=settings)
    jax.effects_barrier()
    assert (
        len(calls_of_loss) == 5
    )  # the fifth is looked at and left out, the others do not run
    assert float(after.policy) == pytest.approx(-0.4)
    assert float(after.critic) == pytest.approx(-0.4)
    assert int(after.step) == 1
    means = masked.mean_stats(stats)
    assert float(means["update/stopped"]) == pytest.approx(4 / 8)
    per_step = [0.0, 0.005, 0.02, 0.045, 0.08]
    tokens = [int(part.response_mask.sum()) for part, *_ in calls_of_loss]
    mean = np.dot(per_step, tokens) / np.sum(tokens)
    assert float(means["policy/approxkl"]) == pytest.approx(mean, rel=1e-5)
    # The next batch starts again, with the log-probs that it was sampled with.
    own = dataclasses.replace(experience, old_logprobs=experience.old_logprobs - 0.4)
    again, _ = ppo.update(after, experience=own, key=KEY, recipe=settings)
    assert float(again.policy) == pytest.approx(-0.8)
    assert float(again.critic) == pytest.approx(-0.8)


def test_a_minibatch_of_a_large_mean_ratio_is_left_out_alone(calls_of_loss):
    """Of the four rows one was sampled with log-probs 3 lower: e³ = 20 is above 10."""
    settings = dataclasses.replace(BASE, num_minibatches=4, max_ratio_mean=10.0)
    experience = numbered()
    lower = experience.old_logprobs - 3.0 * (jnp.arange(4)[:, None] == 2)
    after, stats = ppo.update(
        two_numbers(settings),
        experience=dataclasses.replace(experience, old_logprobs=lower),
        key=KEY,
        recipe=settings,
    )
    assert len(calls_of_loss) == 4
    assert float(after.policy) == pytest.approx(-0.3)
    assert float(after.critic) == pytest.approx(-0.3)
    assert int(after.skipped) == 0
    assert float(masked.mean_stats(stats)["update/guarded"]) == 0.25
    assert "update/stopped" not in stats


def test_norms_of_gradients_are_those_before_clipping(monkeypatch):
    """The loss ½Σθ² has the gradient θ; steps of length 0.5 and 0.25 shorten it.

    The logged norm is the mean over minibatches; a supervised update has only one.
    """

    def loss(policy, critic, *, experience, num_tokens, **_):
        weight = experience.response_mask.sum(dtype=jnp.float32)
        squares = sum(jnp.sum(x**2) for x in jax.tree.leaves((policy, critic)))
        mean = {"policy/sampler_mismatch": (weight, weight)}
        return weight / num_tokens * squares / 2, mean

    monkeypatch.setattr("rlhf_jax.algorithms.ppo.recipe.ppo_loss", loss)

    def steps_of(length):
        return optax.chain(optax.clip_by_global_norm(length), optax.sgd(1.0))

    settings = dataclasses.replace(
        BASE,
        num_minibatches=2,
        micro_batch_size=1,
        policy_optimizer=steps_of(0.5),
        critic_optimizer=steps_of(0.25),
    )
    own = {"a": jnp.array([3.0, -4.0]), "b": jnp.array([[12.0]])}  # of length 13
    start = state.ppo_state(
        policy=own,
        critic=jnp.array([2.0, -1.0, 2.0]),  # of length 3
        policy_optimizer=settings.policy_optimizer,
        critic_optimizer=settings.critic_optimizer,
        kl=kl_control.fixed(0.1),
    )
    after, stats = ppo.update(start, experience=numbered(), key=KEY, recipe=settings)
    means = masked.mean_stats(stats)
    assert float(means["policy/grad_norm"]) == pytest.approx((13 + 12.5) / 2)
    assert float(means["critic/grad_norm"]) == pytest.approx((3 + 2.75) / 2)
    close(after.policy["a"], 12 / 13 * np.array([3, -4]))
    supervised = state.supervised_state(own, optimizer=steps_of(0.5))
    after, stats = state.supervised_step(supervised, own, {}, optimizer=steps_of(0.5))
    assert float(stats["update/grad_norm"][0]) == pytest.approx(13)
    close(after.params["a"], 12.5 / 13 * np.array([3, -4]))


@pytest.mark.slow
def test_the_critic_is_warmed_up_alone(calls_of_loss):
    adam = optax.adam(0.5)
    settings = dataclasses.replace(
        BASE, policy_optimizer=adam, critic_optimizer=adam, critic_warmup=2
    )
    current = two_numbers(settings)
    took = []
    for _ in range(3):
        before = jax.tree.map(jnp.copy, current)
        current, _ = ppo.update(
            current, experience=numbered(), key=KEY, recipe=settings
        )
        took.append(
            (
                toys.leaves_equal(before.policy, current.policy)
                and toys.leaves_equal(before.policy_opt, current.policy_opt),
                float(before.critic - current.critic),
            )
        )
    # Adam's first step is 0.5 whatever the gradient, and the policy's first is its own.
    assert [still for still, _ in took] == [True, True, False]
    assert [moved for _, moved in took] == pytest.approx([0.5, 0.5, 0.5], abs=1e-3)
    assert float(current.policy) == pytest.approx(-0.5, abs=1e-3)
    assert int(current.policy_opt[0].count) == 1
    assert int(current.critic_opt[0].count) == 3


# --- what cannot be, and what is told ------------------------------------------


def test_texts_and_their_coefficient_come_together():
    mixed = dataclasses.replace(BASE, ptx_coef=27.8, num_minibatches=2)
    tokens = jnp.zeros((3, 5), jnp.int32)
    texts = batch.Sequences(tokens, tokens == 0, tokens == 0)
    for settings, ptx, message in (
        (mixed, None, "ptx texts if, and only if, ptx_coef is above 0, got none"),
        (BASE, texts, "ptx texts if, and only if, ptx_coef is above 0, got some"),
        (mixed, texts, "num_minibatches to divide the 3 rows of ptx, got 2"),
    ):
        with pytest.raises(checks.InputError, match=message):
            ppo.update(
                two_numbers(settings),
                experience=numbered(),
                key=KEY,
                recipe=settings,
                ptx=ptx,
            )


def test_a_penalty_that_is_no_kl_is_told_once():
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        ppo.PPO(**FIXED)
        dataclasses.replace(BASE, num_epochs=2)
        assert not warned
        penalty = Penalty(placement="loss")
        assert not warned  # of no use before there is an algorithm to use it
        ppo.PPO(**FIXED, penalty=penalty)
    assert len(warned) == 1
    assert "its expected gradient is zero" in str(warned[0].message)
    assert "'token_mean' divides the sum over a response" in str(warned[0].message)
    assert warned[0].filename == __file__
    with pytest.warns(UserWarning, match="not that of a KL: it is fixed-state forward"):
        ppo.PPO(
            **FIXED,
            penalty=Penalty(value_estimator="k3", placement="loss", per="length"),
        )


@pytest.mark.parametrize(
    ("options", "bias"),
    [
        ({}, "'token_mean' divides the sum .* by .* tokens of its minibatch: where"),
        ({"aggregation": "sequence_mean"}, "'sequence_mean' divides .* its own tokens"),
        ({"aggregation": "constant"}, None),
        ({"stop_ids": ()}, None),  # every response has one length
        ({"fixed_length": FixedLength(reward_only=True)}, None),  # as trained
    ],
)
def test_the_warning_names_the_bias_of_a_mean(options, bias):
    with pytest.warns(UserWarning, match="its expected gradient is zero") as warned:
        recipe = ppo.PPO(**{**FIXED, **options}, penalty=Penalty(placement="loss"))
    text = str(warned[0].message)
    assert ("; aggregation" in text) == (bias is not None)
    assert bias is None or re.search(bias, text)
    assert (recipe.length_bias is None) == (bias is None)


def test_a_constant_is_the_longest_response_unless_it_is_given():
    assert ppo.PPO(**FIXED).loss_scale is None
    constant = ppo.PPO(**FIXED, aggregation="constant")
    assert constant.loss_scale == FIXED["max_new_tokens"] == 8
    assert dataclasses.replace(constant, loss_scale_factor=1.5).loss_scale == 1.5


def test_a_truncation_that_no_token_could_make():
    ppo.PPO(**FIXED, fixed_length=FixedLength(7))
    message = "truncate_after: expected a number below 8, got 8"
    with pytest.raises(checks.InputError, match=message):
        ppo.PPO(**FIXED, fixed_length=FixedLength(8))
