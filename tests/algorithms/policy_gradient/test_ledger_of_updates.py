"""The update of every policy gradient returns the ledger of trust."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import toys

from rlhf_jax import frozen, policy
from rlhf_jax.algorithms import (
    distill,
    grpo,
    nash_md,
    online_dpo,
    ppo,
    reinforce,
    state,
)
from rlhf_jax.algorithms.flow import ledger
from rlhf_jax.algorithms.policy_gradient import iteration
from rlhf_jax.algorithms.policy_gradient.corrections import Reject
from rlhf_jax.algorithms.policy_gradient.update import minibatches, shuffle_key
from rlhf_jax.functional import masked
from rlhf_jax.functional.kl.control import fixed
from rlhf_jax.roles.reference.frozen import FrozenModels

SHARED = {
    "model": toys.GPT2,
    "policy_optimizer": optax.sgd(0.5),
    "max_new_tokens": toys.SIZE,
    "stop_ids": toys.STOP,
    "temperature": 0.7,
}
GRPO = grpo.GRPO(
    group_size=2, num_epochs=2, num_minibatches=2, micro_batch_size=1, **SHARED
)
KEY = jax.random.key(3)


def learned(recipe, rollout, *, critic=None, reference=None):
    """The stats of one iteration on a rollout; the score of a row is its number."""
    params = toys.params()
    make = state.grpo_state
    options = {"policy": params, "policy_optimizer": recipe.policy_optimizer}
    if critic is not None:
        make = functools.partial(
            state.ppo_state, critic=critic, critic_optimizer=recipe.critic_optimizer
        )
    train = make(**options, kl=fixed(0.1))
    train = dataclasses.replace(train, step=jnp.int32(4))
    rows = rollout.tokens.shape[0]
    _, stats, _ = iteration.learn(
        train,
        rollout=rollout,
        scores=jnp.arange(rows, dtype=jnp.float32),
        frozen=FrozenModels(reference=reference),
        key=KEY,
        recipe=recipe,
    )
    return stats


def sampled():
    """Two groups of two, with wrong sampler log-probs and two stale rows."""
    drawn = toys.sampled(toys.params(), lengths=(4, 4, 3, 3))
    off = np.array([0.4, 0.0, 0.0, -1.5], np.float32)[:, None]
    age = np.array([0, 2, 0, 0], np.int32)[:, None]
    return dataclasses.replace(
        drawn,
        old_logprobs=jnp.where(drawn.response_mask, drawn.old_logprobs + off, 0.0),
        version=jnp.where(drawn.response_mask, 4 - age, 0),
        index=jnp.array([0, 0, 1, 1], jnp.int32),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        # Both rows that are off.
        {"sampler_correction": Reject(1.2, floor=0.9, level="geometric")},
    ],
    ids=["the sampler's log-probs", "recomputed"],
)
def test_it_is_of_the_first_minibatch_before_anything_has_moved(changes):
    recipe, drawn = dataclasses.replace(GRPO, **changes), sampled()
    stats = toys.jit(functools.partial(learned, recipe))(drawn)
    chosen = minibatches(shuffle_key(KEY), rows=4, recipe=recipe)[0]
    assert len(chosen) == 2
    logprobs, entropy = policy.logprobs_and_entropy(
        toys.params(),
        model=toys.GPT2,
        tokens=drawn.tokens,
        mask=drawn.mask,
        temperature=0.7,
    )
    entries = ledger.entries(drawn, step=jnp.int32(4), rows=jnp.arange(4))
    entries, logprobs, entropy, mask = jax.tree.map(
        lambda x: x[chosen], (entries, logprobs, entropy, drawn.mask)
    )
    expected = ledger.settle(
        ledger.sums(
            entries,
            logprobs=logprobs,
            entropy=entropy,
            mask=mask,
            max_new_tokens=toys.SIZE,
            vocab_size=toys.GPT2.vocab_size,
        )
    ) | ledger.duplicates(drawn, rows=jnp.arange(4))
    got = {name: stats[name] for name in stats if name.startswith("trust/")}
    assert got.keys() == expected.keys()
    for name, pair in expected.items():
        for left, right in zip(got[name], pair, strict=True):
            if left is not None:
                np.testing.assert_allclose(left, right, rtol=1e-4, atol=1e-5)
    assert {0, 3} & {*chosen.tolist()}  # one that is off: something is compared
    assert float(masked.mean_stats(got)["trust/distance"]) > 0.1


EVERY = {
    "ppo": ppo.PPO(critic_model=toys.GPT2, critic_optimizer=optax.sgd(0.1), **SHARED),
    "grpo": GRPO,
    "reinforce": reinforce.REINFORCE(**SHARED),
    "online-dpo": online_dpo.OnlineDPO(**SHARED),
    "nash-md": nash_md.NashMD(**SHARED),
    "distill": distill.Distill(**SHARED),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY)
def test_every_policy_gradient_has_it(name):
    recipe = EVERY[name]
    critic = toys.scorer() if name == "ppo" else None
    stats = jax.eval_shape(
        functools.partial(
            learned, recipe, critic=critic, reference=toys.freeze(toys.params())
        ),
        sampled(),
    )
    names = {name for name in stats if name.startswith("trust/")}
    assert len(names) == 18
    assert {"trust/entropy_z", "trust/weight_z", "trust/duplicates_z"} < names


@pytest.mark.slow
def test_rows_of_a_mixture_are_left_out():
    """In Nash-MD the even rows are the policy's, and no two share a prompt."""
    recipe = EVERY["nash-md"]
    stats = toys.jit(functools.partial(learned, recipe))(
        sampled(), reference=frozen.freeze(toys.params())
    )
    _, compared = stats["trust/distance"]
    tokens = np.asarray(sampled().response_mask)[::2].sum()
    assert compared == tokens
    assert stats["trust/duplicates"][1] == 0
