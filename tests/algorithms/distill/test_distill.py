"""Distillation: its loss against float64 logits, and every way to run the teacher."""

import dataclasses
import functools
import math
import re
import types
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracles
import pytest
import tiny
import toys

from rlhf_jax import config, decoder, kl_control, masked, policy, state
from rlhf_jax.algorithms import distill
from rlhf_jax.algorithms.batch import Prompts, Rollout, Scored
from rlhf_jax.algorithms.flow.shaping import ScoreShaping
from rlhf_jax.algorithms.policy_gradient.corrections import Truncate
from rlhf_jax.algorithms.policy_gradient.iteration import iteration, sample
from rlhf_jax.algorithms.policy_gradient.loss import policy_terms
from rlhf_jax.algorithms.policy_gradient.recipe import CISPO, Clip
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import IN_LOSS, IN_REWARD, Penalty
from rlhf_jax.models.packing import texts_of
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import FrozenModels

STUDENT, TEACHER = tiny.params(tiny.GPT2), tiny.params(tiny.LLAMA, seed=1)
# Twice as wide, another family.
FROZEN = toys.jit(frozen.freeze, static_argnames=("model",))(TEACHER, model=tiny.LLAMA)
P, R = 2, 4
BASE = distill.Distill(
    model=tiny.GPT2,
    policy_optimizer=optax.sgd(0.1),
    max_new_tokens=R,
    stop_ids=(3,),
    temperature=0.7,
)
# Ragged on both sides: prompts of 2, 1 and 2 tokens, responses of 4, 2 and 1.
MASK = np.array([[1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 0, 0], [1, 1, 1, 0, 0, 0]], bool)
TOKENS = np.random.default_rng(0).integers(0, tiny.VOCAB, MASK.shape).astype(np.int32)
RESPONSE = MASK & (np.arange(P + R) >= P)
BETA = 0.3


def scored(**fields):
    rng = np.random.default_rng(1)
    old, ref = (np.where(RESPONSE, x, 0) for x in rng.normal(-2, 0.5, (2, *MASK.shape)))
    rollout = Rollout(
        tokens=jnp.asarray(TOKENS),
        mask=jnp.asarray(MASK),
        response_mask=jnp.asarray(RESPONSE),
        old_logprobs=jnp.asarray(old, jnp.float32),
        entropy=jnp.zeros(MASK.shape, jnp.float32),
        index=jnp.arange(3, dtype=jnp.int32),
        sample=jnp.zeros(3, jnp.int32),
    )
    of = {"scores": jnp.asarray([1.0, -0.5, 2.0]), "values": None, "kl": None}
    of |= {"ref_logprobs": jnp.asarray(ref, jnp.float32), **fields}
    return Scored(rollout=rollout, **of)


def divergences(recipe, student):
    """f64[3, 6], the divergence of each response token, from all logits."""
    values = np.zeros(MASK.shape)
    for row, (tokens, mask) in enumerate(zip(TOKENS, MASK, strict=True)):
        text = tokens[mask].tolist()
        first = int(np.argmax(mask))
        logits = oracles.decoder_logits(student, tiny.GPT2, text)
        ref_logits = oracles.decoder_logits(TEACHER, tiny.LLAMA, text)
        for t in np.flatnonzero(RESPONSE[row]):
            pair = [
                np.asarray(oracles.log_softmax(x[t - first - 1], recipe.temperature))
                for x in (logits, ref_logits)
            ]
            values[row, t] = divergence(recipe, *pair)
    return values


def divergence(recipe, q, p):
    if recipe.divergence == "jensen_shannon":
        return oracles.jensen_shannon(q, p, beta=recipe.jsd_beta, k=recipe.top_k)
    if recipe.top_k is not None:
        order = np.argsort(-q, kind="stable")
        q, p = (
            np.append(
                x[order[: recipe.top_k]], np.log(np.exp(x[order[recipe.top_k :]]).sum())
            )
            for x in (q, p)
        )
    if recipe.divergence == "forward":
        q, p = p, q
    return float(np.exp(q) @ (q - p))


