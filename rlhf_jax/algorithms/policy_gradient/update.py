"""Experience -> TrainState: the epochs, their minibatches and one step for each.

experience ─shuffled─> minibatch ─loss─> gradient ─guards─> optimizer
           └───────── epochs x minibatches, one scan ───────────┘

It is the same for every policy gradient: the algorithm brings the loss.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.algorithms import sft
from rlhf_jax.algorithms.batch import PolicyExperience, Sequences
from rlhf_jax.algorithms.policy_gradient.recipe import PolicyGradient
from rlhf_jax.algorithms.state import (
    LossFunction,
    Optimizer,
    TrainState,
    accumulate,
    apply_gradients,
    count_skips,
)
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import k1
from rlhf_jax.roles import adapted
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any
# A whole minibatch -> the minibatch that is learned from, and the loss of its parts.
LossOf = Callable[[Any], tuple[Any, LossFunction]]


def update(
    state: TrainState,
    *,
    experience: PolicyExperience,
    key: Array,
    algorithm: PolicyGradient,
    loss_of: LossOf,
    critic_optimizer: Optimizer | None = None,
    base: Frozen | None = None,
    ptx: Sequences | None = None,
    hold_policy: Array | None = None,
) -> tuple[TrainState, masked.Stats]:
    """Epochs over reshuffled minibatches, one optimizer step each, in one program.

    Args:
      state: donated by the caller's `jit`.
      experience: PolicyExperience[B, S].
      key: shuffles; epoch e uses fold_in(key, e).
      algorithm: static.
      loss_of: makes the loss of a minibatch; it may change the minibatch first.
      critic_optimizer: of the state's critic; None without one.
      base, ptx: as `ppo.iteration`.
      hold_policy: bool[], True where the critic alone is to be trained.

    Returns:
      The state of the next iteration and stats over all minibatches that were used. A
      minibatch whose gradient is not finite changes nothing but `state.skipped`; one
      that `max_ratio_mean` leaves out, or that comes after `stop_approxkl` has ended
      the updates, changes nothing at all.
      `policy/sampler_mismatch` is mean |log π_trainer - log π_sampler| over the first
      minibatch, before anything has moved, nats per token.

    Raises:
      InputError: batch sizes do not divide, the state has a critic where the
        algorithm has none or the other way round, or as `ppo.iteration`.
    """
    if (critic_optimizer is None) != (state.critic_opt is None):
        has, needs = ("no critic", "one") if critic_optimizer else ("a critic", "none")
        raise InputError(
            f"expected a state of the algorithm's own kind, got one with {has} where "
            f"it has {needs}; make it by state.ppo_state, or by grpo_state without"
        )
    rows = experience.tokens.shape[0]
    texts = _shared_out(ptx, algorithm)

    order = minibatches(key, rows=rows, algorithm=algorithm)

    def step(
        carry: tuple[TrainState, Array], turn: tuple[Array, Array]
    ) -> tuple[tuple[TrainState, Array], masked.Stats]:
        number, chosen = turn

        def take(state: TrainState) -> tuple[TrainState, Array, masked.Stats]:
            part = number % algorithm.num_minibatches
            return _step(
                state,
                minibatch=jax.tree.map(lambda leaf: leaf[chosen], experience),
                algorithm=algorithm,
                loss_of=loss_of,
                critic_optimizer=critic_optimizer,
                base=base,
                hold_policy=hold_policy,
                ptx=jax.tree.map(lambda leaf: leaf[part], texts),
            )

        def leave(state: TrainState) -> tuple[TrainState, Array, masked.Stats]:
            _, _, stats = jax.eval_shape(take, state)
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)
            one = jnp.ones((), jnp.float32)
            return state, jnp.bool_(True), nothing | {"update/stopped": (one, one)}

        state, stopped = carry
        if algorithm.stop_approxkl is None:
            state, _, stats = take(state)
        else:
            state, stopped, stats = jax.lax.cond(stopped, leave, take, state)
        return (state, stopped), stats

    turns = jnp.arange(len(order)), order
    (state, _), stats = jax.lax.scan(step, (state, jnp.bool_(False)), turns)
    first = jax.tree.map(lambda leaf: leaf[0], stats["policy/sampler_mismatch"])
    stats = masked.total_stats(stats) | {"policy/sampler_mismatch": first}
    seen = None
    mask = experience.response_mask
    if experience.ref_logprobs is not None:
        seen = k1(experience.old_logprobs, experience.ref_logprobs)
        seen = masked.masked_sum(seen, mask=mask) / rows
    kl = state.kl.update(
        kl=seen,
        mean_length=mask.sum(dtype=jnp.float32) / rows,
        num_episodes=rows * algorithm.lifecycle.kl_every,
    )
    return dataclasses.replace(state, kl=kl, step=state.step + 1), stats


def minibatches(key: Array, *, rows: int, algorithm: PolicyGradient) -> Array:
    """The rows of every minibatch of an update, in turn.

    Args:
      key: shuffles; epoch e uses fold_in(key, e).
      rows: B, of the batch.
      algorithm: static.

    Returns:
      i32[num_epochs · num_minibatches, B / num_minibatches].

    Raises:
      InputError: batch sizes do not divide.
    """
    size = algorithm.minibatch_size(rows)

    def shuffled(epoch: Array) -> Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), rows)

    epochs = jnp.arange(algorithm.num_epochs)
    return jax.vmap(shuffled)(epochs).reshape(-1, size)


def kl_coef(state: TrainState, *, algorithm: PolicyGradient) -> Array:
    """β of this iteration, f32[], reward units per nat, as the lifecycle scales it."""
    return algorithm.lifecycle.kl_scale * state.kl.kl_coef


def _shared_out(ptx: Sequences | None, algorithm: PolicyGradient) -> Sequences | None:
    """Sequences[num_minibatches, M / num_minibatches, S']."""
    if (ptx is None) != (algorithm.ptx_coef == 0):
        given = "none" if ptx is None else "some"
        raise InputError(
            f"expected ptx texts if, and only if, ptx_coef is above 0, got {given} "
            f"with ptx_coef {algorithm.ptx_coef:g}; give both or neither"
        )
    if ptx is None:
        return None
    rows, count = ptx.tokens.shape[0], algorithm.num_minibatches
    if rows % count:
        raise InputError(
            f"expected num_minibatches to divide the {rows} rows of ptx, got {count}; "
            f"change either"
        )
    return jax.tree.map(
        lambda leaf: leaf.reshape(count, rows // count, *leaf.shape[1:]), ptx
    )


def _step(
    state: TrainState,
    *,
    minibatch: PolicyExperience,
    algorithm: PolicyGradient,
    loss_of: LossOf,
    critic_optimizer: Optimizer | None,
    base: Frozen | None,
    ptx: Sequences | None,
    hold_policy: Array | None,
) -> tuple[TrainState, Array, masked.Stats]:
    """One optimizer step, or none; True where the updates of this batch are to end."""
    minibatch, loss = loss_of(minibatch)
    (policy_grads, critic_grads), stats = accumulate(
        loss,
        (state.policy, state.critic),
        minibatch,
        micro_batch_size=algorithm.micro_batch_size,
    )
    if ptx is not None:
        grads, ptx_stats = _ptx_gradient(
            state.policy, ptx, algorithm=algorithm, base=base
        )
        policy_grads = jax.tree.map(jnp.add, policy_grads, grads)
        stats |= ptx_stats
    norms = {"policy/grad_norm": optax.tree.norm(policy_grads)}
    if critic_optimizer is not None:
        norms["critic/grad_norm"] = optax.tree.norm(critic_grads)
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, norms.values()))
    kept, stopped, guard_stats = _guards(stats, algorithm)
    stats |= {name: (norm, jnp.ones_like(norm)) for name, norm in norms.items()}
    moves = finite & kept
    policy, policy_opt = apply_gradients(
        state.policy,
        state.policy_opt,
        policy_grads,
        optimizer=algorithm.policy_optimizer,
        finite=moves if hold_policy is None else moves & ~hold_policy,
    )
    critic, critic_opt = state.critic, state.critic_opt
    if critic_optimizer is not None and critic_opt is not None:
        critic, critic_opt = apply_gradients(
            critic,
            critic_opt,
            critic_grads,
            optimizer=critic_optimizer,
            finite=moves,
        )
    skipped, stats = count_skips(state.skipped, stats, finite=finite)
    state = dataclasses.replace(
        state,
        policy=policy,
        policy_opt=policy_opt,
        critic=critic,
        critic_opt=critic_opt,
        skipped=skipped,
    )
    return state, stopped, stats | guard_stats


