"""PPO with its models, by hand: every loss, both published recipes, the exact KL.

There are few programs, because compilation dominates: one computes the gradient of
every loss from all logits, for comparison with the update.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import toys

from rlhf_jax import batch, critic, kl_control, masked, policy, ppo, state
from rlhf_jax.algorithms.batch import ReferenceOutput
from rlhf_jax.algorithms.flow import rollout, score
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient.recipe import Clip, FixedLength
from rlhf_jax.algorithms.ppo.recipe import N_PLUS, OPENAI_2019, Recipe
from rlhf_jax.functional import checks
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels

LR, KL_COEF, SIZE = 0.1, 0.1, 8
POLICY = toys.params()
REFERENCE = toys.freeze(toys.params(seed=5))
CRITIC = toys.scorer(seed=1)
KEY = jax.random.key(9)
FIXED = {
    "model": toys.GPT2,
    "critic_model": toys.GPT2,
    "policy_optimizer": optax.sgd(LR),
    "critic_optimizer": optax.sgd(LR),
    "max_new_tokens": SIZE,
    "stop_ids": toys.STOP,
}
BASE = ppo.PPO(**FIXED, num_epochs=1)

update = toys.jit(ppo.update, static_argnames=("recipe",))
learn = toys.jit(ppo.learn, static_argnames=("recipe",))
values_of = toys.jit(critic.values, static_argnames=("model",))


def recipe(published: Recipe, **changes) -> ppo.PPO:
    """A preset with one step on one batch, which shows the gradient."""
    return ppo.PPO(**{**vars(published), "num_epochs": 1, **changes}, **FIXED)


def fresh(settings: ppo.PPO = BASE, *, critic=CRITIC, kl_coef=KL_COEF):
    return state.ppo_state(
        policy=jax.tree.map(jnp.copy, POLICY),
        critic=jax.tree.map(jnp.copy, critic),
        policy_optimizer=settings.policy_optimizer,
        critic_optimizer=settings.critic_optimizer,
        kl=kl_control.fixed(kl_coef),
    )


def close(left, right, *, rtol=1e-4, atol=2e-6):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), left, right
    )


def step(params, grads):
    return jax.tree.map(lambda w, g: np.asarray(w) - LR * np.asarray(g), params, grads)


# --- rollouts -----------------------------------------------------------------


@pytest.fixture(scope="module")
def untruncated():
    """A rollout sampled without stop tokens."""
    settings = dataclasses.replace(BASE, fixed_length=FixedLength(3, reward_only=True))
    sample = toys.jit(ppo.sample, static_argnames=("recipe",))
    return sample(
        POLICY,
        prompts=toys.prompts(lengths=(4, 2, 3, 1)),
        key=jax.random.key(3),
        recipe=settings,
    )


@pytest.fixture(scope="module")
def sampled(untruncated):
    """The rollout, truncated after the first stop token at response index 3 or more."""
    return rollout.truncate(untruncated, stop_ids=toys.STOP, after=3)


@pytest.mark.slow
def test_a_response_of_fixed_length_goes_on_after_a_stop_token(untruncated, sampled):
    settings = dataclasses.replace(BASE, fixed_length=FixedLength(3))
    cut = toys.jit(ppo.sample, static_argnames=("recipe",))(
        POLICY,
        prompts=toys.prompts(lengths=(4, 2, 3, 1)),
        key=jax.random.key(3),
        recipe=settings,
    )
    assert toys.leaves_equal(cut, sampled)
    assert np.asarray(untruncated.response_mask)[:, 4:].all()
    responses = np.asarray(sampled.tokens)[:, 4:]
    stops = np.isin(responses, toys.STOP)
    expected = ~oracles.oai_truncated(stops, True, 3)
    np.testing.assert_array_equal(np.asarray(sampled.response_mask)[:, 4:], expected)
    np.testing.assert_array_equal(np.asarray(sampled.mask)[:, 4:], expected)
    # There is something to see: an early stop that ends nothing, a later one that does.
    assert stops[:, :3].any()
    assert (responses != 0).any(axis=0).all()
    assert 3 < expected.sum(axis=1).min() < SIZE
    logprobs = np.asarray(sampled.old_logprobs)[:, 4:]
    assert (logprobs[expected] < 0).all()
    assert not logprobs[~expected].any()


@pytest.fixture(scope="module")
def answered(sampled):
    """A rollout whose responses end with their first stop token."""
    return rollout.truncate(sampled, stop_ids=toys.STOP)


# --- the update ---------------------------------------------------------------


@functools.cache
def hand():
    """The gradient of every loss from all logits, as sums over tokens with weights."""

    def loss(trained, e, *, texts, weights, value_weights, text_weights, numbers):
        policy_params, critic_params = trained

        def logprobs(params, tokens, mask, temperature):
            logits = policy.logits(params, model=toys.GPT2, tokens=tokens, mask=mask)
            return jax.nn.log_softmax(logits / temperature)[:, :-1]

        def of(table, tokens):
            return (jax.nn.one_hot(tokens[:, 1:], 13) * table).sum(-1)

        c, w, v = numbers, weights[:, 1:], value_weights[:, 1:]
        own = logprobs(policy_params, e.tokens, e.mask, c["temperature"])
        other = logprobs(REFERENCE.stored, e.tokens, e.mask, c["temperature"])
        picked = of(own, e.tokens)
        ratio = jnp.where(w > 0, jnp.exp(picked - e.old_logprobs[:, 1:]), 1.0)
        a = e.advantages[:, 1:]
        gain = jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1 + c["clip_high"]) * a)
        gain = jnp.where(a < 0, jnp.maximum(gain, c["dual_clip"] * a), gain)
        values = critic.values(
            critic_params, model=toys.GPT2, tokens=e.tokens, mask=e.mask
        )[:, 1:]
        old, target = e.old_values[:, 1:], e.returns[:, 1:]
        near = jnp.minimum(jnp.maximum(values, old - 0.2), old + 0.2)
        squares = jnp.maximum((values - target) ** 2, (near - target) ** 2) / 2
        entropy = -(jnp.exp(own) * own).sum(-1)
        exact = (jnp.exp(own) * (own - other)).sum(-1)
        exact = jnp.where(exact <= c["kl_clip"], exact, 0.0)
        k2 = (picked - e.ref_logprobs[:, 1:]) ** 2 / 2
        text = of(logprobs(policy_params, texts.tokens, texts.mask, 1.0), texts.tokens)
        return (
            -(gain * w).sum()
            + 0.1 * (squares * v).sum()
            - c["entropy"] * (entropy * w).sum()
            + c["exact"] * (exact * w).sum()
            + c["k2"] * (k2 * w).sum()
            - c["ptx"] * (text * text_weights[:, 1:]).sum()
        )

    gradient = toys.jit(jax.grad(loss))

    def run(
        trained,
        e,
        *,
        rows=(0, 1, 2, 3),
        text_rows=(0, 1, 2, 3),
        responses_alike=False,
        constant=None,
        **numbers,
    ):
        def shared(mask, rows):
            mask = np.asarray(mask) & np.isin(np.arange(4), rows)[:, None]
            if constant is not None:
                weights = mask / (constant * mask.any(axis=1).sum())
                return jnp.asarray(weights, jnp.float32)
            if not responses_alike:
                return jnp.asarray(mask / mask.sum(), jnp.float32)
            lengths = mask.sum(axis=1, keepdims=True)
            weights = mask / np.maximum(lengths, 1) / (lengths > 0).sum()
            return jnp.asarray(weights, jnp.float32)

        off = dict.fromkeys(("entropy", "exact", "k2", "ptx"), 0.0)
        off |= {"temperature": 0.7, "clip_high": 0.2, "dual_clip": 1e6, "kl_clip": 1e6}
        predicted = np.asarray(TEXTS.response_mask).copy()
        predicted[:, 1:] &= np.asarray(TEXTS.mask)[:, :-1]
        predicted[:, 0] = False
        # Off their devices: some are tied to one, and would be compiled for again.
        trained, e = jax.device_get((trained, e))
        return gradient(
            trained,
            e,
            texts=TEXTS,
            weights=shared(e.response_mask, rows),
            value_weights=shared(e.value_mask, rows),
            text_weights=shared(predicted, text_rows),
            numbers=off | numbers,
        )

    return run


def made_texts() -> batch.Sequences:
    """Prompts of 0 to 3 tokens, then responses; the first token is never predicted."""
    rng = np.random.default_rng(8)
    place = np.arange(7)[None, :]
    starts = np.array([[2], [0], [3], [1]])
    lengths = np.array([[7], [5], [4], [6]])
    return batch.Sequences(
        tokens=jnp.asarray(rng.integers(0, 13, (4, 7)), jnp.int32),
        mask=jnp.asarray(place < lengths),
        response_mask=jnp.asarray((place >= starts) & (place < lengths)),
    )


TEXTS = made_texts()


@pytest.fixture(scope="module")
def experience(answered):
    """An experience in which every clip acts, with a value after the last token."""
    made = toys.experience(answered, seed=7)
    longer = score.value_mask(answered, after_stop=True)
    noise = jnp.asarray(np.random.default_rng(4).normal(size=longer.shape), jnp.float32)
    after = longer & ~answered.response_mask
    assert after.any()
    return dataclasses.replace(
        made,
        old_logprobs=2 * made.old_logprobs - answered.old_logprobs,  # twice as far
        value_mask=longer,
        returns=jnp.where(after, noise, made.returns),
        old_values=jnp.where(after, 0.5 * noise[::-1], made.old_values),
    )


def poisoned(e: batch.Experience) -> batch.Experience:
    """Writes garbage wherever all masks are False."""
    masks = dict.fromkeys(("old_logprobs", "ref_logprobs", "advantages"), "response")
    masks |= dict.fromkeys(("old_values", "returns", "token_rewards"), "value")
    changed = {
        name: jnp.asarray(oracles.poison(getattr(e, name), getattr(e, f"{mask}_mask")))
        for name, mask in masks.items()
    }
    tokens = jnp.where(e.mask, e.tokens, 11)
    return dataclasses.replace(e, tokens=tokens, **changed)


def unmoved_by_garbage(output, settings: ppo.PPO, e: batch.Experience, **arguments):
    again = update(
        fresh(), experience=poisoned(e), key=KEY, recipe=settings, **arguments
    )
    for left, right in zip(output, again, strict=True):
        assert toys.leaves_equal(left, right)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("aggregation", "factor"),
    [
        pytest.param("sequence_mean", None, marks=pytest.mark.long),  # test_grpo.py
        ("constant", 2.5),
    ],
)
def test_every_term_at_once_as_a_mean_over_responses(
    answered, experience, aggregation, factor
):
    """Clip-higher, dual clip, entropy and k2 in the loss, in micro-batches."""
    settings = dataclasses.replace(
        BASE,
        aggregation=aggregation,
        loss_scale_factor=factor,
        surrogate=Clip(clip_range_high=0.5, dual_clip=1.3),
        entropy_coef=0.05,
        penalty=Penalty(value_estimator="k3", grad_estimator="k2", placement="loss"),
        micro_batch_size=2,
    )
    output = update(fresh(), experience=experience, key=KEY, recipe=settings)
    grads = hand()(
        (POLICY, CRITIC),
        experience,
        responses_alike=True,
        constant=factor,
        clip_high=0.5,
        dual_clip=1.3,
        entropy=0.05,
        k2=KL_COEF,
    )
    after, stats = output
    close((after.policy, after.critic), step((POLICY, CRITIC), grads))
    ratio = np.exp(np.asarray(answered.old_logprobs - experience.old_logprobs))
    good = np.asarray(experience.advantages) > 0
    assert (good & (ratio > 1.2) & (ratio < 1.5)).any()
    assert (good & (ratio > 1.5)).any()
    assert 0 < float(masked.mean_stats(stats)["policy/dual_clipfrac"]) < 1
    unmoved_by_garbage(output, settings, experience)


@pytest.mark.slow
def test_texts_mixed_in_are_shared_out_over_the_minibatches(experience):
    """PPO's gradient and ptx_coef times that of the texts at temperature 1."""
    settings = dataclasses.replace(
        BASE, ptx_coef=2.0, entropy_coef=0.05, num_minibatches=2, micro_batch_size=1
    )
    output = update(fresh(), experience=experience, key=KEY, recipe=settings, ptx=TEXTS)
    order = jax.random.permutation(jax.random.fold_in(KEY, 0), 4)
    trained = (POLICY, CRITIC)
    for part, rows in enumerate(np.asarray(order).reshape(2, 2)):
        grads = hand()(
            trained,
            experience,
            rows=rows,
            text_rows=(2 * part, 2 * part + 1),
            entropy=0.05,
            ptx=2.0,
        )
        trained = step(trained, grads)
    after, stats = output
    close((after.policy, after.critic), trained)
    assert float(stats["loss/ptx"][1]) == 15  # 16 of answers; one starts its row
    unmoved_by_garbage(output, settings, experience, ptx=TEXTS)