def loss_of(recipe, experience, *, teacher=FROZEN):
    _, loss = recipe.minibatch_loss(
        experience, kl_coef=jnp.float32(BETA), frozen=FrozenModels(reference=teacher)
    )
    return lambda params: loss((params, None), experience)


def head():
    return distill.head_of(FROZEN, model=tiny.GPT2, place=lambda params: params)


@functools.cache
def ways():
    """Value, stats and gradient of the loss: the teacher in the update; the teacher's
    hidden states and a reward; and the policy loss alone."""

    @jax.jit
    def compute(params, teacher, head):
        scores = scored()
        experience, _ = BASE.experience(scores, kl_coef=jnp.float32(BETA))
        states = distill.teacher_states(
            teacher,
            rollout=scores.rollout,
            model=tiny.GPT2,
            max_new_tokens=R,
            temperature=0.7,
        )
        ahead = dataclasses.replace(experience, ref_hidden=states.hidden)
        rewarded = dataclasses.replace(BASE, rewarded=True)

        def policy_alone(params):
            terms = policy_terms(
                params,
                experience=experience,
                kl_coef=0.0,
                num_tokens=jnp.float32(RESPONSE.sum()),
                num_responses=jnp.float32(3),
                recipe=BASE,
            )
            return terms.loss, terms.stats

        losses = {
            "within": loss_of(BASE, experience, teacher=teacher),
            "rewarded": loss_of(rewarded, ahead, teacher=head),
            "policy": policy_alone,
        }
        return {
            name: jax.value_and_grad(loss, has_aux=True)(params)
            for name, loss in losses.items()
        }, states.logprobs

    return compute(STUDENT, FROZEN, head())


def test_the_loss_is_the_mean_divergence_of_the_logits():
    results, logprobs = ways()
    expected = divergences(BASE, STUDENT)[RESPONSE].mean()
    (loss, stats), gradient = results["within"]
    assert float(loss) == pytest.approx(BETA * expected, rel=1e-5)
    (total, count) = stats["loss/divergence"]
    assert float(total) == pytest.approx(7 * expected, rel=1e-5)
    assert float(count) == 7
    assert "loss/policy" not in stats  # nothing reads advantages
    # Along a direction of all parameters at once.
    direction = tiny.params(tiny.GPT2, seed=5)
    step = 1e-4

    def moved(by):
        student = jax.tree.map(
            lambda x, d: np.asarray(x, np.float64) + by * np.asarray(d, np.float64),
            STUDENT,
            direction,
        )
        return BETA * divergences(BASE, student)[RESPONSE].mean()

    slope = (moved(step) - moved(-step)) / (2 * step)
    along = sum(
        float(jnp.vdot(g, d))
        for g, d in zip(
            jax.tree.leaves(gradient), jax.tree.leaves(direction), strict=True
        )
    )
    assert along == pytest.approx(slope, rel=1e-3)
    # The teacher's log-probs, of the response alone.
    text = TOKENS[1][MASK[1]].tolist()
    logits = oracles.decoder_logits(TEACHER, tiny.LLAMA, text)
    expected_logprob = oracles.log_softmax(logits[0], 0.7)[text[1]]
    assert float(logprobs[1, 2]) == pytest.approx(expected_logprob, rel=1e-4)
    np.testing.assert_array_equal(np.asarray(logprobs)[~RESPONSE], 0.0)


