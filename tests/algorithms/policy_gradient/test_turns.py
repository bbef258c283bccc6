"""Several turns: observed tokens have no weight, and gradients equal those of loops."""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toy_turns
import toys
from toy_turns import AFTER, MASK, OBSERVATIONS, SAMPLED, UNREAD

from rlhf_jax import critic, frozen, grpo, kl_control, policy, ppo, rewards, state
from rlhf_jax.algorithms import flow
from rlhf_jax.algorithms.flow import objective, score
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient import loss as policy_loss
from rlhf_jax.algorithms.policy_gradient.corrections import Recompute
from rlhf_jax.algorithms.policy_gradient.iteration import make_experience
from rlhf_jax.algorithms.policy_gradient.recipe import CISPO, SAPO, Clip, FixedLength
from rlhf_jax.algorithms.policy_gradient.update import minibatches
from rlhf_jax.algorithms.ppo import loss as value_loss
from rlhf_jax.algorithms.reinforce import REINFORCE
from rlhf_jax.data import layouts
from rlhf_jax.data.layouts.arrays import Form
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_LOSS, Penalty
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels, Further
from rlhf_jax.roles.rewards.scores import RunningMoments

KL_COEF = 0.3
KEY = jax.random.key(9)
SHAPE = {
    "model": toys.GPT2,
    "policy_optimizer": optax.sgd(0.1),
    "max_new_tokens": toy_turns.SIZE,
    "stop_ids": toys.STOP,
}
VALUED = SHAPE | {"critic_model": toys.GPT2, "critic_optimizer": optax.sgd(0.1)}
GROUP = SHAPE | {"group_size": 2}
EXACT = Penalty(value_estimator="exact", placement="both")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of penalties that are no KL
    RECIPES = {
        "PPO": ppo.PPO(**VALUED, gamma=0.9, lam=0.8, entropy_coef=0.1),
        "PPO, exact KL": ppo.PPO(**VALUED, penalty=EXACT, whiten_rewards="rollout"),
        "PPO, k2 of responses": ppo.PPO(
            **VALUED, penalty=Penalty("k2", placement="both", per="response")
        ),
        "N+": ppo.PPO(**VALUED, value_after_stop=True, whiten_advantages="minibatch"),
        "N+, exact KL": ppo.PPO(
            **VALUED,
            value_after_stop=True,
            penalty=EXACT,
            num_epochs=1,
            sampler_correction=Recompute(),
        ),
        "GRPO": grpo.GRPO(**GROUP, penalty=IN_LOSS, normalise="group"),
        "GRPO, forward KL": grpo.GRPO(
            **GROUP,
            penalty=Penalty(
                "k3", placement="loss", direction="forward", importance_weights="prefix"
            ),
            aggregation="sequence_mean",
        ),
        "RLOO": grpo.GRPO(
            **GROUP, baseline="leave_one_out", normalise=None, aggregation="prompt_mean"
        ),
        "REINFORCE++": REINFORCE(**SHAPE),
        "GSPO": grpo.GRPO(
            **GROUP, surrogate=Clip(ratio_level="sequence"), aggregation="constant"
        ),
        "GSPO-token": grpo.GRPO(**GROUP, surrogate=Clip(ratio_level="sequence_token")),
        "CISPO": grpo.GRPO(**GROUP, surrogate=CISPO(), normalise="rollout"),
        "SAPO": grpo.GRPO(**GROUP, surrogate=SAPO()),
    }


@pytest.fixture
def stubbed(monkeypatch):
    """Losses whose stub models return their parameters."""

    class Texts:
        mask, tokens, first_column, packing = MASK, None, 0, None

        def hidden_states(self, params, *, model):
            return jnp.zeros(())

        def padded(self, x):
            return x

    monkeypatch.setattr(policy_loss, "texts_of", lambda *_, **__: Texts())
    monkeypatch.setattr(
        policy_loss,
        "logprobs_from_hidden",
        lambda params, *_, **__: (params["logprobs"], params["entropy"]),
    )
    monkeypatch.setattr(
        policy_loss, "_exact_kl", lambda params, *_, **__: params["exact"]
    )
    monkeypatch.setattr(value_loss, "values", lambda params, **_: params["values"])