@pytest.mark.long  # each guard alone is in test_ppo_details.py
def test_the_guards_leave_out_what_they_say(experience):
    """By row: a ratio of e⁴ skips its row; one of e⁻⁵ ends the batch."""
    settings = dataclasses.replace(
        BASE, num_minibatches=4, max_ratio_mean=10.0, stop_approxkl=10.0
    )
    order = np.asarray(jax.random.permutation(jax.random.fold_in(KEY, 0), 4))

    def run(*, shifted=None, by=0.0, without=()):
        rows = jnp.arange(4)[:, None]
        is_inside = ~jnp.isin(rows, jnp.asarray([-1, *without]))
        return update(
            fresh(),
            experience=dataclasses.replace(
                experience,
                old_logprobs=experience.old_logprobs - by * (rows == shifted),
                response_mask=experience.response_mask & is_inside,
                value_mask=experience.value_mask & is_inside,
            ),
            key=KEY,
            recipe=settings,
        )

    plain, plain_stats = run()
    assert float(plain_stats["update/guarded"][0]) == 0
    assert float(plain_stats["update/stopped"][0]) == 0

    # The second minibatch alone, or from the second on: as if they held no token.
    guarded, stats = run(shifted=order[1], by=4.0)
    expected, _ = run(without=order[1:2])
    close(
        (guarded.policy, guarded.critic), (expected.policy, expected.critic), rtol=1e-6
    )
    assert float(masked.mean_stats(stats)["update/guarded"]) == 0.25
    assert float(stats["update/stopped"][0]) == 0
    assert float(stats["policy/ratio_max"][0]) > 30

    stopped, stats = run(shifted=order[1], by=-5.0)
    expected, _ = run(without=order[1:])
    close(
        (stopped.policy, stopped.critic), (expected.policy, expected.critic), rtol=1e-6
    )
    assert float(masked.mean_stats(stats)["update/stopped"]) == 0.75
    assert float(masked.mean_stats(stats)["update/guarded"]) == 0
    assert not toys.leaves_equal(guarded.policy, stopped.policy)
    assert not toys.leaves_equal(guarded.policy, plain.policy)
    unmoved_by_garbage(run(), settings, experience)


