"""Packed rows give the numbers of padded ones: scores, losses, stats and gradients."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
import toys

from rlhf_jax import batch, critic, frozen, grpo, kl_control, ppo, rewards, state
from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.policy_gradient.corrections import Recompute
from rlhf_jax.algorithms.policy_gradient.recipe import CISPO, SAPO, Clip
from rlhf_jax.algorithms.policy_gradient.update import minibatches
from rlhf_jax.algorithms.ppo import critic_apart
from rlhf_jax.data import layouts
from rlhf_jax.data.layouts.arrays import Form
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional import aggregation
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.models.lora import LoRA, init
from rlhf_jax.models.packing import at_size
from rlhf_jax.roles.reference.frozen import FrozenModels

KEY = jax.random.key(9)
PROMPTS, SIZE, ROWS = 4, 10, 8
COLUMNS = PROMPTS + SIZE
LR = 0.5
# Prompts of a token, a response of one, one of full length and one of none.
LENGTHS = np.array([[4, 3], [1, 1], [3, 10], [2, 2], [4, 1], [1, 4], [2, 0], [3, 2]])
FIXED = {"policy_optimizer": optax.sgd(LR), "max_new_tokens": SIZE, "stop_ids": (1,)}
GROUPS = grpo.GRPO(
    **FIXED,
    model=toys.GPT2,
    group_size=4,
    temperature=0.7,
    entropy_coef=0.1,
    num_minibatches=2,
)
EXACT = ppo.PPO(
    **FIXED,
    model=toys.GPT2,
    critic_model=toys.GPT2,
    critic_optimizer=optax.sgd(LR),
    num_epochs=1,
    num_minibatches=2,
    penalty=Penalty(value_estimator="exact", placement="both"),
    shared_trunk=True,
    value_after_stop=True,
    sampler_correction=Recompute(),
    whiten_advantages="minibatch",
)


def rollout(vocab_size: int = toys.GPT2.vocab_size) -> batch.Rollout:
    rng = np.random.default_rng(0)
    column = np.arange(COLUMNS)[None]
    prompt, response = LENGTHS[:, :1], LENGTHS[:, 1:]
    answered = (column >= PROMPTS) & (column < PROMPTS + response)
    noise = rng.normal(-2.0, 0.5, answered.shape)
    return batch.Rollout(
        # Padding holds tokens too, which nothing may read.
        tokens=jnp.asarray(rng.integers(0, vocab_size, answered.shape), jnp.int32),
        mask=jnp.asarray(
            answered | ((column < PROMPTS) & (column >= PROMPTS - prompt))
        ),
        response_mask=jnp.asarray(answered),
        old_logprobs=jnp.asarray(np.where(answered, noise, 0), jnp.float32),
        entropy=jnp.zeros(answered.shape),
        index=jnp.arange(ROWS, dtype=jnp.int32) // 4,
        sample=jnp.arange(ROWS, dtype=jnp.int32) % 4,
    )


def packing(
    recipe, *, key, devices: int = 1, max_tokens: int | None = None, group_size: int = 1
):
    lengths = LENGTHS.copy()
    lengths[:, 0] = np.repeat(lengths[::group_size, 0], group_size)
    form = Form(
        rows=ROWS,
        num_minibatches=recipe.num_minibatches,
        max_new_tokens=SIZE,
        width=COLUMNS,
        devices=devices,
        after_stop=getattr(recipe, "value_after_stop", False),
        max_tokens=max_tokens,
        group_size=group_size,
    )
    order = np.asarray(minibatches(key, rows=ROWS, recipe=recipe))
    # Of the lengths that come, and one branch, so that little is compiled.
    packer = layouts.Packer(form, sample=lengths)
    for name in ("batch", "minibatch"):
        sizes = getattr(packer, name)
        setattr(packer, name, sizes._replace(sizes=sizes.sizes[-1:]))
    packed = packer(lengths, order, columns=COLUMNS)
    assert packed is not None
    return packed


def close(output, expected, *, atol=1e-5):
    """Whether trees of gradients or moves agree within 1e-5 of the largest entry."""
    largest = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert largest > 1e-3
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol * largest),
        output,
        expected,
    )


def moved(after, before):
    return jax.tree.map(jnp.subtract, after, before)


learn = toys.jit(ppo.learn, static_argnames=("recipe",))


def learned(packed):
    policy = toys.params()
    start = state.ppo_state(
        policy=policy,
        critic={
            "score": toys.perturbed(
                critic.on_policy_trunk(model=toys.GPT2)["score"], seed=2, scale=0.3
            )
        },
        policy_optimizer=EXACT.policy_optimizer,
        critic_optimizer=EXACT.critic_optimizer,
        kl=kl_control.fixed(0.2),
    )
    after, stats, scored = learn(
        start,
        rollout=rollout(),
        scores=jnp.asarray(np.linspace(-1, 1, ROWS), jnp.float32),
        frozen=FrozenModels(reference=toys.freeze(toys.params(seed=5))),
        key=KEY,
        recipe=EXACT,
        packing=packed,
    )
    moves = moved((after.policy, after.critic), (start.policy, start.critic))
    return moves, stats, dataclasses.replace(scored, kl_stats={})


@pytest.fixture(scope="module")
def padded():
    return learned(None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "max_tokens", [pytest.param(None, marks=pytest.mark.long), COLUMNS]
)
def test_an_iteration_of_everything(padded, max_tokens):
    """Exact KL in reward and loss, values on the trunk and after the stop, old
    log-probs recomputed, whitening in the minibatch, in one part or in several."""
    packed = packing(EXACT, key=ppo.shuffle_key(KEY), max_tokens=max_tokens)
    assert (packed.members.shape[1] > 1) == (max_tokens is not None)
    moves, stats, scored = learned(packed)
    for mine, other in zip(
        scored_arrays(scored), scored_arrays(padded[2]), strict=True
    ):
        np.testing.assert_allclose(mine, other, atol=1e-5)
    assert stats.keys() == padded[1].keys()
    for name, value in stats.items():
        np.testing.assert_allclose(
            np.float32(value[0]), padded[1][name][0], rtol=2e-5, atol=1e-5, err_msg=name
        )
    close(moves, padded[0])


def scored_arrays(scored):
    rollout = scored.rollout
    return scored.values, scored.ref_logprobs, scored.kl, rollout.old_logprobs


update = jax.jit(grpo.update, static_argnames=("recipe",))


def experience(vocab_size: int = toys.GPT2.vocab_size):
    return toys.experience(rollout(vocab_size))


def updated(recipe, policy, packed, *, base=None, mesh=None, batched=None):
    start = state.grpo_state(
        policy=policy,
        policy_optimizer=recipe.policy_optimizer,
        kl=kl_control.fixed(0.2),
    )
    batched = experience(recipe.model.vocab_size) if batched is None else batched
    run = update
    if mesh is not None:
        start, base = sharding.place((start, base), mesh=mesh)
        batched = row_sharding.put_rows(batched, mesh=mesh)
        run = jax.jit(sharding.on(mesh, grpo.update), static_argnames=("recipe",))
    after, stats = run(
        start,
        experience=batched,
        key=KEY,
        recipe=recipe,
        frozen=FrozenModels(base=base),
        packing=packed,
    )
    return moved(jax.device_get(after.policy), policy), stats


@pytest.mark.slow
def test_parts_cut_by_tokens_are_one_step():
    """A step of one part and one of two; parts without responses have no effect."""
    packed = packing(GROUPS, key=KEY, max_tokens=COLUMNS)
    assert packed.members.shape[:2] == (2, 4)
    np.testing.assert_array_equal(packed.members.any(axis=2).sum(axis=1), [1, 2])
    policy = toys.params()
    moves, stats = updated(GROUPS, policy, packed)
    expected, padded_stats = updated(GROUPS, policy, None)
    close(moves, expected)
    assert stats.keys() == padded_stats.keys()
    for name, value in stats.items():
        np.testing.assert_allclose(
            np.float32(value[0]), padded_stats[name][0], rtol=1e-4, atol=1e-5
        )


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "choices",
    [
        {"surrogate": Clip(0.02, 0.03, ratio_level="sequence")},
        {
            "surrogate": Clip(ratio_level="sequence_token"),
            "aggregation": "sequence_mean",
        },
        {"surrogate": CISPO(clip_range=1.0), "aggregation": "constant"},
        {"surrogate": SAPO(), "aggregation": "prompt_mean"},
    ],
    ids=lambda choices: " ".join(map(str, choices.values())),
)
@pytest.mark.parametrize("sharded", [False, True])
def test_ratios_and_surrogates_in_parts(choices, sharded):
    """A part ignores responses of other parts and does not count them in divisors."""
    mesh = MeshShape(data=2, fsdp=2, tensor=2).make() if sharded else None
    recipe = dataclasses.replace(GROUPS, num_minibatches=1, **choices)
    batched = experience()
    noise = np.random.default_rng(0).normal(0, 0.3, batched.tokens.shape)
    moved_away = jnp.where(batched.response_mask, noise, 0.0).astype(jnp.float32)
    # Rows that an algorithm leaves out of the loss.
    mask = batched.response_mask.at[1].set(False)
    batched = dataclasses.replace(
        batched, old_logprobs=batched.old_logprobs + moved_away, response_mask=mask
    )
    if recipe.aggregation == "prompt_mean":
        scale = aggregation.prompt_scale(mask, group_size=4)
        batched = dataclasses.replace(batched, prompt_scale=scale)
    policy = toys.params()
    devices = 4 if sharded else 1
    packed = packing(recipe, key=KEY, devices=devices, max_tokens=COLUMNS)
    moves, stats = updated(recipe, policy, packed, mesh=mesh, batched=batched)
    expected, padded_stats = updated(recipe, policy, None, batched=batched)
    close(moves, expected)
    assert max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected)) > 1e-5
    for name, value in stats.items():
        np.testing.assert_allclose(
            np.float32(value[0]), padded_stats[name][0], rtol=1e-4, atol=1e-5
        )


def test_a_packing_of_another_update_is_refused():
    packed = packing(GROUPS, key=KEY)
    once = dataclasses.replace(GROUPS, num_minibatches=4)
    with pytest.raises(InputError, match="packing: expected 4 minibatches"):
        updated(once, toys.params(), packed)


@pytest.mark.slow
def test_every_size_is_a_branch():
    """A layout at the larger of two sizes, and cut to the smaller one if it fits."""
    form = Form(rows=ROWS, num_minibatches=1, max_new_tokens=SIZE, width=COLUMNS)
    packer = layouts.Packer(form, sample=LENGTHS)
    (rows, reads), *_ = packer.batch.sizes
    wider = packer.batch._replace(
        sizes=((rows, reads), (rows + 2, reads + 5)), expected=2
    )
    order = np.arange(ROWS)[None]
    small = packer(LENGTHS, order, columns=COLUMNS).batch
    packer.batch = wider
    sized = packer(LENGTHS, order, columns=COLUMNS).batch
    assert sized.packing.source.shape == (rows + 2, COLUMNS)
    assert sized.size == 0
    own = sized.at_its_size()
    assert own.sizes == ((rows, reads),)
    assert own.packing.source.shape == (rows, COLUMNS)

    def tokens_back(sized, of_size):
        x = jnp.arange(ROWS * COLUMNS, dtype=jnp.float32).reshape(ROWS, COLUMNS)

        def back(packing):
            hidden = jnp.broadcast_to(
                packing.pack(x)[..., None], (*packing.source.shape, 2)
            )
            before = packing.read(hidden)[..., 0]  # of the token before, by the shift
            shifted = jnp.pad(before[:, :-1], ((0, 0), (1, 0)))
            return packing.unpack(shifted)

        return at_size(dataclasses.replace(sized, size=of_size), back)

    for which, size in ((small, 0), (sized, 0), (sized, 1), (own, 0)):
        columns = np.asarray(tokens_back(which, jnp.int32(size)))
        for row, (_, response) in enumerate(LENGTHS):
            for column in range(COLUMNS):
                is_response = PROMPTS <= column < PROMPTS + response
                expected = row * COLUMNS + column - 1 if is_response else 0
                assert columns[row, column] == expected


@pytest.mark.slow
def test_the_self_check_reads_packed_rows_as_padded_ones():
    packed = packing(GROUPS, key=KEY)
    measure = toys.jit(
        functools.partial(
            self_check.measure,
            rollout=rollout(),
            reference=None,
            model=toys.GPT2,
            max_new_tokens=SIZE,
            temperature=0.7,
        )
    )
    padded = measure(toys.params()).trainer
    one_size = packed.batch.at_its_size()
    output = measure(toys.params(), packing=one_size).trainer
    assert float(jnp.abs(padded).max()) > 1
    np.testing.assert_allclose(output, padded, rtol=0, atol=1e-5)


@pytest.mark.cases(slow=1)
@pytest.mark.slow
@pytest.mark.parametrize("model", [tiny.LLAMA, tiny.MIXED, tiny.PARALLEL])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_families(model, remat):
    model = dataclasses.replace(model, remat=remat)
    recipe = dataclasses.replace(GROUPS, model=model, num_minibatches=1)
    policy = jax.tree.map(lambda x: 0.5 * x, tiny.params(model))
    packed = packing(recipe, key=KEY)
    moves, _ = updated(recipe, policy, packed)
    close(moves, updated(recipe, policy, None)[0])


@pytest.mark.cases(slow=2)
@pytest.mark.slow
@pytest.mark.parametrize("attention", ["xla", "blockwise"])
@pytest.mark.parametrize("model", [toys.GPT2, tiny.LLAMA])
def test_a_prompt_that_a_group_shares(model, attention):
    """A packed row reads the prompt once, with the gradients of all responses."""
    params, model = toys.params(model), dataclasses.replace(model, attention=attention)
    recipe = dataclasses.replace(GROUPS, model=model, num_minibatches=1)
    batched = experience(model.vocab_size)
    # The prompts of a group are those of its first row.
    tokens, mask = np.array(batched.tokens), np.array(batched.mask)
    for array in (tokens, mask):
        array[:, :PROMPTS] = np.repeat(array[::4, :PROMPTS], 4, axis=0)
    batched = dataclasses.replace(batched, tokens=tokens, mask=mask)
    packed = packing(recipe, key=KEY, group_size=4)
    alone = packing(recipe, key=KEY)
    occupied = (np.asarray(packed.batch.packing.source) >= 0).sum()
    assert occupied < (np.asarray(alone.batch.packing.source) >= 0).sum()
    policy = jax.tree.map(lambda x: 0.5 * x, params)
    moves, _ = updated(recipe, policy, packed, batched=batched)
    close(moves, updated(recipe, policy, None, batched=batched)[0])


@pytest.mark.slow
def test_adapters():
    lora = LoRA(rank=2)
    recipe = dataclasses.replace(GROUPS, lora=lora, num_minibatches=1)
    policy = toys.perturbed(
        init(jax.random.key(2), model=toys.GPT2, lora=lora), seed=2, scale=0.1
    )
    base = toys.freeze(toys.params())
    moves, _ = updated(recipe, policy, packing(recipe, key=KEY), base=base)
    close(moves, updated(recipe, policy, None, base=base)[0])


@pytest.mark.slow
@pytest.mark.parametrize("max_tokens", [None, COLUMNS])
def test_a_mesh_of_eight(max_tokens):
    """Rows are sharded over four groups of devices, and weights over all devices."""
    recipe = dataclasses.replace(GROUPS, num_minibatches=1)
    mesh = MeshShape(data=2, fsdp=2, tensor=2).make()
    packed = packing(recipe, key=KEY, devices=4, max_tokens=max_tokens)
    policy = toys.params()
    moves, _ = updated(recipe, policy, packed, mesh=mesh)
    close(moves, updated(recipe, policy, None)[0])


@pytest.mark.slow
def test_a_critic_apart():
    recipe = dataclasses.replace(
        EXACT, shared_trunk=False, penalty=Penalty(), sampler_correction=None
    )
    packed = packing(recipe, key=KEY, max_tokens=COLUMNS)
    start = state.supervised_state(
        toys.perturbed(
            critic.from_policy(toys.params(), model=toys.GPT2), seed=1, scale=0.1
        ),
        optimizer=recipe.critic_optimizer,
    )
    of_critic = jax.jit(functools.partial(critic_apart.update, recipe=recipe, key=KEY))
    compute = jax.jit(functools.partial(critic_apart.values, recipe=recipe))
    results = []
    for rows in (packed, None):
        after, _ = of_critic(start, experience=experience(), packing=rows)
        values = compute(start.params, rollout=rollout(), packing=rows)
        results.append((moved(after.params, start.params), values))
    close(results[0][0], results[1][0])
    np.testing.assert_allclose(results[0][1], results[1][1], atol=1e-5)


@pytest.mark.slow
def test_a_reference_by_itself():
    reference = frozen.freeze(toys.params(seed=5))
    compute = jax.jit(
        functools.partial(
            score.reference_logprobs,
            model=toys.GPT2,
            max_new_tokens=SIZE,
            temperature=0.7,
        )
    )
    packed = packing(GROUPS, key=KEY).batch
    output = compute(reference, rollout=rollout(), packing=packed)
    expected = compute(reference, rollout=rollout())
    np.testing.assert_allclose(output, expected, atol=1e-5)
    assert (np.asarray(output) != 0).any()


@pytest.mark.slow
def test_a_reward_model():
    """Includes responses without tokens and responses that fill all columns."""
    form = Form(
        rows=ROWS,
        num_minibatches=1,
        max_new_tokens=SIZE + 1,
        width=COLUMNS,
        ends=True,
    )
    packer = layouts.Packer(form, sample=LENGTHS)
    packed = packer.whole(LENGTHS, columns=COLUMNS + 1)
    assert packed is not None
    scorer = rewards.init(jax.random.key(1), toys.params(seed=1), model=toys.GPT2)
    reward = rewards.from_model(frozen.freeze(scorer), model=toys.GPT2)
    compute = jax.jit(lambda reward, rollout, packing: reward(rollout, packing))
    output = compute(reward, rollout(), packed)
    np.testing.assert_allclose(output, compute(reward, rollout(), None), atol=1e-5)
    assert len(set(np.asarray(output).tolist())) == ROWS