def sampled_alone(*, observed: float = 0.0, values_after: bool = False):
    """Parameters of the stub models, with numbers at observed tokens too."""
    rng = np.random.default_rng(4)
    numbers = {}
    for name in ("logprobs", "entropy", "exact", "values"):
        numbers[name] = rng.normal(-1.0, 0.7, MASK.shape)
        valued = AFTER & (name == "values") & values_after
        numbers[name] = np.where(OBSERVATIONS & ~valued, observed, numbers[name])
    return {name: toys.array(x) for name, x in numbers.items()}


def gradient_of(recipe, scored, params):
    """((loss, stats), gradient) of an experience of all rows."""
    made, _ = recipe.experience(scored, kl_coef=jnp.float32(KL_COEF))
    minibatch, loss = recipe.minibatch_loss(
        made, kl_coef=jnp.float32(KL_COEF), frozen=NO_MODELS
    )
    return jax.value_and_grad(lambda p: loss((p, p), minibatch), has_aux=True)(params)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("name", RECIPES)
def test_observed_tokens_have_no_weight_in_any_term(stubbed, name):
    """Other ids, and 1e9 in all values about them, leave the loss equal to the bit."""
    recipe, after = RECIPES[name], {"values_after": name.startswith("N+")}
    expected = gradient_of(recipe, toy_turns.scored(**after), sampled_alone(**after))
    mutated = toy_turns.scored(observed=1e9, observed_seed=5, **after)
    assert (np.asarray(mutated.rollout.tokens) != toy_turns.tokens()).any()
    output = gradient_of(recipe, mutated, sampled_alone(observed=-1e9, **after))
    assert toys.leaves_equal(output, expected)
    (loss, _), gradient = output
    assert float(loss) != 0
    moved = {name: np.asarray(x) != 0 for name, x in gradient.items()}
    assert moved["logprobs"][SAMPLED].any()
    moved["values"] &= ~(AFTER & after["values_after"])
    for of_one in moved.values():
        assert not (of_one & ~SAMPLED).any()


def test_one_more_sampled_token_would_weigh(stubbed):
    """The comparison of the test above detects a changed mask."""
    recipe = RECIPES["GRPO"]
    mutated = toy_turns.scored()
    wider = dataclasses.replace(mutated.rollout, response_mask=SAMPLED | OBSERVATIONS)
    output = gradient_of(
        recipe, dataclasses.replace(mutated, rollout=wider), sampled_alone()
    )
    expected = gradient_of(recipe, mutated, sampled_alone())
    assert not toys.leaves_equal(output, expected)


@functools.cache
def models():
    """Models with small parameters, so that rounding of gradients is below 1e-6."""
    own, other = (toys.params(seed=seed, scale=0.15) for seed in (0, 3))
    return own, toys.scorer(), toys.freeze(other)


def fresh(recipe):
    policy_params, critic_params, _ = models()
    train = {
        "policy": jax.tree.map(jnp.copy, policy_params),
        "policy_optimizer": recipe.policy_optimizer,
        "kl": kl_control.fixed(KL_COEF),
    }
    if recipe.critic is None:
        return state.grpo_state(**train)
    valued = jax.tree.map(jnp.copy, critic_params)
    return state.ppo_state(
        **train, critic=valued, critic_optimizer=recipe.critic_optimizer
    )


@functools.partial(toys.jit, static_argnames=("recipe",))
def learned(rollout, scores, *, recipe):
    """Loss, gradient and stats as in a run, and the experience."""
    _, critic_params, reference = models()
    start = fresh(recipe)
    _, made, stats, scored = make_experience(
        start,
        rollout=rollout,
        scores=scores,
        frozen=FrozenModels(reference=reference),
        recipe=recipe,
    )
    minibatch, loss = recipe.minibatch_loss(
        made, kl_coef=jnp.float32(KL_COEF), frozen=FrozenModels(reference=reference)
    )
    of_loss = jax.value_and_grad(loss, has_aux=True)(
        (start.policy, critic_params), minibatch
    )
    return of_loss, made, stats, scored


def of_turns():
    totals, early = toy_turns.rewards()
    return rewards.Scores(jnp.asarray(totals), turns=jnp.asarray(early))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["PPO", "PPO, exact KL", "N+", "GRPO", "REINFORCE++", "GSPO", "CISPO"]
)
def test_what_no_sampled_token_follows_changes_nothing_through_the_models(name):
    """Policy, reference, critic, rewards and losses are equal to the bit."""
    recipe = RECIPES[name]
    rollout = toy_turns.rollout(models()[0])
    other = np.where(UNREAD, 3 + (toy_turns.tokens() + 4) % 10, toy_turns.tokens())
    assert (other != toy_turns.tokens()).sum() > 1
    mutated = dataclasses.replace(rollout, tokens=toys.array(other, np.int32))
    (expected, made, *_), (output, again, *_) = (
        learned(episodes, of_turns(), recipe=recipe) for episodes in (rollout, mutated)
    )
    assert toys.leaves_equal(output, expected)
    for field in ("advantages", "token_rewards"):
        assert toys.leaves_equal(getattr(again, field), getattr(made, field))


