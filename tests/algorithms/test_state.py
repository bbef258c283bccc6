import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from rlhf_jax import batch, kl_control, masked, ppo, sft, state
from rlhf_jax.algorithms import reward_model
from rlhf_jax.functional import checks

SGD = optax.sgd(0.1)
SIZE = ("micro_batch_size",)


def mean_square(params, rows):
    """The loss over 6 rows, with the stats of one micro-batch."""
    error = rows["x"] @ params["w"] - rows["y"]
    loss = (error**2).sum() / 6
    return loss, {
        "square": ((error**2).sum(), jnp.asarray(error.size, jnp.float32)),
        "largest": (jnp.abs(error).max(), None),
    }


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(0)
    return {
        "x": jnp.asarray(rng.normal(size=(6, 3)), jnp.float32),
        "y": jnp.asarray(rng.normal(size=6), jnp.float32),
    }


PARAMS = {"w": np.array([0.5, -1.0, 2.0], np.float32)}


@pytest.mark.parametrize("size", [1, 2, 3, 6, None])
def test_accumulate_is_the_gradient_of_the_sum(rows, size):
    grads, stats = state.accumulate(mean_square, PARAMS, rows, micro_batch_size=size)
    x, y = (np.asarray(rows[name], np.float64) for name in "xy")
    error = x @ PARAMS["w"] - y
    np.testing.assert_allclose(grads["w"], 2 * error @ x / 6, rtol=1e-5)
    means = masked.mean_stats(stats)
    np.testing.assert_allclose(means["square"], (error**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(means["largest"], abs(error).max(), rtol=1e-6)


@pytest.mark.parametrize("size", [0, 4, 7, -1])
def test_a_micro_batch_size_that_does_not_divide(rows, size):
    message = f"micro_batch_size to divide the 6 rows of an update, got {size}; change"
    with pytest.raises(checks.InputError, match=message):
        state.accumulate(mean_square, PARAMS, rows, micro_batch_size=size)


def ppo_case():
    policy = toys.params()
    critic = toys.scorer(seed=1)
    settings = ppo.PPO(
        model=toys.GPT2,
        critic_model=toys.GPT2,
        policy_optimizer=SGD,
        critic_optimizer=SGD,
        max_new_tokens=toys.SIZE,
        stop_ids=toys.STOP,
    )
    experience = toys.experience(toys.sampled(policy))

    def loss(params, part):
        tokens = experience.response_mask.sum(dtype=jnp.float32)
        return ppo.ppo_loss(
            *params,
            experience=part,
            kl_coef=0.1,
            num_tokens=tokens,
            num_values=tokens,
            num_responses=jnp.float32(4),
            recipe=settings,
        )

    return loss, (policy, critic), experience


def sequences(seed: int = 0) -> batch.Sequences:
    """Four right-padded texts with prompts of 2 tokens."""
    rng = np.random.default_rng(seed)
    lengths = jnp.asarray([6, 3, 5, 4], jnp.int32)
    mask = masked.lengths_to_mask(lengths, size=6)
    tokens = jnp.asarray(rng.integers(0, 13, (4, 6)), jnp.int32)
    response = mask & (jnp.arange(6) >= 2)[None, :]
    return batch.Sequences(tokens=tokens, mask=mask, response_mask=response)


def sft_case():
    texts = sequences()

    def loss(params, part):
        tokens = texts.response_mask.sum(dtype=jnp.float32)
        return sft.loss(params, part, model=toys.GPT2, num_tokens=tokens)

    return loss, toys.params(), texts


def reward_case():
    pairs = batch.Preferences(
        chosen=sequences(1),
        rejected=sequences(2),
        margin=jnp.asarray([0.0, 0.5, 1.0, 0.0], jnp.float32),
    )
    params = toys.scorer(seed=2)

    def loss(params, part):
        pairs = jnp.asarray(4.0, jnp.float32)
        return reward_model.loss(params, part, model=toys.GPT2, num_pairs=pairs)

    return loss, params, pairs


LONG = pytest.mark.long  # test_ppo_by_hand.py does the same through `update`


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, pytest.param(2, marks=LONG)])
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(sft_case, marks=pytest.mark.slow),
        reward_case,
        pytest.param(ppo_case, marks=LONG),
    ],
)
def test_micro_batches_of_every_loss_add_up(case, size):
    loss, params, rows = case()

    def accumulate(size):
        run = toys.jit(state.accumulate, static_argnums=0, static_argnames=SIZE)
        return run(loss, params, rows, micro_batch_size=size)

    grads, stats = accumulate(None)
    parts, part_stats = accumulate(size)
    assert optax.tree.norm(grads) > 0.1
    jax.tree.map(
        lambda part, whole: np.testing.assert_allclose(
            part, whole, rtol=1e-4, atol=1e-6
        ),
        (parts, masked.mean_stats(part_stats)),
        (grads, masked.mean_stats(stats)),
    )