def _ptx_gradient(
    policy: Params, texts: Sequences, *, algorithm: PolicyGradient, base: Frozen | None
) -> tuple[Params, masked.Stats]:
    """ptx_coef · gradient of the language-model loss at temperature 1.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2.
    """
    num_tokens = sft.predicted(texts).sum(dtype=jnp.float32)

    def loss(trained: Params, part: Sequences) -> tuple[Array, masked.Stats]:
        found, stats = sft.loss(
            adapted.params(trained, base=base, lora=algorithm.lora),
            part,
            model=algorithm.model,
            num_tokens=num_tokens,
        )
        return algorithm.ptx_coef * found, {"loss/ptx": stats["loss/language_model"]}

    held = algorithm.micro_batch_size
    if held is not None and held >= texts.tokens.shape[0]:
        held = None
    return accumulate(loss, policy, texts, micro_batch_size=held)


def _guards(
    stats: masked.Stats, algorithm: PolicyGradient
) -> tuple[Array, Array, masked.Stats]:
    """(apply this minibatch, end the updates of this batch, what to log of it)."""
    kept, stopped = jnp.bool_(True), jnp.bool_(False)
    logged: masked.Stats = {}
    one = jnp.ones((), jnp.float32)
    means = masked.mean_stats(stats)
    if algorithm.max_ratio_mean is not None:
        kept &= means["policy/ratio_mean"] <= algorithm.max_ratio_mean
        logged["update/guarded"] = ((~kept).astype(jnp.float32), one)
    if algorithm.stop_approxkl is not None:
        stopped = means["policy/approxkl"] > algorithm.stop_approxkl
        kept &= ~stopped
        logged["update/stopped"] = (stopped.astype(jnp.float32), one)
    return kept, stopped, logged
