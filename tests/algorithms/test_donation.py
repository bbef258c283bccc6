"""Donated arguments are overwritten, by the compiler's alias figures.

The tests cover every program to which an experiment donates its state. XLA reports how
many bytes of the arguments its results overwrite; JAX warns about unused donations,
and warnings are errors here.
"""

import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
import toys

from rlhf_jax import (
    batch,
    critic,
    decode,
    decoder,
    dpo,
    frozen,
    grpo,
    kl_control,
    lora,
    ppo,
    rewards,
    sft,
    state,
)
from rlhf_jax.algorithms import optimizers, reward_model
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.models.generation.sampling import Decoder, Draw
from rlhf_jax.roles.reference import storage
from rlhf_jax.roles.reference.frozen import FrozenModels

MODEL, ROWS, SIZE = toys.GPT2, 16, 9
PROMPT = SIZE - toys.SIZE
OPTIMIZER = optax.chain(  # as experiments have it
    optax.clip_by_global_norm(1.0),
    optimizers.adam(optax.linear_schedule(1e-3, 0.0, 9), mu_dtype="bfloat16"),
)
KEY = jax.eval_shape(lambda: jax.random.key(0))
PARAMS = jax.eval_shape(functools.partial(decoder.init, model=MODEL), KEY)
REFERENCE = jax.eval_shape(frozen.freeze, PARAMS)
SHARED = {
    "model": MODEL,
    "policy_optimizer": OPTIMIZER,
    "max_new_tokens": toys.SIZE,
    "stop_ids": toys.STOP,
    "num_minibatches": 2,
    "micro_batch_size": 4,  # as many as hold rows of the mesh below
}
PPO = {"critic_model": MODEL, "critic_optimizer": OPTIMIZER, **SHARED}
ADAPTERS = lora.LoRA(rank=2)


def tokens(dtype, columns=SIZE):
    return jax.ShapeDtypeStruct((ROWS, columns), dtype)


def numbers(dtype=jnp.int32):
    return jax.ShapeDtypeStruct((ROWS,), dtype)


TEXTS = batch.Sequences(
    tokens=tokens(jnp.int32), mask=tokens(bool), response_mask=tokens(bool)
)
ROLLOUT = batch.Rollout(
    tokens=tokens(jnp.int32),
    mask=tokens(bool),
    response_mask=tokens(bool),
    old_logprobs=tokens(jnp.float32),
    entropy=tokens(jnp.float32),
    index=numbers(),
    sample=numbers(),
)


def shapes(function, *args, **options):
    return jax.eval_shape(functools.partial(function, **options), *args)


def with_critic(policy=PARAMS, *, value=critic.from_policy):
    return shapes(
        lambda policy, trunk: state.ppo_state(
            policy=policy,
            critic=value(trunk, model=MODEL),
            policy_optimizer=OPTIMIZER,
            critic_optimizer=OPTIMIZER,
            kl=kl_control.Adaptive(target=6.0, unit="response", horizon=100).controller(
                0.1
            ),
        ),
        *(policy, PARAMS),
    )


def without_critic():
    return shapes(
        lambda policy: state.grpo_state(
            policy=policy, policy_optimizer=OPTIMIZER, kl=kl_control.fixed(0.1)
        ),
        PARAMS,
    )


def supervised(params=PARAMS):
    return shapes(state.supervised_state, params, optimizer=OPTIMIZER)


def ppo_learn():
    learn = functools.partial(ppo.learn, recipe=ppo.PPO(**PPO))
    learned = {"rollout": ROLLOUT, "scores": numbers(jnp.float32)}
    return (
        learn,
        with_critic(),
        learned | {"frozen": FrozenModels(reference=REFERENCE), "key": KEY},
    )


def ppo_learn_of_adapters():
    algorithm = ppo.PPO(**PPO, lora=ADAPTERS)
    adapters = shapes(lora.init, KEY, model=MODEL, lora=ADAPTERS)

    def values(_, *, model):
        return critic.from_base(jax.random.key(0), model=model, lora=ADAPTERS)

    learn, _, inputs = ppo_learn()
    learn = functools.partial(ppo.learn, recipe=algorithm)
    inputs["frozen"] = FrozenModels(reference=REFERENCE, base=REFERENCE)
    return learn, with_critic(adapters, value=values), inputs


def ppo_iteration():
    prompts = batch.Prompts(
        tokens=tokens(jnp.int32, PROMPT),
        mask=tokens(bool, PROMPT),
        index=numbers(),
        sample=numbers(),
    )

    def iterate(state, *, prompts, reference, key):
        return ppo.iteration(
            state,
            prompts=prompts,
            frozen=FrozenModels(reference=reference),
            key=key,
            reward=lambda answered: answered.response_mask.sum(1).astype(jnp.float32),
            recipe=ppo.PPO(**PPO),
        )

    inputs = {"prompts": prompts, "reference": REFERENCE, "key": KEY}
    return iterate, with_critic(), inputs