def test_a_reward_adds_the_policy_loss():
    """Stored hidden states of the teacher give the same result as the teacher."""
    results, _ = ways()
    (loss, stats), gradient = results["rewarded"]
    (alone, alone_stats), of_policy = results["policy"]
    (divergence, _), of_divergence = results["within"]
    assert float(loss) == pytest.approx(float(alone + divergence), rel=1e-5)
    parts = jax.tree.map(jnp.add, of_policy, of_divergence)
    for ours, theirs in zip(
        jax.tree.leaves(gradient), jax.tree.leaves(parts), strict=True
    ):
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert stats.keys() == alone_stats.keys() | {"loss/divergence"}
    # Its mismatch is reported without the policy loss too.
    name = "policy/sampler_mismatch"
    for theirs, ours in zip(
        alone_stats[name], results["within"][0][1][name], strict=True
    ):
        assert float(ours) == pytest.approx(float(theirs), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"divergence": "forward"},
        {"divergence": "jensen_shannon", "jsd_beta": 0.2},
        {"divergence": "jensen_shannon", "top_k": 2},
        {"divergence": "reverse", "top_k": 3},
        {"divergence": "reverse", "aggregation": "constant", "loss_scale_factor": 2.0},
    ],
)
def test_every_divergence_is_that_of_the_logits(options):
    recipe = dataclasses.replace(BASE, **options)
    experience, _ = recipe.experience(scored(), kl_coef=jnp.float32(BETA))
    loss, stats = jax.jit(loss_of(recipe, experience))(STUDENT)
    values = divergences(recipe, STUDENT)
    expected = values[RESPONSE].mean()
    assert float(masked.mean_stats(stats)["loss/divergence"]) == pytest.approx(
        expected, rel=1e-5
    )
    if recipe.aggregation == "constant":
        expected = values.sum() / 2.0 / 3
    assert float(loss) == pytest.approx(BETA * expected, rel=1e-5)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("penalty", [Penalty(placement=None), IN_REWARD])
def test_an_iteration_is_the_same_wherever_the_teacher_runs(penalty):
    """Inside the update or before it, and at once or in micro-batches."""
    recipe = dataclasses.replace(
        BASE,
        num_minibatches=2,
        penalty=penalty,
        whiten_advantages=not penalty.in_reward,
    )
    key = jax.random.key(3)
    prompts = Prompts(
        tokens=jnp.ones((8, P), jnp.int32),
        mask=jnp.ones((8, P), bool),
        index=jnp.arange(8, dtype=jnp.int32),
        sample=jnp.zeros(8, jnp.int32),
    )
    train = state.grpo_state(
        policy=STUDENT,
        policy_optimizer=recipe.policy_optimizer,
        kl=kl_control.fixed(BETA),
    )
    within, stats, scored_within = jax.jit(
        functools.partial(
            iteration, reward=lambda rollout: jnp.zeros(8, jnp.float32), recipe=recipe
        )
    )(train, prompts=prompts, frozen=FrozenModels(reference=FROZEN), key=key)
    rollout = jax.jit(functools.partial(sample, recipe=recipe))(
        STUDENT, prompts=prompts, key=key
    )
    states = distill.teacher_states(
        FROZEN, rollout=rollout, model=tiny.GPT2, max_new_tokens=R, temperature=0.7
    )
    for size in (None, 2):
        program = functools.partial(
            distill.learn, recipe=dataclasses.replace(recipe, micro_batch_size=size)
        )
        before, other, scored_before = jax.jit(program)(
            train,
            rollout=rollout,
            scores=None,
            frozen=FrozenModels(reference=head()),
            ref_output=states,
            key=key,
        )
        for ours, theirs in zip(
            jax.tree.leaves(before.policy), jax.tree.leaves(within.policy), strict=True
        ):
            np.testing.assert_allclose(ours, theirs, atol=1e-6)
        means, expected_means = masked.mean_stats(other), masked.mean_stats(stats)
        assert means.keys() == expected_means.keys()
        for name, value in means.items():
            assert float(value) == pytest.approx(
                float(expected_means[name]), abs=1e-5
            ), name
    np.testing.assert_allclose(
        scored_before.ref_logprobs, scored_within.ref_logprobs, atol=1e-5
    )
    if penalty.in_reward:
        assert float(masked.mean_stats(stats)["objective/non_score_reward"]) != 0.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "sideways"}, "divergence: expected one of None, 'reverse'"),
        ({"jsd_beta": 0.3}, "jsd_beta: expected none with divergence reverse"),
        (
            {"divergence": "jensen_shannon", "jsd_beta": 1.0},
            "beta: expected a number",
        ),
        ({"top_k": 0}, "top_k: expected a finite number above 0, got 0"),
        ({"penalty": IN_LOSS}, "penalty: expected k1, k2 or k3 in the reward or"),
        ({"penalty": Penalty("exact")}, "got exact in the reward"),
        ({"divergence": None}, "divergence: expected one, or penalty.placement"),
        (
            {"divergence": None, "penalty": IN_REWARD, "top_k": 3},
            "top_k: expected none with divergence None",
        ),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        distill.DistillRecipe(**options)