# --- whole batches, by the published recipes ----------------------------------

SCORES = np.array([1.5, -0.5, 2.0, 0.25], np.float32)


def response_kl(scored: batch.Scored):
    pair = scored.rollout.old_logprobs, scored.ref_logprobs
    return oracles.k1(*(np.asarray(array, np.float64) for array in pair))


def as_experience(scored: batch.Scored, **numbers) -> batch.Experience:
    """The inputs of `hand` from a scored rollout, advantages and returns by hand."""
    mask = scored.rollout.response_mask
    numbers = {
        name: jnp.asarray(x, jnp.bool_ if name.endswith("mask") else jnp.float32)
        for name, x in numbers.items()
    }
    return batch.Experience(
        **{
            "tokens": scored.rollout.tokens,
            "mask": scored.rollout.mask,
            "response_mask": mask,
            "value_mask": mask,
            "old_logprobs": scored.rollout.old_logprobs,
            "ref_logprobs": scored.ref_logprobs,
            "old_values": scored.values,
            "token_rewards": jnp.zeros(mask.shape, jnp.float32),
            **numbers,
        }
    )


@pytest.mark.slow
def test_openai_2019_by_hand(untruncated, sampled):
    """Rewards whitened in the minibatch, GAE there, a critic that is a head.

    The reward sees truncated responses; everything else uses all tokens.
    """
    settings = recipe(
        OPENAI_2019, fixed_length=FixedLength(3, reward_only=True)
    )  # as was sampled
    assert toys.leaves_equal(ppo.seen_by_reward(untruncated, recipe=settings), sampled)
    head = {"score": CRITIC["score"]}
    after, stats, scored = learn(
        fresh(settings, critic=head, kl_coef=0.15),
        rollout=untruncated,
        scores=jnp.asarray(SCORES),
        frozen=FrozenModels(reference=REFERENCE),
        key=KEY,
        recipe=settings,
    )
    mask = np.asarray(untruncated.response_mask)
    ended = np.asarray(score.ended(sampled, stop_ids=toys.STOP))
    assert 0 < ended.sum() < 4
    np.testing.assert_allclose(scored.scores, np.where(ended, SCORES, -1.0))
    assert mask[:, 4:].all()
    trunk = {name: POLICY[name] for name in CRITIC["trunk"]}
    shared = {"trunk": trunk, "score": CRITIC["score"]}
    values = values_of(
        shared, model=toys.GPT2, tokens=untruncated.tokens, mask=untruncated.mask
    )
    close(scored.values, np.where(mask, values, 0.0), atol=1e-5)
    token_rewards = oracles.token_rewards(
        scored.scores, response_kl(scored), mask, 0.15
    )
    whitened = oracles.masked_whiten(token_rewards, mask, shift_mean=False)
    advantages, returns = oracles.gae(whitened, scored.values, mask, 1.0, 0.95)
    e = as_experience(
        scored, advantages=oracles.masked_whiten(advantages, mask), returns=returns
    )
    grads, critic_grads = hand()((POLICY, shared), e)
    # The value loss reaches the policy's trunk: as that of a critic which starts as it.
    both = {
        name: jax.tree.map(np.add, grad, critic_grads["trunk"][name])
        if name in trunk
        else grad
        for name, grad in grads.items()
    }
    assert np.abs(critic_grads["trunk"]["embed"]["tokens"]).max() > 0.01
    close(after.policy, step(POLICY, both), atol=5e-6)
    assert after.critic.keys() == {"score"}
    close(after.critic["score"], step(CRITIC["score"], critic_grads["score"]))
    squares = 0.5 * (np.asarray(scored.values) - returns)[mask] ** 2
    loss = masked.mean_stats(stats)["loss/value"]
    np.testing.assert_allclose(loss, squares.mean(), rtol=1e-4)


