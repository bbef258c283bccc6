"""The arguments of a policy gradient's loss and controller; no model runs here."""

import dataclasses
from importlib import import_module
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from rlhf_jax.algorithms import batch, reinforce, sft, state
from rlhf_jax.algorithms.policy_gradient import algorithm, loss, update
from rlhf_jax.algorithms.policy_gradient.corrections import Reject, Truncate
from rlhf_jax.algorithms.policy_gradient.recipe import FixedLength
from rlhf_jax.functional.kl.control import Adaptive
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.models import packing
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels, Further

ITERATION = "rlhf_jax.algorithms.policy_gradient.iteration"
UPDATE = "rlhf_jax.algorithms.policy_gradient.update"
CUT, REJECT = Truncate(2.0), Reject(2.0)

BASE = reinforce.REINFORCE(
    model=toys.GPT2,
    policy_optimizer=optax.sgd(0.1),
    max_new_tokens=4,
    stop_ids=toys.STOP,
    temperature=0.6,
)
MASK = jnp.asarray([[0, 0, 1, 1, 1, 0], [0] * 6, [0, 0, 1, 1, 1, 1]], bool)
ZEROS = jnp.zeros(MASK.shape, jnp.float32)
EXPERIENCE = batch.PolicyExperience(
    tokens=jnp.zeros(MASK.shape, jnp.int32),
    mask=jnp.ones(MASK.shape, bool),
    response_mask=MASK,
    old_logprobs=ZEROS,
    ref_logprobs=ZEROS,
    advantages=ZEROS,
    token_rewards=ZEROS,
)


def fresh(*, target=1 / 11, unit="token"):
    return state.grpo_state(
        policy={"w": jnp.zeros(())},
        policy_optimizer=BASE.policy_optimizer,
        kl=Adaptive(target=target, unit=unit, horizon=30).controller(0.3),
    )


@pytest.fixture
def nothing_learned(monkeypatch):
    """An update whose steps do not change the state."""

    def step(current, **_):
        nothing = {"policy/sampler_mismatch": (jnp.zeros(()), jnp.ones(()))}
        return current, jnp.bool_(False), nothing

    monkeypatch.setattr(import_module(UPDATE), "_step", step)


OLD_LOGPROBS = ZEROS.at[0, 3].set(0.5).at[2, 4].set(0.2).at[1, 2].set(9.0)


def test_counts_are_those_of_the_minibatch(monkeypatch):
    """Parts use the counts of the whole; a row without a response does not count."""
    recorded_options = {}

    def terms(policy, **options):
        recorded_options.update(options)
        return loss.PolicyTerms(jnp.zeros(()), {}, jnp.zeros(()), None)

    monkeypatch.setattr(algorithm, "policy_terms", terms)
    minibatch = SimpleNamespace(response_mask=MASK)
    _, of_part = BASE.minibatch_loss(minibatch, kl_coef=0.3, frozen=NO_MODELS)
    of_part((None, None), SimpleNamespace(response_mask=MASK[:1]))
    assert (recorded_options["num_tokens"], recorded_options["num_responses"]) == (
        7.0,
        2.0,
    )
    assert (
        recorded_options["num_tokens"].dtype
        == recorded_options["num_responses"].dtype
        == jnp.float32
    )
    assert (recorded_options["kl_coef"], recorded_options["recipe"]) == (0.3, BASE)


@pytest.mark.usefixtures("nothing_learned")
def test_a_controller_per_token_divides_by_the_mean_length():
    """0.7 nats over 7 tokens is 10 % above a target of 1/11 nat per token."""
    experience = dataclasses.replace(EXPERIENCE, old_logprobs=OLD_LOGPROBS)
    after, _ = reinforce.update(
        fresh(), experience=experience, key=jax.random.key(0), recipe=BASE
    )
    assert float(after.kl.kl_coef) == pytest.approx(0.3 * (1 + 0.1 * 3 / 30), rel=1e-5)