@pytest.mark.slow
def test_what_sampled_tokens_follow_is_their_context():
    """Earlier log-probs stay equal to the bit; later ones change."""
    arrays = {"model": toys.GPT2, "mask": toys.array(MASK, bool), "temperature": 0.7}
    logprobs = toys.jit(policy.logprobs, static_argnames=("model", "temperature"))
    output, other = (
        np.asarray(logprobs(models()[0], tokens=toys.array(tokens, np.int32), **arrays))
        for tokens in (toy_turns.tokens(), toy_turns.tokens(observed_seed=5))
    )
    behind = np.cumsum(OBSERVATIONS, axis=1) > 0
    np.testing.assert_array_equal(output[SAMPLED & ~behind], other[SAMPLED & ~behind])
    assert (output[SAMPLED & behind] != other[SAMPLED & behind]).all()


def episode_of(row: int) -> list[int]:
    """The columns of the sampled tokens, in order."""
    return [column for column in range(MASK.shape[1]) if SAMPLED[row, column]]


def close(output, expected):
    """Whether gradients agree within 1e-6, relative to the largest entry if above 1."""
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert 0.1 < largest < 10
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=1e-6 * max(1, largest)
        ),
        output,
        expected,
    )


def log_of(logits, token: int, *, temperature: float):
    scaled = logits / temperature
    return scaled[token] - jax.scipy.special.logsumexp(scaled)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_the_gradient_of_ppo_is_that_of_a_loop_over_turns():
    """The loop implements rewards, GAE and both losses token by token."""
    gamma, lam, temperature, clip = 0.9, 0.8, 0.7, 0.2
    recipe = ppo.PPO(
        **VALUED,
        gamma=gamma,
        lam=lam,
        temperature=temperature,
        surrogate=Clip(clip),
        value_clip_range=clip,
        whiten_advantages="rollout",
    )
    policy_params, critic_params, reference = models()
    rollout = toy_turns.rollout(policy_params)
    tokens, old = np.asarray(rollout.tokens), np.asarray(rollout.old_logprobs)
    inputs = {"tokens": rollout.tokens, "mask": rollout.mask}
    (loss, gradient), *_ = learned(rollout, of_turns(), recipe=recipe)

    ref_logits = np.asarray(
        toys.logits(frozen.read(reference), model=toys.GPT2, **inputs), np.float64
    )
    old_values = np.asarray(
        critic.values(critic_params, model=toys.GPT2, **inputs), np.float64
    )
    totals, early = toy_turns.rewards()
    advantages, returns = np.zeros(MASK.shape), np.zeros(MASK.shape)
    for row in range(len(MASK)):
        ahead, value_ahead = 0.0, 0.0
        left = float(totals[row]) - float(early[row].sum())
        for column in reversed(episode_of(row)):
            ref = oracles.log_softmax(ref_logits[row, column - 1], temperature)
            kl = float(old[row, column]) - ref[tokens[row, column]]
            reward = left + float(early[row, column]) - KL_COEF * kl
            left = 0.0
            value = old_values[row, column]
            ahead = reward + gamma * value_ahead - value + gamma * lam * ahead
            value_ahead = value
            advantages[row, column], returns[row, column] = ahead, ahead + value
    whitened = oracles.masked_whiten(advantages, SAMPLED)

    def by_hand(params):
        logits = policy.logits(params[0], model=toys.GPT2, **inputs)
        values = critic.values(params[1], model=toys.GPT2, **inputs)
        total, count = 0.0, int(SAMPLED.sum())
        for row in range(len(MASK)):
            for column in episode_of(row):
                logprob = log_of(
                    logits[row, column - 1],
                    tokens[row, column],
                    temperature=temperature,
                )
                ratio = jnp.exp(logprob - old[row, column])
                advantage = whitened[row, column]
                total -= jnp.minimum(
                    ratio * advantage, jnp.clip(ratio, 1 - clip, 1 + clip) * advantage
                )
                value, was = values[row, column], old_values[row, column]
                near = jnp.clip(value, was - clip, was + clip)
                target = returns[row, column]
                squares = jnp.maximum((value - target) ** 2, (near - target) ** 2)
                total += recipe.vf_coef * 0.5 * squares
        return total / count

    expected, slope = toys.jit(jax.value_and_grad(by_hand))(
        (policy_params, critic_params)
    )
    np.testing.assert_allclose(loss[0], expected, rtol=0, atol=1e-6)
    close(gradient, slope)


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compilation")
def test_the_gradient_of_grpo_is_that_of_a_loop_over_turns():
    """Groups of two whole episodes, k3 in the loss, and the mean over each episode."""
    temperature, clip = 1.0, 0.2
    recipe = grpo.GRPO(
        **GROUP,
        penalty=IN_LOSS,
        temperature=temperature,
        surrogate=Clip(clip),
        normalise="group",
        aggregation="sequence_mean",
    )
    policy_params, _, reference = models()
    rollout = toy_turns.rollout(policy_params)
    tokens, old = np.asarray(rollout.tokens), np.asarray(rollout.old_logprobs)
    inputs = {"tokens": rollout.tokens, "mask": rollout.mask}
    (loss, (gradient, _)), *_ = learned(rollout, of_turns(), recipe=recipe)
    ref_logits = np.asarray(
        toys.logits(frozen.read(reference), model=toys.GPT2, **inputs), np.float64
    )
    totals, _ = toy_turns.rewards()
    of_rows = oracles.group_relative(totals, 2, normalise=True)

    def by_hand(params):
        logits = policy.logits(params, model=toys.GPT2, **inputs)
        total = 0.0
        for row in range(len(MASK)):
            episode = 0.0
            for column in episode_of(row):
                token = tokens[row, column]
                logprob = log_of(
                    logits[row, column - 1], token, temperature=temperature
                )
                ratio = jnp.exp(logprob - old[row, column])
                clipped = jnp.clip(ratio, 1 - clip, 1 + clip)
                gain = jnp.minimum(ratio * of_rows[row], clipped * of_rows[row])
                ref = oracles.log_softmax(ref_logits[row, column - 1], temperature)
                x = logprob - ref[token]
                episode += KL_COEF * penalty_of(x) - gain
            total += episode / len(episode_of(row))
        return total / len(MASK)

    def penalty_of(x):
        """IN_LOSS has the value of k1 and the gradient of k2."""
        return x**2 / 2 + jax.lax.stop_gradient(x - x**2 / 2)

    expected, slope = toys.jit(jax.value_and_grad(by_hand))(policy_params)
    np.testing.assert_allclose(loss[0], expected, rtol=0, atol=1e-6)
    close(gradient, slope)