def test_the_head_of_a_teacher_in_host_memory_is_copied_to_the_device():
    far = frozen.freeze(TEACHER, model=tiny.LLAMA, memory="pinned_host")
    copied = distill.head_of(far, model=tiny.GPT2, place=lambda params: params)
    leaves, here = jax.tree.leaves(copied.stored), jax.tree.leaves(head().stored)
    for leaf, near in zip(leaves, here, strict=True):
        assert leaf.sharding.memory_kind == near.sharding.memory_kind != "pinned_host"
        np.testing.assert_array_equal(leaf, near)


def test_what_reads_advantages():
    assert not BASE.reads_advantages
    for options in (
        {"rewarded": True},
        {"penalty": IN_REWARD},
        {"entropy_coef": 0.1},
        {"stop_approxkl": 1.0},
        {"max_ratio_mean": 2.0},
    ):
        assert dataclasses.replace(BASE, **options).reads_advantages


@pytest.mark.parametrize(
    "options",
    [
        {"surrogate": Clip(0.3)},
        {"surrogate": CISPO()},
        {"whiten_advantages": False},
        {"sampler_correction": Truncate(2.0)},
        {"scores": ScoreShaping(clip=1.0)},
    ],
)
def test_without_a_reward_the_options_of_its_loss_are_refused(options):
    with pytest.raises(InputError, match="expected none without a reward"):
        dataclasses.replace(BASE, **options)
    rewarded = dataclasses.replace(BASE, rewarded=True, **options)
    assert rewarded.reads_advantages
    bonus = dataclasses.replace(BASE, entropy_coef=0.1)  # which is no reward
    with pytest.raises(InputError, match="expected none without a reward"):
        dataclasses.replace(bonus, **options)
    shown = {"group_size": 2, "success_score": 1.0, **options}
    with pytest.raises(InputError, match="success_score, which alone reads the reward"):
        dataclasses.replace(bonus, rewarded=True, **shown)


def test_a_guard_reads_the_ratio_and_no_advantages():
    guarded = dataclasses.replace(BASE, max_ratio_mean=2.0)
    sequences = Clip(ratio_level="sequence")
    assert dataclasses.replace(guarded, surrogate=sequences).reads_advantages
    assert dataclasses.replace(guarded, sampler_correction=Truncate(2.0)).weighted
    with pytest.raises(InputError, match="whiten_advantages: expected none without"):
        dataclasses.replace(guarded, whiten_advantages=False)


@pytest.mark.parametrize("score", [math.nan, math.inf])
def test_a_score_that_no_response_has_is_refused(score):
    with pytest.raises(InputError, match="success_score: expected a finite number"):
        dataclasses.replace(BASE, group_size=2, rewarded=True, success_score=score)


def test_what_is_missing_is_told():
    experience, _ = BASE.experience(scored(), kl_coef=jnp.float32(BETA))
    with pytest.raises(InputError, match="expected the teacher as the reference"):
        jax.eval_shape(loss_of(BASE, experience, teacher=None), STUDENT)