@pytest.mark.usefixtures("nothing_learned")
@pytest.mark.parametrize("correction", [CUT, REJECT])
def test_a_controller_per_response_counts_those_that_are_trained_on(correction):
    """A row without tokens does not count: it is left out or never began."""
    recipe = dataclasses.replace(
        BASE,
        sampler_correction=correction,
    )
    experience = dataclasses.replace(EXPERIENCE, old_logprobs=OLD_LOGPROBS)
    target = 0.7 / 2 / 1.1  # nats a response
    after, _ = reinforce.update(
        fresh(target=target, unit="response"),
        experience=experience,
        key=jax.random.key(0),
        recipe=recipe,
    )
    assert float(after.kl.kl_coef) == pytest.approx(0.3 * (1 + 0.1 * 3 / 30), rel=1e-5)
    none = dataclasses.replace(experience, response_mask=jnp.zeros_like(MASK))
    after, _ = reinforce.update(
        fresh(), experience=none, key=jax.random.key(0), recipe=recipe
    )
    assert np.isfinite(float(after.kl.kl_coef))


@pytest.fixture
def read(monkeypatch):
    """The options that exact KL and the models receive; the models return zeros."""
    options = {}

    def stands_for(name, result):
        def recorded(*args, **named):
            options[name] = named
            return result

        return recorded

    zeros = jnp.zeros(MASK.shape, jnp.float32)
    hidden = stands_for("hidden_states", jnp.zeros((*MASK.shape, 2), jnp.float32))
    monkeypatch.setattr(packing.decoder, "hidden_states", hidden)
    logprobs = stands_for("logprobs_from_hidden", (zeros, zeros))
    monkeypatch.setattr(loss, "logprobs_from_hidden", logprobs)
    monkeypatch.setattr(loss, "exact_kl", stands_for("exact_kl", zeros))
    monkeypatch.setattr(loss, "read", lambda reference: reference)
    return options


@pytest.mark.parametrize(
    ("direction", "top_k"), [("forward", None), ("reverse", 3), ("reverse", None)]
)
def test_exact_kl_is_asked_for_as_the_recipe_says(read, direction, top_k):
    penalty = Penalty(
        value_estimator="exact", placement="loss", direction=direction, top_k=top_k
    )
    zeros = jnp.zeros(MASK.shape, jnp.float32)
    loss.policy_terms(
        {},
        experience=SimpleNamespace(
            tokens=jnp.zeros(MASK.shape, jnp.int32),
            mask=jnp.ones(MASK.shape, bool),
            response_mask=MASK,
            **dict.fromkeys(
                ("old_logprobs", "behaviour_logprobs", "ref_logprobs", "advantages"),
                zeros,
            ),
            further={},
            sampled=None,
            chosen=None,
            entropy_coef=None,
            experts=None,
        ),
        kl_coef=0.3,
        num_tokens=jnp.float32(7),
        num_responses=jnp.float32(2),
        recipe=dataclasses.replace(BASE, penalty=penalty),
        frozen=FrozenModels(
            reference=SimpleNamespace(model=None)
        ),  # of the policy's shape
    )
    assert read["hidden_states"]["first_column"] == 1  # it predicts column 2
    assert read["logprobs_from_hidden"]["texts"].first_column == 2
    assert read["logprobs_from_hidden"]["temperature"] == 0.6
    texts = read["exact_kl"].pop("texts")
    np.testing.assert_array_equal(texts.mask, True)
    assert texts.first_column == 2
    assert read["exact_kl"] == {
        "model": toys.GPT2,
        "ref_model": toys.GPT2,
        "temperature": 0.6,
        "direction": direction,
        "top_k": top_k,
        "sampled_tail": False,
    }