def in_shared_prompts(rollout):
    """Gives all rows of a group the prompt of its first row."""
    tokens, mask = np.array(rollout.tokens), np.array(rollout.mask)
    for array in (tokens, mask):
        array[:, : toy_turns.PROMPT] = np.repeat(
            array[::2, : toy_turns.PROMPT], 2, axis=0
        )
    return dataclasses.replace(
        rollout, tokens=toys.array(tokens, np.int32), mask=toys.array(mask, bool)
    )


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "group_size"), [("N+, exact KL", 1), ("GRPO", 2), ("GSPO", 1)]
)
def test_packed_rows_give_the_numbers_of_padded_ones(name, group_size):
    """Packed rows include observed tokens, and responses may share their prompt."""
    recipe = RECIPES[name]
    rollout = in_shared_prompts(toy_turns.rollout(models()[0]))
    columns = MASK.shape[1]
    form = Form(
        rows=len(MASK),
        num_minibatches=1,
        max_new_tokens=toy_turns.SIZE,
        width=18,
        columns=columns,
        after_stop=recipe.critic is not None and recipe.critic.after_stop,
        group_size=group_size,
    )
    lengths = np.asarray(layouts.spans(rollout))
    order = np.asarray(minibatches(ppo.shuffle_key(KEY), rows=len(MASK), recipe=recipe))
    packed = layouts.Packer(form, sample=lengths)(lengths, order, columns=columns)
    assert packed is not None
    start = fresh(recipe)
    learn = toys.jit(ppo.learn, static_argnames=("recipe",))
    (expected, stats, scored), (output, packed_stats, again) = (
        learn(
            start,
            rollout=rollout,
            scores=of_turns(),
            frozen=FrozenModels(reference=models()[2]),
            key=KEY,
            recipe=recipe,
            packing=rows,
        )
        for rows in (None, packed)
    )
    for field in ("values", "ref_logprobs", "kl"):
        mine, other = getattr(again, field), getattr(scored, field)
        assert (mine is None) == (other is None)
        if mine is not None:
            np.testing.assert_allclose(mine, other, atol=1e-5)
    for key, value in stats.items():
        np.testing.assert_allclose(
            packed_stats[key][0], value[0], rtol=1e-4, atol=1e-5, err_msg=key
        )
    moves, padded_moves = (
        jax.tree.map(jnp.subtract, (after.policy, after.critic), before)
        for after in (output, expected)
        for before in [(start.policy, start.critic)]
    )
    largest = max(float(jnp.abs(x).max()) for x in jax.tree.leaves(padded_moves))
    assert largest > 1e-3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * largest),
        moves,
        padded_moves,
    )