@pytest.mark.slow
def test_n_plus_by_hand(answered):
    """The published code on the response columns; the value loss counts one more."""
    settings = recipe(N_PLUS, micro_batch_size=2)
    after, stats, scored = learn(
        fresh(settings, kl_coef=0.05),
        rollout=answered,
        scores=jnp.asarray(SCORES),
        frozen=FrozenModels(reference=REFERENCE),
        key=KEY,
        recipe=settings,
    )
    ended = np.asarray(score.ended(answered, stop_ids=toys.STOP))
    assert 0 < ended.sum() < 4
    np.testing.assert_allclose(scored.scores, np.where(ended, SCORES, -1.0))
    whole = values_of(
        CRITIC, model=toys.GPT2, tokens=answered.tokens, mask=answered.mask
    )
    mask = np.asarray(answered.response_mask)[:, 4:]
    advantages, returns, counted = oracles.n_plus(
        response_kl(scored)[:, 4:],
        np.asarray(scored.scores),
        np.asarray(whole)[:, 4:],
        mask.sum(axis=1) - 1,
        kl_coef=0.05,
        lam=0.95,
    )
    assert counted.sum() > mask.sum()
    close(
        np.asarray(scored.values)[:, 4:],
        np.where(counted, np.asarray(whole)[:, 4:], 0.0),
        atol=1e-5,
    )
    aside = ((0, 0), (4, 0))
    e = as_experience(
        scored,
        advantages=np.pad(advantages, aside),
        returns=np.pad(returns, aside),
        value_mask=np.pad(counted, aside),
    )
    grads = hand()((POLICY, CRITIC), e)
    close((after.policy, after.critic), step((POLICY, CRITIC), grads), atol=5e-6)
    squares = 0.5 * (np.asarray(whole)[:, 4:] - returns)[counted] ** 2
    loss = masked.mean_stats(stats)["loss/value"]
    np.testing.assert_allclose(loss, squares.mean(), rtol=1e-4)


