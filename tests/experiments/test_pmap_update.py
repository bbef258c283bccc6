"""The update under `jax.pmap` is that of `jax.jit` on the whole batch."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys
from studies import pmap_update

from rlhf_jax import batch, critic, kl_control, masked, ppo, state
from rlhf_jax.functional.checks import InputError
from rlhf_jax.runs import command_line

KEY = jax.random.key(3)
DEVICES = 2
OPTIMIZERS = {"sgd": optax.sgd(0.1), "adam": optax.adam(1e-3, eps=1e-5)}
# Of the responses; the first two rows are of device 0. A mean of means is another.
LENGTHS = np.array([5, 4, 2, 1])


def algorithm(name, **options):
    return ppo.PPO(
        model=toys.GPT2,
        critic_model=toys.GPT2,
        policy_optimizer=OPTIMIZERS[name],
        critic_optimizer=OPTIMIZERS[name],
        max_new_tokens=toys.SIZE,
        stop_ids=toys.STOP,
        num_epochs=2,
        **options,
    )


def fresh(settings):
    return state.ppo_state(
        policy=toys.params(),
        critic=critic.from_policy(toys.params(seed=1), model=toys.GPT2),
        policy_optimizer=settings.policy_optimizer,
        critic_optimizer=settings.critic_optimizer,
        kl=kl_control.Adaptive(target=6.0, unit="response", horizon=100).controller(
            0.1
        ),
    )


def rows():
    """Rows of random tokens."""
    prompts = toys.prompts()
    answered = np.arange(toys.SIZE)[None, :] < LENGTHS[:, None]
    words = np.random.default_rng(0).integers(3, 13, answered.shape)
    response_mask = np.concatenate([np.zeros((4, 4), bool), answered], axis=1)
    return toys.experience(
        batch.Rollout(
            tokens=jnp.concatenate([prompts.tokens, answered * words], axis=1),
            mask=jnp.concatenate([prompts.mask, answered], axis=1),
            response_mask=jnp.asarray(response_mask),
            old_logprobs=-2.5 * jnp.asarray(response_mask, jnp.float32),
            entropy=jnp.asarray(response_mask, jnp.float32),
            index=prompts.index,
            sample=prompts.sample,
        )
    )


@functools.cache
def programs(name, **options):
    settings = algorithm(name, **options)
    whole = toys.jit(functools.partial(ppo.update, recipe=settings))
    right = functools.partial(pmap_update.update, algorithm=settings)
    return fresh(settings), whole, pmap_update.mapped(right, num_devices=DEVICES)


PARTS = {"micro_batch_size": 1, "max_ratio_mean": 5.0, "aggregation": "sequence_mean"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        pytest.param("sgd", {}, marks=pytest.mark.long),
        pytest.param("sgd", PARTS, marks=pytest.mark.long),
        pytest.param("adam", {}, marks=pytest.mark.long),
    ],
)
def test_pmap_of_the_parts_is_jit_of_the_whole(name, options):
    train, whole, by_pmap = programs(name, **options)
    expected, expected_stats = whole(train, experience=rows(), key=KEY)
    output, stats = by_pmap(train, rows(), KEY)
    near = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
    jax.tree.map(near, output, expected)
    moved = pmap_update.farthest(expected.policy, train.policy)
    assert moved > 1e-3
    assert not np.allclose(expected.kl.kl_coef, train.kl.kl_coef)
    means, expected_means = masked.mean_stats(stats), masked.mean_stats(expected_stats)
    assert means.keys() == expected_means.keys()
    for key, value in expected_means.items():
        np.testing.assert_allclose(means[key], value, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.slow
def test_a_gradient_that_is_not_finite_on_one_device_is_skipped_by_all():
    train, _, by_pmap = programs("sgd")
    made = rows()
    advantages = jnp.where(
        (jnp.arange(4) == 3)[:, None] & made.response_mask, jnp.nan, made.advantages
    )
    after, _ = by_pmap(train, dataclasses.replace(made, advantages=advantages), KEY)
    assert toys.leaves_equal(after.policy, train.policy)
    assert int(after.skipped) == 2


@pytest.mark.long
def test_the_experiment_at_toy_size(tmp_path):
    argv = ["--out", str(tmp_path / "run"), "--num-steps=1", "--batch-size=8"]
    command_line.main(pmap_update.main, pmap_update.Config, description="", argv=argv)
    [step] = json.loads((tmp_path / "run" / "summary.json").read_text())["steps"]
    assert step["pmap"] < 1e-3 < 0.01 < step["mean_of_means"]


def test_batches_and_devices_that_do_not_fit(tmp_path):
    with pytest.raises(InputError, match="a multiple of num_devices, 3, got 32; ch"):
        pmap_update.Config(out=tmp_path / "run", num_devices=3)
    many = pmap_update.Config(out=tmp_path / "run", num_devices=16)
    with pytest.raises(InputError, match="expected 16 devices, got 8; on a CPU set"):
        pmap_update.main(many)