def test_rewards_to_go_leave_out_turns_that_are_over():
    scored = dataclasses.replace(toy_turns.scored(), kl=None)
    plain = dataclasses.replace(RECIPES["REINFORCE++"], whiten_advantages=False)
    made, _ = plain.experience(scored, kl_coef=jnp.float32(0.0))
    totals, early = toy_turns.rewards()
    for row in range(len(MASK)):
        gone = 0.0
        for column in episode_of(row):
            expected = totals[row] - gone
            assert float(made.advantages[row, column]) == pytest.approx(
                expected, abs=1e-5
            )
            gone += early[row, column]
    assert not np.asarray(made.advantages)[~SAMPLED].any()


def test_groups_compare_whole_episodes_however_turns_share_their_reward():
    """Equal totals compare equal, although 0.1 + 0.2 + 0.7 is not 1 in float32."""
    totals = jnp.asarray([1.0, 1.0, 1.0, 0.0, 1.0, 1.0])
    _, early = toy_turns.rewards()
    scored = dataclasses.replace(
        toy_turns.scored(), scores=totals, kl=None, turn_rewards=jnp.asarray(early)
    )
    made, stats = RECIPES["GRPO"].experience(scored, kl_coef=jnp.float32(0.0))
    equal, count = stats["group/equal_fraction"]
    assert (float(equal), float(count)) == (2, 3)
    assert not np.asarray(made.advantages)[[0, 1, 4, 5]].any()
    assert np.asarray(made.advantages)[2:4][SAMPLED[2:4]].all()
    np.testing.assert_allclose(made.token_rewards.sum(axis=1), totals, atol=1e-6)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("baseline", ["group", "leave_one_out"])