# --- the KL -------------------------------------------------------------------


@pytest.mark.parametrize(
    "placement",
    [
        pytest.param("both", marks=pytest.mark.slow),
        pytest.param("reward", marks=pytest.mark.long),
        pytest.param("loss", marks=pytest.mark.long),
    ],
)
@pytest.mark.filterwarnings("ignore:KL penalty")  # exact in the reward alone
def test_exact_kl_in_micro_batches_by_hand(answered, placement):
    """Clipped at 1.5 nats, with scores that use every shaping step."""
    penalty = Penalty(value_estimator="exact", placement=placement, clip=1.5)
    shaping = ScoreShaping(
        normalise=True, clip=1.0, length_penalty=0.05, missing_stop_penalty=0.5
    )
    settings = dataclasses.replace(
        BASE, penalty=penalty, scores=shaping, micro_batch_size=2
    )
    after, stats, scored = learn(
        fresh(kl_coef=0.5),
        rollout=answered,
        scores=jnp.asarray(SCORES),
        frozen=FrozenModels(reference=REFERENCE),
        key=KEY,
        recipe=settings,
    )
    mask = np.asarray(answered.response_mask)
    ended = np.asarray(score.ended(answered, stop_ids=toys.STOP))
    shaped = np.clip((SCORES - SCORES.mean()) / SCORES.std(), -1, 1)
    shaped = shaped - 0.05 * mask.sum(axis=1) - 0.5 * ~ended
    np.testing.assert_allclose(scored.scores, shaped, rtol=1e-5)

    logits, ref_logits = (
        toys.logits(params, model=toys.GPT2, tokens=answered.tokens, mask=answered.mask)
        for params in (POLICY, REFERENCE.stored)
    )
    exact = oracles.exact_kl(np.asarray(logits), np.asarray(ref_logits), 0.7)
    exact = np.roll(exact, 1, axis=1)  # of the distribution a token was drawn from
    clipped = np.where(mask, np.minimum(exact, 1.5), 0.0)
    clipfrac = (exact > 1.5)[mask].mean()
    assert 0.1 < clipfrac < 0.9
    means, in_reward, in_loss = masked.mean_stats(stats), None, 0.0
    if placement == "loss":
        assert scored.kl is None
    else:
        in_reward = clipped
        np.testing.assert_allclose(scored.kl, clipped, atol=1e-5)
        np.testing.assert_allclose(means["penalty/clipfrac"], clipfrac, rtol=1e-5)
    if placement != "reward":
        in_loss = 0.5
        np.testing.assert_allclose(means["loss/kl"], clipped[mask].mean(), rtol=1e-4)
        np.testing.assert_allclose(means["loss/kl_clipfrac"], clipfrac, rtol=1e-5)

    token_rewards = oracles.token_rewards(shaped, in_reward, mask, 0.5)
    advantages, returns = oracles.gae(token_rewards, scored.values, mask, 1.0, 0.95)
    e = as_experience(
        scored, advantages=oracles.masked_whiten(advantages, mask), returns=returns
    )
    grads = hand()((POLICY, CRITIC), e, exact=in_loss, kl_clip=1.5)
    close((after.policy, after.critic), step((POLICY, CRITIC), grads), atol=5e-6)