@pytest.fixture(scope="module")
def step():
    return jax.jit(
        lambda current, grads, stats: state.supervised_step(
            current, grads, stats, optimizer=optax.adam(0.1)
        )
    )


def fresh() -> state.SupervisedState:
    params = {"a": jnp.ones(3), "b": jnp.zeros(())}
    return state.supervised_state(params, optimizer=optax.adam(0.1))


def grads_of(value: float):
    return {"a": jnp.asarray([1.0, value, 2.0]), "b": jnp.ones(())}


STATS = {"loss": (jnp.asarray(6.0), jnp.asarray(2.0)), "most": (jnp.asarray(4.0), None)}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
def test_a_gradient_that_is_not_finite_changes_nothing_but_the_count(step, bad):
    """1e30 is finite but its square is not: Adam's second moment would never heal."""
    warm, _ = step(fresh(), grads_of(0.5), STATS)
    after, stats = step(warm, grads_of(bad), STATS)
    assert toys.leaves_equal((after.params, after.opt), (warm.params, warm.opt))
    assert int(after.skipped) == 1
    assert int(after.step) == 2
    means = masked.mean_stats(stats)
    assert means["update/skipped"] == 1
    assert means["update/skipped_in_a_row"] == 1
    # The stats of the skipped update weigh nothing.
    assert stats["loss"] == (0, 0)
    assert stats["update/grad_norm"] == (0, 0)
    assert means["most"] == 0


def test_skips_are_counted_in_a_row(step):
    current, counts = fresh(), []
    for value in (np.nan, np.inf, 1.0, np.nan, 1.0):
        current, stats = step(current, grads_of(value), STATS)
        counts.append(int(stats["update/skipped_in_a_row"][0]))
    assert counts == [1, 2, 0, 1, 0]
    assert int(current.skipped) == 0
    assert np.isfinite(current.params["a"]).all()


def test_a_step_is_the_optimizers(step):
    """Adam's first step moves every entry by the learning rate, against its sign."""
    after, stats = step(fresh(), grads_of(-3.0), STATS)
    np.testing.assert_allclose(after.params["a"], [0.9, 1.1, 0.9], rtol=1e-5)
    np.testing.assert_allclose(after.params["b"], -0.1, rtol=1e-5)
    means = masked.mean_stats(stats)
    np.testing.assert_allclose(means["update/grad_norm"], 15**0.5, rtol=1e-6)
    assert means["update/skipped"] == 0
    assert means["loss"] == 3
    assert int(after.step) == 1


@pytest.mark.parametrize("optimizer", [optax.adam(0.1), optax.adamw(0.1)])
def test_an_update_in_place_copies_nothing(optimizer):
    """Checks a donated state by XLA:CPU's report; it used to copy every moment."""
    params = {"kernel": jax.ShapeDtypeStruct((300, 500), jnp.float32)}
    size = 4 * 300 * 500

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt, grads):
        finite = jnp.isfinite(optax.tree.norm(grads))
        return state.apply_gradients(
            params, opt, grads, optimizer=optimizer, finite=finite
        )

    opt = jax.eval_shape(optimizer.init, params)
    memory = step.lower(params, opt, params).compile().memory_analysis()
    assert memory.alias_size_in_bytes >= 3 * size
    assert memory.temp_size_in_bytes < size / 100


def test_no_two_leaves_of_a_fresh_state_share_a_buffer():
    """Otherwise donation would fail, or corrupt a leaf without failing."""
    params = {"w": jnp.ones(3)}
    fresh = state.ppo_state(
        policy=params,
        critic={"w": jnp.ones(3)},
        policy_optimizer=optax.adam(0.1),
        critic_optimizer=optax.adam(0.1),
        kl=kl_control.fixed(0.1),
    )
    pointers = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(fresh)]
    assert len(set(pointers)) == len(pointers)


def test_what_is_trained_is_float32():
    """In bfloat16 a step of 3e-6 would round to nothing."""
    half = {"w": jnp.ones(3), "b": jnp.ones(3, jnp.bfloat16)}
    whole = {"w": jnp.ones(3)}
    with pytest.raises(TypeError, match=r"^b: expected float32 to train, got bfloat16"):
        state.supervised_state(half, optimizer=SGD)
    for policy, critic, leaf in ((half, whole, "policy/b"), (whole, half, "critic/b")):
        with pytest.raises(TypeError, match=rf"^{leaf}: expected .*dtype='float32'"):
            state.ppo_state(
                policy=policy,
                critic=critic,
                policy_optimizer=SGD,
                critic_optimizer=SGD,
                kl=kl_control.fixed(0.1),
            )