@pytest.mark.parametrize("estimator", ["k2", "exact"])
def test_the_kl_of_a_further_reference_is_added_by_its_weight(
    read, monkeypatch, estimator
):
    """β·(kl + w·kl_b), for k2, and for exact KL with the named model."""
    exact = {"first": jnp.float32(0.2), "other": jnp.float32(0.6)}

    def exact_kl(params, hidden, reference, ref_hidden, *, texts, **_):
        return jnp.where(texts.mask, exact[reference.name], 0.0)

    monkeypatch.setattr(loss, "exact_kl", exact_kl)
    first, other = (
        SimpleNamespace(model=None, name=name) for name in ("first", "other")
    )
    zeros = jnp.zeros(MASK.shape, jnp.float32)

    def terms(further):
        return loss.policy_terms(
            {},
            experience=SimpleNamespace(
                tokens=jnp.zeros(MASK.shape, jnp.int32),
                mask=MASK,
                response_mask=MASK,
                old_logprobs=zeros,
                behaviour_logprobs=zeros,
                advantages=zeros,
                ref_logprobs=jnp.where(MASK, 0.4, 0.0),
                sampled=None,
                chosen=None,
                entropy_coef=None,
                experts=None,
                further={
                    name: Further(None, jnp.where(MASK, 1.2, 0.0), 0.5)
                    for name in further
                },
            ),
            kl_coef=0.3,
            num_tokens=jnp.float32(7),
            num_responses=jnp.float32(2),
            recipe=dataclasses.replace(
                BASE, penalty=Penalty(estimator, placement="loss")
            ),
            frozen=FrozenModels(
                reference=first,
                further={name: Further(other, None, 0.5) for name in further},
            ),
        )

    kl, kl_b = (0.08, 0.72) if estimator == "k2" else (0.2, 0.6)
    assert float(terms(()).loss) == pytest.approx(0.3 * kl, rel=1e-5)
    both = terms(("b",))
    assert float(both.loss) == pytest.approx(0.3 * (kl + 0.5 * kl_b), rel=1e-5)
    total, tokens = both.stats["loss/kl"]
    assert float(total / tokens) == pytest.approx(kl + 0.5 * kl_b, rel=1e-5)
    assert float(tokens) == 7


@pytest.mark.parametrize(
    ("fixed_length", "sampled", "rewarded"),
    [
        (None, "whole", "whole"),
        (FixedLength(2), "truncated", "truncated"),
        (FixedLength(2, reward_only=True), "whole", "truncated"),
    ],
)
def test_who_sees_a_truncated_response(monkeypatch, fixed_length, sampled, rewarded):
    recorded_options = {}

    def rollout(*_, **options):
        recorded_options.update(options)
        return "whole"

    def truncate(_, **options):
        assert options == {"stop_ids": toys.STOP, "after": 2}
        return "truncated"

    monkeypatch.setattr("rlhf_jax.algorithms.flow.rollout.rollout", rollout)
    monkeypatch.setattr("rlhf_jax.algorithms.flow.rollout.truncate", truncate)
    recipe = dataclasses.replace(BASE, fixed_length=fixed_length)
    whole = reinforce.sample(
        {}, prompts=toys.prompts(), key=jax.random.key(0), recipe=recipe
    )
    assert recorded_options["stop_ids"] == (() if fixed_length else toys.STOP)
    rewarded_rollout = import_module(ITERATION).seen_by_reward(whole, recipe=recipe)
    assert (whole, rewarded_rollout) == (sampled, rewarded)


@pytest.mark.parametrize(("counts", "valued"), [({}, 2.0), ({"num_valued": 3.0}, 3.0)])
def test_a_critic_with_a_trunk_of_its_own_adapts_the_same_base(
    monkeypatch, counts, valued
):
    recorded_options = {}

    def of_critic(critic, **options):
        recorded_options.update(options)
        return jnp.float32(2.0), {"loss/value": (2.0, 1.0)}

    def of_policy(policy, **options):
        terms = {"loss/policy": (0.5, 1.0)}
        return loss.PolicyTerms(jnp.float32(0.5), terms, None, None)

    module = import_module("rlhf_jax.algorithms.ppo.loss")
    monkeypatch.setattr(module, "critic_loss", of_critic)
    monkeypatch.setattr(module, "policy_terms", of_policy)
    total, stats = module.ppo_loss(
        {},
        {},
        experience="experience",
        kl_coef=0.3,
        num_tokens=7.0,
        num_values=8.0,
        num_responses=2.0,
        recipe=SimpleNamespace(shared_trunk=False),
        frozen=FrozenModels(base="base"),
        **counts,
    )
    assert float(total) == 2.5
    assert stats.keys() == {"loss/value", "loss/policy"}
    assert (recorded_options["frozen"].base, recorded_options["experience"]) == (
        "base",
        "experience",
    )
    assert (recorded_options["num_values"], recorded_options["num_valued"]) == (
        8.0,
        valued,
    )