PENALTIES = {
    "k3, response": Penalty(value_estimator="k3", placement="both", per="response"),
    "k1, k2": Penalty(grad_estimator="k2", placement="both", per="length"),
    "forward": Penalty(value_estimator="exact", placement="both", direction="forward"),
    "top-k": Penalty(value_estimator="exact", placement="both", top_k=3),
}
# Those above in their plain form, whose numbers are in tests/functional/kl.
PLAIN = {
    "k1": Penalty(placement="both"),
    "k2": Penalty(value_estimator="k2", placement="both"),
    "k3": Penalty(value_estimator="k3", placement="both"),
    "exact": Penalty(value_estimator="exact", placement="both"),
}
for_each_penalty = pytest.mark.parametrize(
    "name",
    [*PENALTIES, *(pytest.param(name, marks=pytest.mark.long) for name in PLAIN)],
)


@pytest.fixture(scope="module")
def kl_terms(answered):
    """KL in the reward and in the loss of POLICY, and its gradient in the other model.

    By temperature where the other is POLICY itself.
    """

    def kl_terms(stored, own, temperature, penalty):
        reference = dataclasses.replace(REFERENCE, stored=stored)
        settings = dataclasses.replace(
            BASE, temperature=temperature, penalty=penalty, vf_coef=0.0
        )
        mine = rollout.recompute_logprobs(
            answered,
            own,
            model=toys.GPT2,
            max_new_tokens=SIZE,
            temperature=temperature,
        )
        scored = score.score(
            mine,
            scores=jnp.asarray(SCORES),
            reference=reference,
            model=toys.GPT2,
            max_new_tokens=SIZE,
            temperature=temperature,
            penalty=penalty,
            policy=own,
        )
        loss, stats = ppo.ppo_loss(
            own,
            CRITIC,
            experience=dataclasses.replace(
                toys.experience(answered),
                old_logprobs=mine.old_logprobs,
                ref_logprobs=scored.ref_logprobs,
            ),
            kl_coef=1.0,
            num_tokens=answered.response_mask.sum(dtype=jnp.float32),
            num_values=answered.response_mask.sum(dtype=jnp.float32),
            num_responses=jnp.float32(4),
            recipe=settings,
            frozen=FrozenModels(reference=reference),
        )
        return loss + scored.kl.sum(), (scored.kl, masked.mean_stats(stats)["loss/kl"])

    @functools.cache
    def of(plain):
        """Of one program for all penalties of a table."""

        @toys.jit
        def all_of_them(stored, own, temperature):
            return {
                name: jax.grad(kl_terms, has_aux=True)(
                    stored, own, temperature, penalty
                )
                for name, penalty in (PLAIN if plain else PENALTIES).items()
            }

        def run(stored, temperature):
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "KL penalty")  # k2 and k3 in both
                output = all_of_them(*jax.device_get((stored, POLICY)), temperature)
            return jax.device_get(output)

        return {
            **{t: run(POLICY, t) for t in (0.3, 0.7, 1.5)},
            "another": run(REFERENCE.stored, 0.7),
        }

    return lambda name: of(name in PLAIN)


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.5])
@for_each_penalty
def test_the_kl_of_equal_models_is_0_wherever_it_stands(kl_terms, name, temperature):
    _, (in_reward, in_loss) = kl_terms(name)[temperature][name]
    np.testing.assert_allclose(in_reward, 0.0, atol=1e-6)
    np.testing.assert_allclose(in_loss, 0.0, atol=1e-6)


