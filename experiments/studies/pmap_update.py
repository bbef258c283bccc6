"""The PPO update under `jax.pmap` equals `jax.jit` on the whole batch.

    XLA_FLAGS=--xla_force_host_platform_device_count=4 \\
        python experiments studies.pmap_update --out runs/pmap

For users of `pmap`. With `jit` and a mesh (`rlhf_jax.sharding`) none of this is needed,
and models can be sharded too. Here every device has the whole state and its own rows.
A loss is a sum over tokens, S_d on device d, divided by the N tokens of the whole
minibatch. Devices have different numbers of tokens N_d, because responses differ in
length:

    wrong    pmean of the gradients of S_d / N_d          a mean of means
    right    pmean of the gradients of S_d / (N / D)      = gradient of Σ S_d / N

`update` below passes N / D to the library's losses as the divisor. Gradients are
averaged *before* they are clipped or checked, so that every device takes the same step.
GAE and whitening come before the update and use the whole batch; `whiten_advantages=
"minibatch"` would use only a device's rows. With more than one minibatch each device
shuffles its own rows, which gives other, equally valid minibatches than `jit`.

The model learns to write words of praise. From the same state and rows each step is
made three times: by `jit`, right and wrong. The study takes 40 seconds on 2 laptop
cores. The largest difference to `jit` in the policy is at most 2e-4 of the largest move
in the first step and 3e-5 later, the effect of summing in another order. With the mean
of means it is 0.2 to 1.3 of the largest move (with Adam), or as small as with the right
one if by chance no response ends early.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from worlds import reviews

from rlhf_jax import config, critic, decoder, frozen, kl, kl_control, masked, ppo, state
from rlhf_jax.algorithms import optimizers
from rlhf_jax.algorithms.batch import Experience, Rollout
from rlhf_jax.algorithms.flow import score
from rlhf_jax.algorithms.ppo import gae_experience
from rlhf_jax.algorithms.state import LossFunction, TrainState
from rlhf_jax.data import batches
from rlhf_jax.functional import checks
from rlhf_jax.roles.reference.frozen import NO_MODELS, Frozen, FrozenModels
from rlhf_jax.runs import command_line, report
from rlhf_jax.runs.folder import open_run, write_summary
from rlhf_jax.runs.run_config import RunConfig

Array = jax.Array
DEVICES = "devices"  # the mapped axis
NEW_TOKENS = 12
STOP_IDS = (reviews.EOS_ID,)
GRADES = np.array([reviews.GRADES.get(w, 0) for w in reviews.VOCABULARY], np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(RunConfig):
    num_devices: int = 4
    """Number of devices that share a batch."""
    num_steps: int = 5
    """Number of iterations."""
    batch_size: int = 32
    """Responses per iteration."""
    learning_rate: float = 1e-3
    """Learning rate of Adam, for policy and critic."""
    kl_coef: float = 0.1
    """KL coefficient β, reward units per nat."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.positive(
            num_devices=self.num_devices,
            num_steps=self.num_steps,
            learning_rate=self.learning_rate,
        )
        if self.batch_size % self.num_devices:
            raise checks.InputError(
                f"batch_size: expected a multiple of num_devices, {self.num_devices}, "
                f"got {self.batch_size}; change either"
            )


# The mean over the devices.
mean = functools.partial(jax.lax.pmean, axis_name=DEVICES)


@jax.custom_vjp
def of_all_devices(params: Any) -> Any:
    """Returns the parameters; their gradient is the mean over all devices."""
    return params