def test_what_an_iteration_hands_on(monkeypatch):
    """The sampler gets the step as version, and `learn` the rollout of the reward."""
    iteration, calls = import_module(ITERATION), {}

    def sampled(policy, **options):
        calls["sample"] = (policy, options)
        return "rollout"

    def learned(train, **options):
        calls["learn"] = (train, options)
        return "next"

    monkeypatch.setattr(iteration, "sample", sampled)
    monkeypatch.setattr(iteration, "learn", learned)
    train = SimpleNamespace(policy="policy", step="step")
    shared = {"key": "key", "recipe": BASE, "frozen": "frozen"}
    options = {"prompts": "prompts", "ptx": "ptx"}
    reward = lambda rollout: (rollout, "scored")  # noqa: E731
    assert iteration.iteration(train, reward=reward, **options, **shared) == "next"
    of_sample = shared | {"prompts": "prompts", "version": "step"}
    assert calls["sample"] == ("policy", of_sample)
    outcome = {"rollout": "rollout", "scores": ("rollout", "scored"), "ptx": "ptx"}
    assert calls["learn"] == (train, shared | outcome)
    iteration.iteration(train, reward=None, **options, **shared)
    assert calls["learn"][1]["scores"] is None


@pytest.mark.slow
def test_without_a_reward_every_score_is_0():
    """This is distillation without a reward."""
    _, _, stats, scored = import_module(ITERATION).make_experience(
        fresh(),
        rollout=batch.Rollout(
            tokens=EXPERIENCE.tokens,
            mask=EXPERIENCE.mask,
            response_mask=MASK,
            old_logprobs=ZEROS,
            entropy=ZEROS,
            index=jnp.arange(3, dtype=jnp.int32),
            sample=jnp.arange(3, dtype=jnp.int32),
        ),
        scores=None,
        frozen=NO_MODELS,
        recipe=BASE,
    )
    np.testing.assert_array_equal(scored.scores, [0, 0, 0])
    assert [float(x) for x in stats["objective/scores"]] == [0.0, 3.0]


def test_what_learn_hands_on(monkeypatch):
    """Every argument reaches the experience or the update."""
    iteration = import_module(ITERATION)
    calls = {}

    def experienced(state, **options):
        calls["experience"] = options
        return "state", "experience", {"a": (1.0, 1.0)}, "scored"

    def updated(state, **options):
        calls["update"] = options
        return "next", {"b": (2.0, 1.0)}

    monkeypatch.setattr(iteration, "make_experience", experienced)
    monkeypatch.setattr(iteration, "update", updated)
    names = ("rollout", "scores", "frozen", "ref_output", "values", "packing")
    options = {name: object() for name in (*names, "ptx")}
    key = jax.random.key(3)
    output = iteration.learn("start", key=key, recipe=BASE, **options)
    assert output == ("next", {"a": (1.0, 1.0), "b": (2.0, 1.0)}, "scored")
    passed = {name: options[name] for name in names}
    assert calls["experience"] == passed | {"key": key, "recipe": BASE}
    again = calls["update"].pop("key")
    assert calls["update"] == {
        **{name: options[name] for name in ("frozen", "packing", "ptx")},
        "recipe": BASE,
        "experience": "experience",
    }
    np.testing.assert_array_equal(
        jax.random.key_data(again), jax.random.key_data(jax.random.split(key)[1])
    )


def test_without_a_critic_no_state_has_a_value():
    assert BASE.critic is None


@pytest.mark.parametrize("rows", [None, 1, 3])
def test_texts_count_by_their_tokens_however_they_are_cut(monkeypatch, rows):
    """A loss of w per predicted token, divided by the tokens of the whole minibatch."""
    recipe = dataclasses.replace(BASE, ptx_coef=0.5, micro_batch_size=rows)
    texts = batch.Sequences(
        tokens=jnp.zeros((2, 4), jnp.int32),
        mask=jnp.ones((2, 4), bool),
        response_mask=jnp.asarray([[0, 1, 1, 1], [0, 0, 1, 0]], bool),
    )

    def loss(params, part, *, model, num_tokens):
        count = part.response_mask.sum(dtype=jnp.float32)
        assert model == toys.GPT2
        stats = {"loss/language_model": (params["w"] * count, count)}
        return params["w"] * count / num_tokens, stats

    monkeypatch.setattr(sft, "loss", loss)
    params = {"w": jnp.float32(3)}
    gradient, stats = update.ptx_gradient(
        params, texts, recipe=recipe, frozen=NO_MODELS
    )
    assert float(gradient["w"]) == 0.5
    assert [float(x) for x in stats["loss/ptx"]] == [12.0, 4.0]


