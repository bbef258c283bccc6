"""Replayed experts of the sampler or the previous policy, up to the loss."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toy_turns
import toys

from rlhf_jax import config, frozen, grpo, kl_control, masked, state
from rlhf_jax.algorithms.flow import teacher
from rlhf_jax.algorithms.flow.rollout import response_logprobs
from rlhf_jax.algorithms.policy_gradient import routing_replay
from rlhf_jax.algorithms.policy_gradient.corrections import Recompute
from rlhf_jax.algorithms.policy_gradient.iteration import make_experience, sample
from rlhf_jax.algorithms.policy_gradient.routing_replay import RoutingReplay
from rlhf_jax.algorithms.policy_gradient.update import update
from rlhf_jax.data import layouts
from rlhf_jax.data.layouts.arrays import Form
from rlhf_jax.data.layouts.packer import spans
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import decoder
from rlhf_jax.models.experts import OWN
from rlhf_jax.roles.reference.frozen import FrozenModels, Further

MODEL = dataclasses.replace(toys.LLAMA, experts=config.Experts(4, 2))
RECIPE = grpo.GRPO(
    model=MODEL,
    policy_optimizer=optax.sgd(0.1),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    group_size=2,
    sampler_correction=Recompute(),
)
sampled = toys.jit(sample, static_argnames=("recipe",))
made = toys.jit(make_experience, static_argnames=("recipe",))
updated = toys.jit(update, static_argnames=("recipe",))
SCORES = np.array([0.5, -1.0, 0.25, 2.0], np.float32)


@functools.cache
def drawn(*, recorded, **options):
    """Two responses to each of two prompts, which are read once per group."""
    alone = toys.prompts((4, 4, 2, 2))
    first = np.array([0, 0, 2, 2])
    prompts = dataclasses.replace(
        alone,
        tokens=alone.tokens[first],
        mask=alone.mask[first],
        index=toys.array(first, np.int32),
        sample=toys.array([0, 1, 0, 1], np.int32),
    )
    replay = RoutingReplay("sampler") if recorded else None
    recipe = dataclasses.replace(RECIPE, routing_replay=replay, **options)
    key = jax.random.key(0)
    return sampled(toys.params(MODEL), prompts=prompts, key=key, recipe=recipe)


@functools.cache
def experience(recipe, *, flipped=False):
    """An experience, optionally from a sampler with other experts."""
    params = toys.params(MODEL)
    start = state.grpo_state(
        policy=params,
        policy_optimizer=recipe.policy_optimizer,
        kl=kl_control.fixed(0.1),
    )
    replay = recipe.routing_replay
    rollout = drawn(recorded=replay is not None and replay.source == "sampler")
    if flipped:
        other = jnp.where(rollout.experts < 0, -1, (rollout.experts + 1) % 4)
        rollout = dataclasses.replace(rollout, experts=other)
    return made(
        start,
        rollout=rollout,
        scores=toys.array(SCORES),
        frozen=FrozenModels(reference=frozen.freeze(params)),
        recipe=recipe,
    )


@pytest.mark.slow
def test_old_and_new_logprobs_replay_what_the_sampler_chose():
    recipe = dataclasses.replace(RECIPE, routing_replay=RoutingReplay("sampler"))
    start, replayed, stats, scored = experience(recipe)
    means = masked.mean_stats(stats)
    assert float(means["policy/sampler_mismatch"]) < 1e-5
    np.testing.assert_allclose(scored.ref_logprobs, replayed.old_logprobs, atol=1e-5)
    # Experts of another sampler move old and new log-probs alike, and without
    # `reference` the reference not at all.
    start, other, stats, moved = experience(recipe, flipped=True)
    assert float(masked.mean_stats(stats)["policy/sampler_mismatch"]) > 1e-3
    np.testing.assert_allclose(moved.ref_logprobs, scored.ref_logprobs, atol=1e-6)
    key, models = jax.random.key(1), FrozenModels()
    _, stats = updated(start, experience=other, key=key, recipe=recipe, frozen=models)
    means = masked.mean_stats(stats)
    assert float(means["policy/ratio_max"]) == pytest.approx(1, abs=1e-5)
    assert 0 < float(means["router/entropy"]) <= np.log(4)
    # Without its experts it is another policy than `old_logprobs` are of.
    unplayed = dataclasses.replace(other, experts=None)
    _, stats = updated(
        start, experience=unplayed, key=key, recipe=recipe, frozen=models
    )
    assert float(masked.mean_stats(stats)["policy/ratio_max"]) > 1.001


@pytest.mark.slow
def test_the_reference_replays_by_choice_and_old_records_the_trainer():
    both = RoutingReplay("sampler", reference=True)
    _, _, _, scored = experience(
        dataclasses.replace(RECIPE, routing_replay=both), flipped=True
    )
    np.testing.assert_allclose(
        scored.ref_logprobs, scored.rollout.old_logprobs, atol=1e-5
    )
    further = Further(frozen.freeze(toys.params(MODEL)), weight=0.5)
    start, *_ = experience(RECIPE)
    _, of_two, _, scored = made(
        start,
        rollout=scored.rollout,
        scores=toys.array(SCORES),
        frozen=FrozenModels(further.frozen, further={"b": further}),
        recipe=dataclasses.replace(RECIPE, routing_replay=both),
    )
    np.testing.assert_allclose(
        of_two.further["b"].logprobs, scored.ref_logprobs, atol=1e-6
    )
    old = dataclasses.replace(RECIPE, routing_replay=RoutingReplay("old"))
    _, recorded, _, scored = experience(old)
    mask = np.asarray(scored.rollout.mask)
    assert recorded.experts.shape == (*mask.shape, MODEL.num_layers, 2)
    assert (np.asarray(recorded.experts)[mask] >= 0).all()


@pytest.mark.slow
def test_a_teacher_replays_what_the_student_drew_whatever_it_reads():
    rollout = drawn(recorded=True)
    other = jnp.where(rollout.experts < 0, -1, (rollout.experts + 1) % 4)
    rollout = dataclasses.replace(rollout, experts=other)
    shape = {"model": MODEL, "max_new_tokens": toys.SIZE, "temperature": 0.7}
    params = toys.params(MODEL)
    expected = toys.jit(functools.partial(response_logprobs, **shape))(
        params, rollout=rollout
    )
    states = toys.jit(
        functools.partial(teacher.teacher_states, **shape), static_argnames=("replays",)
    )
    own = jax.tree.map(lambda x: x[:, : -toys.SIZE], (rollout.tokens, rollout.mask))
    # The same prompts, without a record: their states are of other experts.
    prompts = teacher.TeacherPrompts(*own, taught=jnp.ones(4, bool))
    reference = frozen.freeze(params)
    replayed = states(reference, rollout=rollout, replays=True).logprobs
    np.testing.assert_allclose(replayed, expected, atol=1e-5)
    chosen = states(reference, rollout=rollout).logprobs
    assert float(np.abs(chosen - expected).max()) > 1e-3
    behind = states(reference, rollout=rollout, prompts=prompts, replays=True).logprobs
    assert float(np.abs(behind - chosen).max()) > 1e-3


@pytest.mark.slow
def test_a_minibatch_without_a_token_is_not_skipped():
    start, batch, _, _ = experience(RECIPE)
    empty = dataclasses.replace(
        batch, response_mask=jnp.zeros_like(batch.response_mask)
    )
    after, stats = updated(
        start,
        experience=empty,
        key=jax.random.key(1),
        recipe=dataclasses.replace(RECIPE, balance_coef=1.0),
        frozen=FrozenModels(),
    )
    assert int(after.skipped) == 0
    assert float(stats["policy/grad_norm"][0]) == 0
    assert toys.leaves_equal(after.policy, start.policy)


@pytest.mark.slow
def test_greedy_responses_beside_the_samples_are_recorded_too():
    rollout = drawn(recorded=True, baseline="greedy")
    _, routing = toys.jit(decoder.hidden_and_routing, static_argnames=("model",))(
        toys.params(MODEL), model=MODEL, tokens=rollout.tokens, mask=rollout.mask
    )
    record = np.asarray(rollout.experts)
    ran = record[..., 0, 0] != OWN
    # All but the last token of each row.
    np.testing.assert_array_equal(
        ran.sum(axis=1), np.asarray(rollout.mask).sum(axis=1) - 1
    )
    np.testing.assert_array_equal(record[ran], np.asarray(routing.chosen)[ran])


@pytest.mark.slow
def test_the_record_and_the_step_of_continuous_batching_are_those_of_a_plain_batch():
    """Decodes two of four rows at a time; the second group replaces the first."""
    plain = dataclasses.replace(RECIPE, routing_replay=RoutingReplay("sampler"))
    batched = dataclasses.replace(plain, continuous_batching=2)
    of_plain, of_batched = experience(plain), experience(batched)
    np.testing.assert_array_equal(
        of_batched[3].rollout.experts, of_plain[3].rollout.experts
    )
    updates = [
        updated(
            start,
            experience=made,
            key=jax.random.key(1),
            recipe=recipe,
            frozen=FrozenModels(),
        )
        for recipe, (start, made, _, _) in ((plain, of_plain), (batched, of_batched))
    ]
    one, other = (masked.mean_stats(stats) for _, stats in updates)
    np.testing.assert_allclose(other["loss/policy"], one["loss/policy"], rtol=1e-5)
    np.testing.assert_allclose(
        other["policy/grad_norm"], one["policy/grad_norm"], rtol=1e-4
    )


def test_options_that_cannot_act_are_named():
    with pytest.raises(InputError, match="routing_replay: expected a mixture of exp"):
        dataclasses.replace(RECIPE, model=toys.LLAMA, routing_replay=RoutingReplay())
    with pytest.raises(InputError, match="balance_coef: expected a mixture of expert"):
        dataclasses.replace(RECIPE, model=toys.LLAMA, balance_coef=0.01)
    kl, optimizer = kl_control.fixed(0.1), RECIPE.policy_optimizer
    start = state.grpo_state(
        policy=toys.params(MODEL), policy_optimizer=optimizer, kl=kl
    )
    with pytest.raises(InputError, match="got one without; sample with the library's"):
        made(
            start,
            rollout=toy_turns.rollout(),
            scores=np.zeros(6, np.float32),
            frozen=FrozenModels(),
            recipe=dataclasses.replace(RECIPE, routing_replay=RoutingReplay()),
        )


@pytest.mark.slow
def test_the_balance_loss_moves_the_router_alone_of_a_batch_without_advantages():
    start, batch, _, _ = experience(RECIPE)
    still = dataclasses.replace(batch, advantages=jnp.zeros_like(batch.advantages))
    balanced = dataclasses.replace(RECIPE, balance_coef=1.0)
    moved = {}
    for name, how in {"on": balanced, "off": RECIPE}.items():
        after, _ = updated(
            start,
            experience=still,
            key=jax.random.key(1),
            recipe=how,
            frozen=FrozenModels(),
        )
        router = after.policy["layers"]["experts"]["router"]["weight"]
        before = start.policy["layers"]["experts"]["router"]["weight"]
        moved[name] = float(np.abs(np.asarray(router - before)).max())
    assert moved["off"] < 1e-6 < 1e-4 < moved["on"]


@pytest.mark.slow
def test_a_prompt_that_a_group_shares_is_recorded_in_all_of_its_rows():
    """Another packing may put the prompt into another row."""
    old = dataclasses.replace(RECIPE, routing_replay=RoutingReplay("old"))
    rollout = drawn(recorded=False)
    lengths, columns = np.asarray(spans(rollout)), rollout.tokens.shape[1]
    form = Form(
        rows=4,
        num_minibatches=1,
        max_new_tokens=toys.SIZE,
        width=2 * columns,
        group_size=2,
    )
    packer = layouts.Packer(form, sample=lengths)
    packed = packer(lengths, np.arange(4)[None], columns=columns)
    assert packed is not None
    packing = packed.batch.at_its_size()
    record = toys.jit(routing_replay.recorded, static_argnames=("recipe",))
    arguments = {"recipe": old, "params": toys.params(MODEL)}
    alone = record(rollout, packing=None, **arguments).experts
    shared = record(rollout, packing=packing, **arguments).experts
    mask = np.asarray(rollout.mask)
    read = mask[:, :-1] & mask[:, 1:]  # no state is read of the last token
    np.testing.assert_array_equal(
        np.asarray(shared)[:, :-1][read], np.asarray(alone)[:, :-1][read]
    )