def ppo_update():
    per_token = tokens(jnp.float32)
    experience = batch.Experience(
        tokens=tokens(jnp.int32),
        mask=tokens(bool),
        response_mask=tokens(bool),
        value_mask=tokens(bool),
        old_logprobs=per_token,
        ref_logprobs=per_token,
        old_values=per_token,
        token_rewards=per_token,
        advantages=per_token,
        returns=per_token,
    )
    update = functools.partial(ppo.update, recipe=ppo.PPO(**PPO))
    return update, with_critic(), {"experience": experience, "key": KEY}


def grpo_learn():
    _, _, inputs = ppo_learn()
    algorithm = grpo.GRPO(**SHARED, group_size=2)
    return functools.partial(grpo.learn, recipe=algorithm), without_critic(), inputs


def sft_update():
    update = functools.partial(sft.update, model=MODEL, optimizer=OPTIMIZER)
    return update, supervised(), {"batch": TEXTS}


def reward_model_update():
    start = shapes(rewards.init, KEY, PARAMS, model=MODEL)
    update = functools.partial(reward_model.update, model=MODEL, optimizer=OPTIMIZER)
    pairs = batch.Preferences(chosen=TEXTS, rejected=TEXTS)
    return update, supervised(start), {"batch": pairs}


def dpo_update():
    packed = batch.PackedPreferences(
        tokens=tokens(jnp.int32),
        segments=tokens(jnp.int32),
        response_mask=tokens(bool),
        pairs=tokens(bool, 1),
        index=numbers(),
    )
    algorithm = dpo.DPO(model=MODEL, optimizer=OPTIMIZER)
    update = functools.partial(dpo.update, dpo=algorithm)
    return update, supervised(), {"batch": packed, "ref_logprobs": tokens(jnp.float32)}


def decode_finish():
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), ROWS))
    draw = Draw(toys.STOP)
    prompts = (PARAMS, tokens(jnp.int32, PROMPT), tokens(bool, PROMPT), keys)
    started = shapes(
        lambda params, tokens, mask, keys: decode.start(
            [Decoder(params, MODEL)],
            tokens=tokens,
            mask=mask,
            keys=keys,
            max_new_tokens=toys.SIZE,
            draw=draw,
        ),
        *prompts,
    )

    def finish(state, *, params, keys):
        decoders = [Decoder(params, MODEL)]
        return decode.finish(decoders, state=state, keys=keys, draw=draw)

    return finish, started, {"params": PARAMS, "keys": keys}


def overwritten(function, donated, inputs, **options):
    """Aliased bytes per device of the program, compiled with its state donated."""
    program = toys.jit(function, donate_argnums=0, **options).lower(donated, **inputs)
    return program.compile().memory_analysis().alias_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    "program",
    [
        decode_finish,
        *(
            pytest.param(program, marks=pytest.mark.long)
            for program in (
                sft_update,
                dpo_update,
                reward_model_update,
                ppo_learn,
                ppo_learn_of_adapters,
                ppo_iteration,
                ppo_update,
                grpo_learn,
            )
        ),
    ],
)
def test_a_donated_state_is_overwritten(program):
    function, donated, inputs = program()
    assert overwritten(function, donated, inputs) >= storage.nbytes(donated) > 5000


MESH = MeshShape(data=2, fsdp=2, tensor=2)


def on_mesh(tree):
    """Shapes that are sharded by the rules."""
    return jax.tree.map(
        lambda leaf, where: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=where
        ),
        tree,
        sharding.shardings(tree),
    )


def rows_on_mesh(tree):
    return row_sharding.put_rows(
        jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), tree)
    )


def part(leaf):
    """Bytes of a leaf on one device."""
    return leaf.dtype.itemsize * math.prod(leaf.sharding.shard_shape(leaf.shape))


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(sft_update, marks=pytest.mark.slow),
        pytest.param(ppo_learn, marks=pytest.mark.long),
    ],
)
def test_on_a_mesh_each_device_overwrites_its_part(program):
    function, donated, inputs = program()
    with jax.set_mesh(MESH.make()):
        donated = on_mesh(donated)
        inputs = {
            name: (on_mesh if name in ("frozen", "key") else rows_on_mesh)(tree)
            for name, tree in inputs.items()
        }
        part_bytes = sum(map(part, jax.tree.leaves(donated)))
        assert 5000 < part_bytes < storage.nbytes(donated) / 2
        assert overwritten(function, donated, inputs) >= part_bytes
