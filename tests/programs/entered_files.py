"""Lists the package's files whose functions a PPO iteration enters, and how many.

    PYTHONPATH=.:tests python tests/programs/entered_files.py

Counts calls while `jax.eval_shape` traces `ppo.iteration` with a decoder, a critic, a
reference, an adaptive KL and a function as reward.
"""

from __future__ import annotations

import collections
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import toys

import rlhf_jax
from rlhf_jax import batch, frozen, kl_control, masked, ppo, state
from rlhf_jax.roles.reference.frozen import FrozenModels

PACKAGE = Path(rlhf_jax.__file__).parent
RECIPE = ppo.PPO(
    model=toys.GPT2,
    critic_model=toys.GPT2,
    policy_optimizer=optax.adam(0.1),
    critic_optimizer=optax.adam(0.1),
    max_new_tokens=toys.SIZE,
    stop_ids=toys.STOP,
    num_epochs=2,
    num_minibatches=2,
)


def reward(rollout: batch.Rollout) -> jax.Array:
    even = (rollout.tokens % 2 == 0).astype(jnp.float32)
    return masked.masked_mean(even, mask=rollout.response_mask, axis=1)


def entered() -> dict[str, set[str]]:
    """Names of the functions that are called, by file."""
    control = kl_control.Adaptive(target=0.8, unit="response", horizon=40)
    start = state.ppo_state(
        policy=toys.params(),
        critic=toys.scorer(seed=1),
        policy_optimizer=RECIPE.policy_optimizer,
        critic_optimizer=RECIPE.critic_optimizer,
        kl=control.controller(0.3),
    )
    models = FrozenModels(reference=frozen.freeze(toys.params()))
    found = collections.defaultdict(set)

    def record(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(PACKAGE):
            name = file.relative_to(PACKAGE).as_posix()
            found[name].add(frame.f_code.co_qualname)

    def iteration(start, prompts, models, key):
        return ppo.iteration(
            start, prompts=prompts, frozen=models, reward=reward, key=key, recipe=RECIPE
        )

    arguments = start, toys.prompts(), models, jax.random.key(0)
    sys.setprofile(record)
    try:
        jax.eval_shape(iteration, *arguments)
    finally:
        sys.setprofile(None)
    return found


def main() -> None:
    found = entered()
    for name, functions in sorted(found.items()):
        print(f"{name}: {', '.join(sorted(functions))}")
    print(f"{len(found)} files")


if __name__ == "__main__":
    main()
