"""Expected gradients and targets, against sums of float64 NumPy over every group."""

import itertools

import audited_losses
import jax.numpy as jnp
import numpy as np
import pytest

from rlhf_jax import audit
from rlhf_jax.audit.expected import REWARD
from rlhf_jax.functional.kl import gradients

WORLDS = {world.name: world for world in audit.every()}
STEP = 1e-5  # of a central difference


def log_softmax(table):
    table = np.asarray(table, np.float64)
    return table - np.log(np.exp(table).sum(axis=-1, keepdims=True))


def token_mean_k3(world, policy):
    """E of k3 over a group of three, divided by its tokens, with samples held fixed."""
    rows, columns = world.tokens.shape
    tables = [log_softmax(one) for one in (policy, world.sampler, world.reference)]
    k3, length, probability = np.zeros(rows), np.zeros(rows), np.ones(rows)
    for row in range(rows):
        for column in range(columns):
            if world.mask[row, column]:
                state, token = world.states[row, column], world.tokens[row, column]
                now, old, ref = (table[state, token] for table in tables)
                k3[row] += np.exp(ref - now) - (ref - now) - 1
                length[row] += 1
                probability[row] *= np.exp(old)
    groups = np.array([*itertools.product(range(rows), repeat=3)])
    means = k3[groups].sum(axis=1) / length[groups].sum(axis=1)
    return probability[groups].prod(axis=1) @ means


def difference(function, table):
    """[*table.shape, ...], finite differences of every result of a function."""
    table, slopes = np.asarray(table, np.float64), []
    for place in np.ndindex(table.shape):
        step = np.zeros_like(table)
        step[place] = STEP
        slopes.append((function(table + step) - function(table - step)) / (2 * STEP))
    return np.reshape(slopes, table.shape + np.shape(slopes[0]))


@pytest.mark.parametrize("name", ["stop token", "stale sampler"])
def test_an_expected_gradient_is_the_sum_over_all_groups(name):
    world = WORLDS[name]

    def loss(batch):
        return audited_losses.k3(batch) / batch.mask.sum()

    expected = difference(lambda policy: token_mean_k3(world, policy), world.policy)
    measured = audit.expected_gradient(loss, world)
    np.testing.assert_allclose(measured, expected, atol=2e-6)


def loops(world, policy, *, visits=None):
    """Each target by loops over responses with their probabilities `visits`."""
    now, ref = log_softmax(policy), log_softmax(world.reference)
    sums = dict.fromkeys(
        (
            gradients.FULL_REVERSE,
            gradients.FULL_FORWARD,
            gradients.FIXED_REVERSE,
            gradients.FIXED_FORWARD,
            REWARD,
        ),
        0.0,
    )
    for row, (tokens, states) in enumerate(
        zip(world.tokens, world.states, strict=True)
    ):
        own = np.flatnonzero(world.mask[row])
        log_now = sum(now[states[t], tokens[t]] for t in own)
        log_ref = sum(ref[states[t], tokens[t]] for t in own)
        sums[gradients.FULL_REVERSE] += np.exp(log_now) * (log_now - log_ref)
        sums[gradients.FULL_FORWARD] += np.exp(log_ref) * (log_ref - log_now)
        sums[REWARD] -= np.exp(log_now) * float(world.rewards[row])
        visited = np.exp(log_now) if visits is None else visits[row]
        for t in own:
            p, q = now[states[t]], ref[states[t]]
            sums[gradients.FIXED_REVERSE] += visited * (np.exp(p) * (p - q)).sum()
            sums[gradients.FIXED_FORWARD] += visited * (np.exp(q) * (q - p)).sum()
    return sums


@pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)
def test_targets_are_those_of_loops(world):
    now = log_softmax(world.policy)
    visits = [
        np.exp(sum(now[s, t] for s, t, own in zip(*row, strict=True) if own))
        for row in zip(world.states, world.tokens, world.mask, strict=True)
    ]
    assert sum(visits) == pytest.approx(1.0)  # each response stands there once
    targets = audit.targets(world)

    def every(policy):
        sums = loops(world, policy, visits=visits)
        return np.array([sums[name] for name in targets])

    expected = difference(every, world.policy)
    for number, (name, target) in enumerate(targets.items()):
        np.testing.assert_allclose(
            target, expected[..., number], atol=2e-6, err_msg=name
        )


def test_worlds_are_what_their_table_says():
    sizes = {name: len(world.tokens) for name, world in WORLDS.items()}
    assert sizes == {
        "fixed length": 27,
        "stop token": 15,
        "several turns": 27,
        "stale sampler": 15,
    }
    stop, turns = WORLDS["stop token"], WORLDS["several turns"]
    assert sorted({*stop.mask.sum(axis=1)}) == [1, 2, 3]
    assert not turns.mask[:, 1].any()
    assert turns.mask[:, [0, 2, 3]].all()
    assert (WORLDS["stale sampler"].sampler != WORLDS["stale sampler"].policy).all()
    for world in WORLDS.values():  # no row of a policy's token is another's
        own = {*world.states[world.mask]}
        assert own.isdisjoint(world.states[~world.mask])
        assert own == {*np.flatnonzero(world.depths >= 0)}


def test_a_loss_reads_what_a_group_has():
    """Rewards are 0 unless requested, and log-probs are those of the tokens."""
    world = WORLDS["stop token"]
    read = []

    def loss(batch):
        read.append({name: one.shape for name, one in batch._asdict().items()})
        return jnp.sum(batch.rewards) * jnp.sum(batch.logprobs)

    assert jnp.all(audit.expected_gradient(loss, world) == 0)
    assert jnp.any(audit.expected_gradient(loss, world, with_rewards=True) != 0)
    assert read[0] == {
        **dict.fromkeys(("logprobs", "old_logprobs", "ref_logprobs", "mask"), (3, 3)),
        "rewards": (3,),
        **dict.fromkeys(("logits", "ref_logits"), (3, 3, 3)),
    }


@pytest.mark.parametrize("loss", [lambda b: b.rewards, lambda b: b.mask.sum()])
def test_a_loss_is_one_float(loss):
    with pytest.raises(AssertionError, match=r"shape|type"):
        audit.expected_gradient(loss, WORLDS["stop token"])