@pytest.mark.slow
@pytest.mark.parametrize("divergence", ["reverse", "jensen_shannon"])
def test_no_array_is_over_tokens_and_vocabulary(divergence):
    """Checks the compiled update with a teacher of twice the width.

    No array of the program, forward or backward, has an entry for every response token
    and every vocabulary entry, and its temporaries are smaller than such an array.
    """
    rows, prompt, vocab, width = 8, 8, 65_536, 32
    size = {"num_heads": 2, "max_positions": 128}
    student = config.gpt2(vocab_size=vocab, hidden_size=width, num_layers=1, **size)
    teacher = config.gpt2(vocab_size=vocab, hidden_size=2 * width, num_layers=2, **size)
    recipe = distill.Distill(
        divergence=divergence,
        model=student,
        policy_optimizer=optax.sgd(0.1),
        max_new_tokens=112,
        stop_ids=(3,),
    )
    columns = prompt + recipe.max_new_tokens

    def learn(train, teacher, rollout, key):
        states = distill.teacher_states(
            teacher,
            rollout=rollout,
            model=student,
            max_new_tokens=recipe.max_new_tokens,
            temperature=1.0,
        )
        return distill.learn(
            train,
            rollout=rollout,
            scores=None,
            frozen=FrozenModels(reference=teacher),
            ref_output=states,
            key=key,
            recipe=recipe,
        )

    def arguments():
        floats = jnp.zeros((rows, columns), jnp.float32)
        mask, index = jnp.ones((rows, columns), bool), jnp.arange(rows)
        tokens = jnp.zeros((rows, columns), jnp.int32)
        rollout = Rollout(tokens, mask, mask, floats, floats, index, index)
        train = state.grpo_state(
            policy=decoder.init(jax.random.key(0), model=student),
            policy_optimizer=recipe.policy_optimizer,
            kl=kl_control.fixed(1.0),
        )
        of_teacher = frozen.Frozen(
            decoder.init(jax.random.key(1), model=teacher),
            jnp.zeros((1, 2), jnp.uint32),
            jnp.zeros((1, 2), jnp.uint32),
            model=teacher,
        )
        return train, of_teacher, rollout, jax.random.key(2)

    program = jax.jit(learn).lower(*jax.eval_shape(arguments)).compile()
    forbidden = rows * recipe.max_new_tokens * vocab
    shapes = re.findall(r"(?:f32|bf16|pred|s32)\[([\d,]+)\]", program.as_text())
    largest = max(math.prod(map(int, shape.split(","))) for shape in set(shapes))
    assert len(set(shapes)) > 50
    assert largest < forbidden / 3
    assert program.memory_analysis().temp_size_in_bytes < 4 * forbidden


def test_counts_are_those_of_the_minibatch(monkeypatch):
    """Parts use the counts of the whole; a row without a response does not count."""
    loss_options = {}

    def recorded(policy, **options):
        loss_options.update(options)
        return jnp.zeros(()), {}

    monkeypatch.setattr(distill.recipe, "distillation_loss", recorded)
    mask = jnp.asarray(RESPONSE).at[1].set(False)
    minibatch = types.SimpleNamespace(response_mask=mask)
    _, loss = BASE.minibatch_loss(
        minibatch, kl_coef=0.3, frozen=FrozenModels(reference=FROZEN)
    )
    loss((STUDENT, None), types.SimpleNamespace(response_mask=mask[:1]))
    assert (loss_options["num_tokens"], loss_options["num_responses"]) == (5.0, 2.0)
    assert (loss_options["kl_coef"], loss_options["recipe"]) == (0.3, BASE)
    assert loss_options["frozen"].reference is FROZEN


