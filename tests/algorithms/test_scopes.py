"""The named scopes that a profile reads, in the programs that trainers compile."""

import functools
import re

import jax
import numpy as np
import optax
import pytest
import toys

from rlhf_jax import batch, frozen, rewards
from rlhf_jax.algorithms import dpo, ppo, state
from rlhf_jax.algorithms.flow import score
from rlhf_jax.functional.kl import control
from rlhf_jax.functional.kl.penalty import Penalty
from rlhf_jax.roles.reference.frozen import FrozenModels
from rlhf_jax.runs.profile import trace

ROWS = 4
ADAM = optax.adam(1e-3)


def names_of(function, *args, **kwargs):
    """The names of a program's operations."""
    lowered = jax.jit(functools.partial(function, **kwargs)).lower(*args)
    return re.findall(r'loc\("([^"]*)"', lowered.as_text(debug_info=True))


def scopes_of(function, *args, **kwargs):
    """The pairs (scope, operation) of a program."""
    return {
        (scope, name.rpartition("/")[-1])
        for name in names_of(function, *args, **kwargs)
        for scope in re.split(r"[/()]", name)[:-1]
    }


def prompts():
    tokens = np.full((ROWS, 3), 4, np.int32)
    rows = np.arange(ROWS, dtype=np.int32)
    return batch.Prompts(
        tokens=tokens, mask=tokens > 0, index=rows, sample=np.zeros_like(rows)
    )


def algorithm(**options):
    return ppo.PPO(
        model=toys.GPT2,
        critic_model=toys.GPT2,
        policy_optimizer=ADAM,
        critic_optimizer=ADAM,
        max_new_tokens=toys.SIZE,
        stop_ids=toys.STOP,
        **options,
    )


def start():
    return state.ppo_state(
        policy=toys.params(),
        critic=toys.scorer(),
        policy_optimizer=ADAM,
        critic_optimizer=ADAM,
        kl=control.fixed(0.1),
    )


@pytest.mark.slow
def test_an_iteration_has_every_scope():
    def iteration(train, reference, scorer, prompts, key):
        return ppo.iteration(
            train,
            prompts=prompts,
            frozen=FrozenModels(reference=reference),
            reward=rewards.from_model(scorer, model=toys.GPT2),
            key=key,
            recipe=algorithm(),
        )

    reference = frozen.freeze(toys.params())
    scorer = frozen.freeze(toys.scorer(seed=3))
    key = jax.random.key(0)
    scopes = scopes_of(iteration, start(), reference, scorer, prompts(), key)
    for scope in ("rollout", "reference", "reward", "values", "loss"):
        assert (scope, "while") in scopes, scope
    # Adam multiplies, and no model's loop over layers runs in it.
    assert ("optimizer", "mul") in scopes
    assert ("optimizer", "while") not in scopes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:KL penalty")
@pytest.mark.parametrize("placement", ["reward", "loss"])
def test_exact_kl_is_of_the_reference(placement):
    penalty = Penalty(placement=placement, value_estimator="exact")

    def learn(train, rollout, scores, reference, key):
        return ppo.learn(
            train,
            rollout=rollout,
            scores=scores,
            frozen=FrozenModels(reference=reference),
            key=key,
            recipe=algorithm(penalty=penalty),
        )

    rollout = jax.eval_shape(
        functools.partial(ppo.sample, recipe=algorithm(penalty=penalty)),
        toys.params(),
        prompts=prompts(),
        key=jax.random.key(0),
    )
    scores = jax.ShapeDtypeStruct((ROWS,), np.float32)
    reference = frozen.freeze(toys.params())
    scopes = scopes_of(learn, start(), rollout, scores, reference, jax.random.key(0))
    assert ("reference", "while") in scopes
    assert ("loss", "while") in scopes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:KL penalty")
def test_the_policy_s_part_of_exact_kl_is_not_the_reference_s():
    """Loops over layers, and the vocabulary loop for both, are in no scope."""
    rollout = jax.eval_shape(
        functools.partial(ppo.sample, recipe=algorithm()),
        toys.params(),
        prompts=prompts(),
        key=jax.random.key(0),
    )

    def exact(policy, reference, rollout):
        return score._exact_kl(
            reference,
            policy=policy,
            rollout=rollout,
            model=toys.GPT2,
            max_new_tokens=toys.SIZE,
            temperature=1.0,
            penalty=Penalty(placement="reward", value_estimator="exact"),
            packing=None,
            replays=False,
        )

    names = names_of(exact, toys.params(), frozen.freeze(toys.params()), rollout)
    loops = {trace.scope_of(name) for name in names if name.endswith("/while")}
    assert loops == {None, "reference"}
    logits = {name for name in names if name.endswith("btd,vd->btv/dot_general")}
    assert {trace.scope_of(name) for name in logits} == {None, "reference"}


@pytest.mark.slow
def test_programs_of_their_own_have_theirs():
    rollout = jax.eval_shape(
        functools.partial(ppo.sample, recipe=algorithm()),
        toys.params(),
        prompts=prompts(),
        key=jax.random.key(0),
    )
    reference = frozen.freeze(toys.params())

    def ref_logprobs(reference, rollout):
        return score.reference_logprobs(
            reference,
            rollout=rollout,
            model=toys.GPT2,
            max_new_tokens=toys.SIZE,
            temperature=1.0,
        )

    assert ("reference", "while") in scopes_of(ref_logprobs, reference, rollout)
    values = functools.partial(ppo.values, recipe=algorithm())

    def of_critic(train, rollout):
        return values(train, rollout=rollout)

    assert ("values", "while") in scopes_of(of_critic, start(), rollout)


@pytest.mark.slow
def test_dpo_has_its_reference_and_its_loss():
    columns = np.tile(np.array([1, 1, 1, 2, 2, 2], np.int32), (ROWS, 1))
    pairs = batch.PackedPreferences(
        tokens=columns + 2,
        segments=columns,
        response_mask=np.tile(np.array([0, 1, 1, 0, 1, 1], bool), (ROWS, 1)),
        pairs=np.ones((ROWS, 1), bool),
        index=np.arange(ROWS, dtype=np.int32),
    )
    recipe = dpo.DPO(model=toys.GPT2, optimizer=ADAM)

    def step(train, reference, pairs):
        ref_logprobs = dpo.reference_logprobs(reference, batch=pairs, dpo=recipe)
        return dpo.update(train, batch=pairs, ref_logprobs=ref_logprobs, dpo=recipe)

    initial = state.supervised_state(toys.params(), optimizer=ADAM)
    scopes = scopes_of(step, initial, frozen.freeze(toys.params()), pairs)
    assert ("reference", "while") in scopes
    assert ("loss", "while") in scopes
    assert ("optimizer", "mul") in scopes