of_all_devices.defvjp(
    lambda params: (params, None),
    lambda _, gradient: (mean(gradient),),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MappedPPO(ppo.PPO):
    """PPO on one of several devices, with the losses and gradients of all devices."""

    count: Callable[[Array], Array]

    def minibatch_loss(
        self,
        minibatch: Experience,
        *,
        kl_coef: Array,
        frozen: FrozenModels = NO_MODELS,
    ) -> tuple[Experience, LossFunction]:
        """`ppo_loss` of this device's rows, over the tokens of all devices."""
        mask = minibatch.response_mask
        loss_of_rows = functools.partial(
            ppo.ppo_loss,
            kl_coef=kl_coef,
            num_tokens=self.count(mask.sum(dtype=jnp.float32)),
            num_values=self.count(minibatch.value_mask.sum(dtype=jnp.float32)),
            num_responses=self.count(mask.any(axis=1).sum(dtype=jnp.float32)),
            recipe=self,
            frozen=frozen,
        )

        def loss(trained: Any, part: Experience) -> tuple[Array, masked.Stats]:
            loss, stats = loss_of_rows(*of_all_devices(trained), experience=part)
            # (sum, weight) pairs add up over the devices.
            return loss, masked.total_stats(jax.lax.all_gather(stats, DEVICES))

        return minibatch, loss


def update(
    train: TrainState,
    rows: Experience,
    key: Array,
    *,
    algorithm: ppo.PPO,
    count: Callable[[Array], Array] = mean,
) -> tuple[TrainState, masked.Stats]:
    """`ppo.update` of the rows of all devices, on each of them, under `jax.pmap`.

    Args:
      train: the same on every device.
      rows: Experience[B / D, S], this device's.
      key: the same on every device.
      algorithm: static; without whitening over a minibatch.
      count: the number of this device's tokens -> the divisor of its loss, N / D.

    Returns:
      The next state and the stats of all rows, the same on every device.
    """
    recipe = MappedPPO(**vars(algorithm), count=count)
    after, stats = ppo.update(train, experience=rows, key=key, recipe=recipe)
    # `ppo.update` used only this device's rows for the KL controller; use all rows.
    size, mask = rows.tokens.shape[0], rows.response_mask
    assert rows.ref_logprobs is not None  # because there is a reference
    per_token = kl.k1(rows.old_logprobs, rows.ref_logprobs)
    controller = train.kl.update(
        kl=mean(masked.masked_sum(per_token, mask=mask)) / size,
        mean_length=mean(mask.sum(dtype=jnp.float32)) / size,
        num_episodes=size * jax.lax.axis_size(DEVICES),
    )
    return dataclasses.replace(after, kl=controller), stats


def mapped(function: Any, *, num_devices: int) -> Any:
    """Returns `function` under pmap, on whole arrays whose rows the devices share."""
    devices = jax.devices()[:num_devices]
    program = jax.pmap(
        function,
        axis_name=DEVICES,
        in_axes=(0, 0, None),
        devices=devices,
        donate_argnums=0,
    )
    sharding = NamedSharding(
        Mesh(np.array(devices), (DEVICES,)), PartitionSpec(DEVICES)
    )

    def run(train: TrainState, rows: Experience, key: Array) -> Any:
        copies = jax.tree.map(lambda leaf: jnp.stack([leaf] * num_devices), train)
        parts = jax.tree.map(
            lambda leaf: leaf.reshape(num_devices, -1, *leaf.shape[1:]), rows
        )
        results = program(*jax.device_put((copies, parts), sharding), key)
        return jax.tree.map(lambda leaf: leaf[0], jax.device_get(results))

    return run


def praise(answered: Rollout) -> Array:
    """Returns the scores, f32[B]: the sum of the grades of a response's words."""
    grades = jnp.asarray(GRADES)[answered.tokens]
    return masked.masked_sum(grades, mask=answered.response_mask, axis=1)


def to_experience(
    train: TrainState, answered: Rollout, reference: Frozen, *, algorithm: ppo.PPO
) -> tuple[Experience, Array]:
    """The experience, computed as in `ppo.learn`, and the mean score."""
    scored = score.score(
        answered,
        scores=praise(answered),
        reference=reference,
        model=algorithm.model,
        values=score.response_values(
            train.critic,
            rollout=answered,
            model=algorithm.critic_model,
            max_new_tokens=algorithm.max_new_tokens,
            after_stop=False,
        ),
        max_new_tokens=algorithm.max_new_tokens,
        temperature=algorithm.temperature,
    )
    made = gae_experience(
        scored, kl_coef=train.kl.kl_coef, gamma=algorithm.gamma, lam=algorithm.lam
    )
    return made, scored.scores.mean()


def farthest(left: Any, right: Any) -> Array:
    """The largest absolute difference over all leaves."""
    return jnp.stack(
        jax.tree.leaves(jax.tree.map(lambda a, b: jnp.abs(a - b).max(), left, right))
    ).max()


def main(options: Config) -> None:
    if len(jax.devices()) < options.num_devices:
        raise checks.InputError(
            f"num_devices: expected {options.num_devices} devices, got "
            f"{len(jax.devices())}; on a CPU set XLA_FLAGS="
            f"--xla_force_host_platform_device_count={options.num_devices}, or ask "
            f"for fewer"
        )
    folder = open_run(options)
    prompts = batches.prompt_batches(
        [reviews.encode(prompt) for prompt in reviews.TRAIN_PROMPTS],
        batch_size=options.batch_size,
        seed=options.seed,
        pad_id=reviews.PAD_ID,
    )
    model = config.gpt2(
        vocab_size=len(reviews.VOCABULARY),
        hidden_size=64,
        num_layers=1,
        num_heads=4,
        max_positions=64,
    )
    optimizer = optimizers.adam(options.learning_rate)
    algorithm = ppo.PPO(
        model=model,
        critic_model=model,
        policy_optimizer=optimizer,
        critic_optimizer=optimizer,
        max_new_tokens=NEW_TOKENS,
        stop_ids=STOP_IDS,
    )
    init_key, key = jax.random.split(jax.random.key(options.seed))
    params = jax.jit(decoder.init, static_argnames=("model",))(init_key, model=model)
    reference = frozen.freeze(params)
    train = state.ppo_state(
        policy=params,
        critic=critic.from_policy(params, model=model),
        policy_optimizer=optimizer,
        critic_optimizer=optimizer,
        kl=kl_control.fixed(options.kl_coef),
    )
    sample = jax.jit(functools.partial(ppo.sample, recipe=algorithm))
    prepare = jax.jit(functools.partial(to_experience, algorithm=algorithm))
    whole = jax.jit(functools.partial(ppo.update, recipe=algorithm))
    right = functools.partial(update, algorithm=algorithm)
    wrong = functools.partial(right, count=lambda own: own)
    by_pmap, mean_of_means = (
        mapped(function, num_devices=options.num_devices) for function in (right, wrong)
    )
    rows = []
    for step in range(options.num_steps):
        step_key = jax.random.fold_in(key, step)
        answered = sample(train.policy, prompts=prompts[step], key=step_key)
        made, scores = prepare(train, answered, reference)
        expected, _ = whole(train, experience=made, key=step_key)
        pmapped, _ = by_pmap(train, made, step_key)
        means, _ = mean_of_means(train, made, step_key)
        moved = farthest(expected.policy, train.policy)
        share = [
            float(farthest(other.policy, expected.policy) / moved)
            for other in (pmapped, means)
        ]
        rows.append((step, float(scores), float(moved), *share))
        train = pmapped
    columns = ("step", "score", "largest move", "pmap - jit", "mean of means - jit")
    report.table("Differences as shares of the largest move", columns, rows)
    names = ("step", "score", "moved", "pmap", "mean_of_means")
    write_summary(
        folder, {"steps": [dict(zip(names, row, strict=True)) for row in rows]}
    )


if __name__ == "__main__":
    command_line.main(main, Config, description=__doc__)