def test_the_divergence_reads_the_columns_of_the_response(monkeypatch):
    """No model is run."""
    divergence_options = {}
    module = import_module("rlhf_jax.algorithms.distill.loss")

    def exact_kl(*_, **options):
        divergence_options.update(options)
        return jnp.where(RESPONSE, jnp.float32(2), 0.0)

    monkeypatch.setattr(module, "exact_kl", exact_kl)
    monkeypatch.setattr(
        import_module("rlhf_jax.models.packing").decoder,
        "hidden_states",
        lambda *_, **__: jnp.zeros((*MASK.shape, tiny.GPT2.hidden_size)),
    )
    experience, _ = BASE.experience(scored(), kl_coef=jnp.float32(BETA))
    loss, stats = module.distillation_loss(
        STUDENT,
        experience=experience,
        kl_coef=BETA,
        num_tokens=jnp.float32(RESPONSE.sum()),
        num_responses=jnp.float32(3),
        recipe=BASE,
        frozen=FrozenModels(reference=FROZEN),
    )
    assert divergence_options["texts"].first_column == P
    assert divergence_options["temperature"] == 0.7
    assert [divergence_options[name] for name in ("model", "ref_model")] == [
        tiny.GPT2,
        tiny.LLAMA,
    ]
    assert float(masked.mean_stats(stats)["loss/divergence"]) == 2
    assert float(loss) == pytest.approx(2 * BETA, rel=1e-6)


def teacher_prompts(prompts):
    width = max(map(len, prompts))
    return distill.TeacherPrompts(
        tokens=jnp.array([[0] * (width - len(x)) + x for x in prompts], jnp.int32),
        mask=jnp.array([[False] * (width - len(x)) + [True] * len(x) for x in prompts]),
    )


def test_a_teacher_reads_prompts_of_its_own():
    """Its prompts are looked up by data-set row, and wider than the student's."""
    demonstrated = [[5, 6, 7, 1], [2, 9], [4, 4, 8]]
    rows = [2, 0, 1]  # of the data set, of the rows of the batch
    rollout = dataclasses.replace(scored().rollout, index=jnp.array(rows, jnp.int32))
    shape = {"model": tiny.GPT2, "max_new_tokens": R, "temperature": 0.7}
    states = toys.jit(distill.teacher_states, static_argnames=tuple(shape))(
        FROZEN, rollout=rollout, prompts=teacher_prompts(demonstrated), **shape
    )
    expected = np.zeros(MASK.shape)
    for row, number in enumerate(rows):
        prompt = demonstrated[number]
        response = TOKENS[row][RESPONSE[row]].tolist()
        logits = oracles.decoder_logits(TEACHER, tiny.LLAMA, prompt + response)
        for t, token in enumerate(response):
            logprobs = oracles.log_softmax(logits[len(prompt) + t - 1], 0.7)
            expected[row, P + t] = logprobs[token]
    np.testing.assert_allclose(states.logprobs, expected, atol=1e-5)
    # The states are where the loss reads the student's: one column before each token.
    assert states.hidden.shape[:2] == MASK.shape
    read = policy.logprobs_from_hidden(
        TEACHER,
        states.hidden,
        texts=texts_of(jnp.asarray(TOKENS), jnp.asarray(MASK), first_column=P),
        model=tiny.LLAMA,
        temperature=0.7,
    )[0]
    np.testing.assert_allclose(np.where(RESPONSE, read, 0), expected, atol=1e-5)


def test_a_teacher_reads_by_row_of_a_batch_that_it_teaches():
    """The data-set index is not used here."""
    shown = [[5, 6, 7, 1], [2, 9], [4, 4, 8]]
    shape = {"model": tiny.GPT2, "max_new_tokens": R, "temperature": 0.7}
    program = toys.jit(distill.teacher_states, static_argnames=tuple(shape))
    rollout = scored().rollout
    numbered = dataclasses.replace(rollout, index=jnp.arange(3, dtype=jnp.int32))
    expected = program(
        FROZEN, rollout=numbered, prompts=teacher_prompts(shown), **shape
    )
    taught = jnp.array([True, False, True])
    prompts = dataclasses.replace(teacher_prompts(shown), taught=taught)
    states = program(FROZEN, rollout=rollout, prompts=prompts, **shape)
    np.testing.assert_array_equal(states.logprobs, expected.logprobs)
    np.testing.assert_array_equal(states.taught, taught)
    assert expected.taught is None