@pytest.mark.slow
@for_each_penalty
def test_no_gradient_reaches_the_reference(kl_terms, name):
    gradient, (in_reward, in_loss) = kl_terms(name)["another"][name]
    assert np.abs(in_reward).max() > 0.1
    assert abs(in_loss) > 0.1
    for leaf in jax.tree.leaves(gradient):
        np.testing.assert_array_equal(leaf, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("placement", ["reward", "loss", "both"])
@pytest.mark.filterwarnings("ignore:KL penalty")
def test_exact_kl_needs_the_reference_itself(answered, experience, placement):
    penalty = Penalty(value_estimator="exact", placement=placement)
    settings = dataclasses.replace(BASE, penalty=penalty)
    with pytest.raises(checks.InputError, match="for exact KL"):
        jax.eval_shape(
            functools.partial(ppo.learn, recipe=settings),
            fresh(),
            rollout=answered,
            scores=jnp.asarray(SCORES),
            frozen=NO_MODELS,
            ref_output=ReferenceOutput(answered.old_logprobs),
            key=KEY,
        )
    if placement != "reward":
        with pytest.raises(checks.InputError, match="pass it in frozen, or choose k1"):
            jax.eval_shape(
                functools.partial(ppo.update, recipe=settings),
                fresh(),
                experience=experience,
                key=KEY,
            )


@pytest.mark.slow
def test_nothing_is_dropped_out(experience):
    loss = functools.partial(
        ppo.ppo_loss,
        experience=experience,
        kl_coef=KL_COEF,
        num_tokens=jnp.float32(9),
        num_values=jnp.float32(9),
        num_responses=jnp.float32(4),
        recipe=BASE,
    )
    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1), has_aux=True))
    assert "random" not in str(program(POLICY, CRITIC))
    assert "random" in str(jax.make_jaxpr(jax.random.bernoulli)(KEY))