def test_what_the_sampler_is_asked_for(monkeypatch):
    """Nothing is sampled; the policy's version is stored with its tokens."""
    iteration, recorded_options = import_module(ITERATION), {}

    def rollout(policy, **options):
        recorded_options.update(options, policy=policy)
        return "rollout"

    monkeypatch.setattr(iteration.flow.rollout, "rollout", rollout)
    prompts = SimpleNamespace(tokens=jnp.zeros((8, 2), jnp.int32))
    key = jax.random.key(4)
    arguments = {"prompts": prompts, "key": key, "recipe": BASE, "version": 7}
    assert iteration.sample("policy", **arguments) == "rollout"
    assert recorded_options.pop("key") == jax.random.split(key)[0]
    assert recorded_options == {
        "policy": "policy",
        "prompts": prompts,
        "version": 7,
        "model": BASE.model,
        "max_new_tokens": 4,
        "stop_ids": toys.STOP,
        "temperature": 0.6,
        "group_size": 1,
        "continuous_batching": None,
        "record_experts": False,
        "record_top_k": None,
    }


@pytest.mark.slow
def test_log_probs_of_the_reference_that_are_there_are_not_computed_again():
    """The test has no reference that could compute them."""
    iteration = import_module(ITERATION)
    rollout = batch.Rollout(
        tokens=EXPERIENCE.tokens,
        mask=EXPERIENCE.mask,
        response_mask=MASK,
        old_logprobs=ZEROS,
        entropy=ZEROS,
        index=jnp.arange(3, dtype=jnp.int32),
        sample=jnp.arange(3, dtype=jnp.int32),
    )
    ref_logprobs = jnp.where(MASK, jnp.float32(-0.5), 0.0)
    _, experience, stats, scored = iteration.make_experience(
        fresh(),
        rollout=rollout,
        scores=jnp.asarray([1.0, 2.0, 3.0]),
        frozen=NO_MODELS,
        recipe=BASE,
        ref_output=batch.ReferenceOutput(ref_logprobs),
    )
    np.testing.assert_array_equal(scored.ref_logprobs, ref_logprobs)
    np.testing.assert_array_equal(experience.ref_logprobs, ref_logprobs)
    np.testing.assert_array_equal(scored.kl, -ref_logprobs)
    assert [float(x) for x in stats["objective/kl"]] == [3.5, 3.0]


@pytest.mark.slow
def test_statistics_of_the_objective_are_of_the_rows_that_are_reported():
    class FirstRow(reinforce.REINFORCE):
        def reported(self, rows):
            return jax.tree.map(lambda x: x[:1] if jnp.ndim(x) else x, rows)

    _, _, stats, scored = import_module(ITERATION).make_experience(
        fresh(),
        rollout=batch.Rollout(
            tokens=EXPERIENCE.tokens,
            mask=EXPERIENCE.mask,
            response_mask=MASK,
            old_logprobs=ZEROS,
            entropy=ZEROS,
            index=jnp.arange(3, dtype=jnp.int32),
            sample=jnp.arange(3, dtype=jnp.int32),
        ),
        scores=jnp.asarray([1.5, 2.0, 3.0]),
        frozen=NO_MODELS,
        recipe=FirstRow(**vars(BASE)),
    )
    assert [float(x) for x in stats["objective/scores"]] == [1.5, 1.0]
    assert [float(x) for x in stats["response/eos_fraction"]] == [0.0, 1.0]
    assert scored.scores.shape == (3,)


def test_the_mismatch_is_told_of_the_first_minibatch(monkeypatch):
    """Later minibatches have a changed policy."""

    def step(current, **_):
        moved = current.policy["w"] + 1
        mismatch = (current.policy["w"] + 5, jnp.ones(()))
        after = dataclasses.replace(current, policy={"w": moved})
        return after, jnp.bool_(False), {"policy/sampler_mismatch": mismatch}

    monkeypatch.setattr(import_module(UPDATE), "_step", step)
    after, stats = reinforce.update(
        fresh(),
        experience=EXPERIENCE,
        key=jax.random.key(0),
        recipe=dataclasses.replace(BASE, num_minibatches=3),
    )
    assert float(after.policy["w"]) == 3
    assert float(stats["policy/sampler_mismatch"][0]) == 5