def test_what_is_not_taught_is_in_no_loss_and_no_divisor():
    """The result equals that of a batch of the taught responses alone."""
    recipe = dataclasses.replace(
        BASE, group_size=3, success_score=1.0, rewarded=True, num_epochs=1
    )
    shape = {"model": tiny.GPT2, "max_new_tokens": R, "temperature": 0.7}
    rollout = scored().rollout

    @jax.jit
    def learned(taught):
        start = state.grpo_state(
            policy=jax.tree.map(jnp.copy, STUDENT),
            policy_optimizer=recipe.policy_optimizer,
            kl=kl_control.fixed(1.0),
        )
        output = distill.teacher_states(FROZEN, rollout=rollout, **shape)
        after, stats, _ = distill.learn(
            start,
            rollout=rollout,
            scores=jnp.array([1.0, 0.0, 1.0]),
            frozen=FrozenModels(reference=FROZEN),
            key=jax.random.key(0),
            recipe=recipe,
            ref_output=dataclasses.replace(output, taught=taught),
        )
        return after.policy, masked.mean_stats(stats)

    taught = jnp.array([True, False, True])
    policy_after, means = learned(taught)
    mask = RESPONSE & np.asarray(taught)[:, None]
    values = divergences(recipe, STUDENT)
    assert float(means["loss/divergence"]) == pytest.approx(
        values[mask].mean(), rel=1e-4
    )
    assert float(means["response/taught"]) == pytest.approx(2 / 3)
    _, whole = learned(jnp.ones(3, bool))
    assert float(whole["loss/divergence"]) == pytest.approx(
        values[RESPONSE].mean(), rel=1e-4
    )
    assert "loss/policy" not in means
    none, nothing = learned(jnp.zeros(3, bool))
    assert float(nothing["policy/grad_norm"]) == 0
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), none, STUDENT)
    assert max(jax.tree.leaves(moved)) == 0
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), policy_after, none)
    assert max(jax.tree.leaves(moved)) > 1e-5


@pytest.mark.parametrize("option", ["entropy_coef", "stop_approxkl"])
def test_a_reward_that_shows_demonstrations_is_in_no_advantage(option):
    """This holds also if another option makes the policy loss necessary."""
    recipe = dataclasses.replace(BASE, group_size=3, rewarded=True, **{option: 0.1})
    assert recipe.reads_advantages
    experience, _ = recipe.experience(scored(), kl_coef=BETA)
    assert jnp.abs(experience.advantages).max() > 0.1
    shown = dataclasses.replace(recipe, success_score=1.0)
    experience, _ = shown.experience(scored(), kl_coef=BETA)
    assert shown.reads_advantages
    np.testing.assert_array_equal(experience.advantages, 0)


def test_a_teacher_that_reads_the_same_is_the_teacher():
    own = [TOKENS[row, :P][MASK[row, :P]].tolist() for row in range(3)]
    shape = {"model": tiny.GPT2, "max_new_tokens": R, "temperature": 0.7}
    program = toys.jit(distill.teacher_states, static_argnames=tuple(shape))
    rollout = scored().rollout
    wide = teacher_prompts([*own, [1] * 5])  # a row that is not in the batch
    same = program(FROZEN, rollout=rollout, prompts=wide, **shape)
    plain = program(FROZEN, rollout=rollout, **shape)
    np.testing.assert_allclose(same.logprobs, plain.logprobs, atol=1e-5)
    before = RESPONSE[:, 1:]  # the state that a response token is drawn from
    np.testing.assert_allclose(
        same.hidden[:, :-1][before], plain.hidden[:, :-1][before], atol=1e-4
    )