def test_an_episode_that_never_began_is_none_of_its_group(baseline):
    """Rows 0 to 2 and 3 to 5 are groups; row 1 has no token."""
    scored = dataclasses.replace(
        toy_turns.scored(), kl=None, scores=toys.array([1.0, 0.0, 4.0, 2.0, 0.0, 5.0])
    )
    begun = np.arange(6) != 1
    rollout = dataclasses.replace(
        scored.rollout,
        response_mask=toys.array(SAMPLED & begun[:, None], bool),
        index=toys.array(np.arange(6) // 3, np.int32),
    )
    scored = dataclasses.replace(
        scored,
        rollout=rollout,
        turn_rewards=jnp.zeros_like(scored.turn_rewards),
        row_mask=jnp.asarray(begun),
    )
    recipe = grpo.GRPO(**SHAPE, group_size=3, baseline=baseline, normalise=None)
    made, group_stats = recipe.experience(scored, kl_coef=jnp.float32(0.0))
    of_rows = np.where(made.response_mask, made.advantages, 0).max(axis=1) + np.where(
        made.response_mask, made.advantages, 0
    ).min(axis=1)
    expected = {
        "group": [-1.5, 0, 1.5, 2 - 7 / 3, -7 / 3, 5 - 7 / 3],
        "leave_one_out": [-3, 0, 3, 2 - 5 / 2, -7 / 2, 4],
    }[baseline]
    np.testing.assert_allclose(of_rows, expected, atol=1e-6)
    stats = objective.objective_stats(
        scored, kl_coef=jnp.float32(0.1), ended=jnp.ones(6, bool)
    )
    assert tuple(map(float, stats["objective/scores"])) == (12, 5)
    assert tuple(map(float, stats["response/eos_fraction"])) == (5, 5)
    spread = np.std([1, 4], ddof=1) + np.std([2, 0, 5], ddof=1)
    np.testing.assert_allclose(group_stats["group/std"], (spread, 2), rtol=1e-6)
    # Of a group of which one episode began there is no deviation.
    begun = jnp.asarray(np.isin(np.arange(6), [0, 3, 4, 5]))
    rollout = dataclasses.replace(
        rollout, response_mask=jnp.asarray(SAMPLED, bool) & begun[:, None]
    )
    alone = dataclasses.replace(scored, rollout=rollout, row_mask=begun)
    _, group_stats = recipe.experience(alone, kl_coef=jnp.float32(0.0))
    spread = np.std([2, 0, 5], ddof=1)
    np.testing.assert_allclose(group_stats["group/std"], (spread, 1), rtol=1e-6)


@pytest.mark.slow
def test_an_episode_that_never_began_is_in_no_moment():
    recipe, scores = RECIPES["GRPO"], of_turns()
    rollout = toy_turns.rollout()
    begun = np.arange(6) != 1
    state, *_ = make_experience(
        fresh(recipe),
        rollout=dataclasses.replace(
            rollout, response_mask=toys.array(SAMPLED & begun[:, None], bool)
        ),
        scores=dataclasses.replace(
            scores, turns=jnp.zeros_like(scores.turns), left_out=jnp.asarray(~begun)
        ),
        frozen=NO_MODELS,
        recipe=recipe,
    )
    counted = np.asarray(scores.total)[begun]
    assert float(state.scores.count) == 5
    np.testing.assert_allclose(state.scores.mean, counted.mean(), rtol=1e-6)
    np.testing.assert_allclose(state.scores.variance, counted.var(), rtol=1e-5)


@pytest.mark.slow
def test_an_episode_that_never_began_is_in_no_mean_of_the_kl(monkeypatch):
    """Exact KL, also to a further reference; row 1 of six has no token."""
    begun = toys.array(SAMPLED & (np.arange(6) != 1)[:, None], bool)
    rollout = dataclasses.replace(toy_turns.rollout(), response_mask=begun)
    old = rollout.old_logprobs
    exact = jnp.where(begun, 0.5, 0.0)
    monkeypatch.setattr(score, "_exact_kl", lambda *_, **__: (exact, old))
    options = {
        "model": toys.GPT2,
        "max_new_tokens": toy_turns.SIZE,
        "temperature": 1.0,
        "penalty": EXACT,
    }
    scored = score.score(
        rollout,
        scores=jnp.zeros(6),
        reference=models()[2],
        row_mask=begun.any(axis=1),
        **options,
    )
    beside = {"far": Further(models()[2], old - 0.25, 0.0)}
    scored, _ = flow.objective.add_further(scored, further=beside, **options)
    for name, nats in (("exact", 0.5), ("far", 0.25)):
        total, count = scored.kl_stats[f"objective/kl_{name}"]
        assert float(count) == 5
        assert float(total) == pytest.approx(nats * float(begun.sum()), rel=1e-5)


def test_only_the_state_after_the_last_turn_has_a_value():
    output = score.value_mask(toy_turns.rollout(), after_stop=True)
    expected = SAMPLED.copy()
    for row, last in enumerate(toy_turns.LAST):
        if last + 1 < MASK.shape[1]:
            expected[row, last + 1] = True
    np.testing.assert_array_equal(output, expected)


def test_statistics_count_turns_and_what_was_observed():
    stats = objective.objective_stats(
        toy_turns.scored(), kl_coef=jnp.float32(0.1), ended=jnp.ones(6, bool)
    )
    for name, expected in {
        "response/turns": sum(toy_turns.TURNS),
        "response/observed": sum(toy_turns.OBSERVED),
        "response/length": SAMPLED.sum(),
    }.items():
        assert float(stats[name][0]) == expected
    alone = dataclasses.replace(toy_turns.scored(), turn_rewards=None, turn_ends=None)
    without_turns = objective.objective_stats(
        alone, kl_coef=jnp.float32(0.1), ended=jnp.ones(6, bool)
    )
    assert stats.keys() - without_turns.keys() == {
        "response/turns",
        "response/observed",
    }


def test_a_turn_that_observes_nothing_is_a_turn():
    """It ends where the next one begins, so there is no gap between them."""
    ends = toy_turns.TURN_ENDS.copy()
    ends[2, toy_turns.PROMPT + 1] = True  # "a b" and "a E" of "a b a E"
    scored = dataclasses.replace(toy_turns.scored(), turn_ends=jnp.asarray(ends))
    stats = objective.objective_stats(
        scored, kl_coef=jnp.float32(0.1), ended=jnp.ones(6, bool)
    )
    assert float(stats["response/turns"][0]) == sum(toy_turns.TURNS) + 1


@pytest.mark.parametrize(
    ("shaping", "total", "shares"),
    [
        # Of 2, 2 and 2 each is half with a total of 3, so that the last is 1, too.
        (ScoreShaping(clip=3.0), 3.0, [1.0, 1.0]),
        (ScoreShaping(clip=9.0), 6.0, [2.0, 2.0]),
        # Less a third of the mean of 4.5, over the deviation of 1.5.
        (ScoreShaping(normalise=True), 1.0, [1 / 3, 1 / 3]),
        (ScoreShaping(normalise=True, clip=0.5), 0.5, [1 / 6, 1 / 6]),
        # What replaces the score replaces all that it was made of.
        (ScoreShaping(missing_stop_score=-1.0), -1.0, [0.0, 0.0]),
        (ScoreShaping(missing_stop_penalty=1.0), 5.0, [2.0, 2.0]),
    ],
)
def test_turns_have_their_shares_of_the_shaped_score(shaping, total, shares):
    """Three turns worth 2 each in row 3, which has no stop token."""
    rollout = toy_turns.rollout()
    at = np.flatnonzero(toy_turns.TURN_ENDS[3])
    tokens = np.array(rollout.tokens)
    tokens[3, at[-1]] = 9
    rollout = dataclasses.replace(rollout, tokens=jnp.asarray(tokens))
    turns = np.zeros(SAMPLED.shape, np.float32)
    turns[3, at[:-1]] = 2.0
    scores = jnp.asarray([0.0, 0.0, 0.0, 6.0, 0.0, 0.0])
    zero = jnp.float32(0.0)
    options = {
        "moments": RunningMoments(
            jnp.float32(9.0), jnp.float32(4.5), zero, jnp.float32(2.25), zero
        ),
        "rollout": rollout,
        "stop_ids": toys.STOP,
        "shaping": shaping,
    }
    assert float(flow.shaping.shape(scores, **options)[3]) == pytest.approx(total)
    shaped = flow.shaping.shape_turns(
        jnp.asarray(turns),
        ends=jnp.asarray(toy_turns.TURN_ENDS),
        scores=scores,
        **options,
    )
    np.testing.assert_allclose(shaped[3, at[:-1]], shares, rtol=1e-6)
    assert not np.asarray(shaped)[~toy_turns.TURN_ENDS].any()
    if shaping.normalise:
        with pytest.raises(InputError, match="turn_ends: expected the last token"):
            flow.shaping.shape_turns(
                jnp.asarray(turns), ends=None, scores=scores, **options
            )


def test_episodes_are_alike_that_say_the_same_whatever_they_observe():
    scored = toy_turns.scored()
    episodes = ("p a E o b -", "p a E o o b", "p a E o o c")
    cells = np.array([row.split() for row in episodes])
    tokens = np.array([[ord(cell) for cell in row] for row in cells])
    tokens[1] += np.where(cells[1] == "o", 1, 0)
    mask, sampled = cells != "-", np.isin(cells, ["a", "E", "b", "c"])
    rollout = dataclasses.replace(
        scored.rollout,
        tokens=jnp.asarray(tokens),
        mask=jnp.asarray(mask, bool),
        response_mask=jnp.asarray(sampled, bool),
    )
    scored = dataclasses.replace(scored, rollout=rollout)
    # Turns whose reward has weight 0 have no rewards, but ends.
    for episodes in (scored, dataclasses.replace(scored, turn_rewards=None)):
        output = objective._first_of_its_kind(episodes)
        np.testing.assert_array_equal(output, [1, 0, 1])


def test_responses_of_fixed_length_have_one_turn():
    recipe = grpo.GRPO(**GROUP, fixed_length=FixedLength())
    with pytest.raises(InputError, match="fixed_length: expected None for episodes"):
        make_experience(
            fresh(recipe),
            rollout=toy_turns.rollout(),
            scores=of_turns(),
            frozen=NO_MODELS,
            recipe=recipe,
        )
