"""Experience -> TrainState: the epochs, their minibatches and one step for each.

experience ─shuffled─> minibatch ─ppo_loss─> gradient ─guards─> optimizer
           └─────────── epochs x minibatches, one scan ─────────────┘
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.functional import kl as kl_
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles import adapted
from rlhf_jax.roles.frozen import Frozen
from rlhf_jax.stages import experience as experience_
from rlhf_jax.stages import sft
from rlhf_jax.stages import state as state_
from rlhf_jax.stages.batch import Experience, Sequences
from rlhf_jax.stages.ppo_config import PPO
from rlhf_jax.stages.ppo_loss import ppo_loss
from rlhf_jax.stages.state import TrainState

Array = jax.Array
Params = Any


def update(
    state: TrainState,
    *,
    experience: Experience,
    key: Array,
    ppo: PPO,
    base: Frozen | None = None,
    reference: Frozen | None = None,
    ptx: Sequences | None = None,
) -> tuple[TrainState, masked.Stats]:
    """Epochs over reshuffled minibatches, one optimizer step each, in one program.

    Args:
      state: donated by the caller's `jit`.
      experience: Experience[B, S].
      key: shuffles; epoch e uses fold_in(key, e).
      ppo: static.
      base, ptx: as `iteration`.
      reference: read for exact KL in the loss alone.

    Returns:
      The state of the next iteration and stats over all minibatches that were used. A
      minibatch whose gradient is not finite changes nothing but `state.skipped`; one
      that `ppo.max_ratio_mean` leaves out, or that comes after `ppo.stop_approxkl` has
      ended the updates, changes nothing at all.
      `policy/sampler_mismatch` is mean |log π_trainer - log π_sampler| over the first
      minibatch, before anything has moved, nats per token.

    Raises:
      InputError: batch sizes do not divide, or as `iteration`.
    """
    rows = experience.tokens.shape[0]
    minibatch_size = ppo.minibatch_size(rows)
    texts = _shared_out(ptx, ppo)

    def shuffled(epoch: Array) -> Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), rows)

    order = jax.vmap(shuffled)(jnp.arange(ppo.num_epochs)).reshape(-1, minibatch_size)

    def step(
        carry: tuple[TrainState, Array], turn: tuple[Array, Array]
    ) -> tuple[tuple[TrainState, Array], masked.Stats]:
        number, chosen = turn

        def take(state: TrainState) -> tuple[TrainState, Array, masked.Stats]:
            part = number % ppo.num_minibatches
            return _step(
                state,
                minibatch=jax.tree.map(lambda leaf: leaf[chosen], experience),
                ppo=ppo,
                base=base,
                reference=reference,
                ptx=jax.tree.map(lambda leaf: leaf[part], texts),
            )

        def leave(state: TrainState) -> tuple[TrainState, Array, masked.Stats]:
            _, _, stats = jax.eval_shape(take, state)
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)
            one = jnp.ones((), jnp.float32)
            return state, jnp.bool_(True), nothing | {"update/stopped": (one, one)}

        state, stopped = carry
        if ppo.stop_approxkl is None:
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
        seen = kl_.k1(experience.old_logprobs, experience.ref_logprobs)
        seen = masked.masked_sum(seen, mask=mask) / rows
    kl = state.kl.update(
        kl=seen,
        mean_length=mask.sum(dtype=jnp.float32) / rows,
        num_episodes=rows * ppo.lifecycle.kl_every,
    )
    return dataclasses.replace(state, kl=kl, step=state.step + 1), stats


def kl_coef(state: TrainState, *, ppo: PPO) -> Array:
    """β of this iteration, f32[], reward units per nat, as the lifecycle scales it."""
    return ppo.lifecycle.kl_scale * state.kl.kl_coef


def _shared_out(ptx: Sequences | None, ppo: PPO) -> Sequences | None:
    """Sequences[num_minibatches, M / num_minibatches, S']."""
    if (ptx is None) != (ppo.ptx_coef == 0):
        given = "none" if ptx is None else "some"
        raise InputError(
            f"expected ptx texts if, and only if, ptx_coef is above 0, got {given} "
            f"with ptx_coef {ppo.ptx_coef:g}; give both or neither"
        )
    if ptx is None:
        return None
    rows, count = ptx.tokens.shape[0], ppo.num_minibatches
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
    minibatch: Experience,
    ppo: PPO,
    base: Frozen | None,
    reference: Frozen | None,
    ptx: Sequences | None,
) -> tuple[TrainState, Array, masked.Stats]:
    """One optimizer step, or none; True where the updates of this batch are to end."""
    minibatch = _estimated(minibatch, ppo)
    mask = minibatch.response_mask
    num_tokens = mask.sum(dtype=jnp.float32)
    num_values = minibatch.value_mask.sum(dtype=jnp.float32)
    num_responses = mask.any(axis=1).sum(dtype=jnp.float32)

    def loss(
        trained: tuple[Params, Params], part: Experience
    ) -> tuple[Array, masked.Stats]:
        return ppo_loss(
            *trained,
            experience=part,
            kl_coef=kl_coef(state, ppo=ppo),
            num_tokens=num_tokens,
            num_values=num_values,
            num_responses=num_responses,
            ppo=ppo,
            base=base,
            reference=reference,
        )

    (policy_grads, critic_grads), stats = state_.accumulate(
        loss,
        (state.policy, state.critic),
        minibatch,
        micro_batch_size=ppo.micro_batch_size,
    )
    if ptx is not None:
        grads, ptx_stats = _ptx_gradient(state.policy, ptx, ppo=ppo, base=base)
        policy_grads = jax.tree.map(jnp.add, policy_grads, grads)
        stats |= ptx_stats
    policy_norm = optax.tree.norm(policy_grads)
    critic_norm = optax.tree.norm(critic_grads)
    finite = jnp.isfinite(policy_norm) & jnp.isfinite(critic_norm)
    kept, stopped, guard_stats = _guards(stats, ppo)
    stats |= {
        "policy/grad_norm": (policy_norm, jnp.ones_like(policy_norm)),
        "critic/grad_norm": (critic_norm, jnp.ones_like(critic_norm)),
    }
    warm = state.step >= ppo.critic_warmup
    policy, policy_opt = state_.apply_gradients(
        state.policy,
        state.policy_opt,
        policy_grads,
        optimizer=ppo.policy_optimizer,
        finite=finite & kept & warm,
    )
    critic, critic_opt = state_.apply_gradients(
        state.critic,
        state.critic_opt,
        critic_grads,
        optimizer=ppo.critic_optimizer,
        finite=finite & kept,
    )
    skipped, stats = state_.count_skips(state.skipped, stats, finite=finite)
    state = dataclasses.replace(
        state,
        policy=policy,
        policy_opt=policy_opt,
        critic=critic,
        critic_opt=critic_opt,
        skipped=skipped,
    )
    return state, stopped, stats | guard_stats


def _estimated(minibatch: Experience, ppo: PPO) -> Experience:
    """Whitened over the minibatch, rewards (and so GAE again) or advantages."""
    if ppo.whiten_rewards == "minibatch":
        return experience_.estimate(
            minibatch,
            gamma=ppo.gamma,
            lam=ppo.lam,
            whiten_rewards=True,
            whiten_advantages=ppo.whiten_advantages == "minibatch",
            whiten_ddof=ppo.whiten_ddof,
        )
    if ppo.whiten_advantages != "minibatch":
        return minibatch
    whitened = masked.masked_whiten(
        minibatch.advantages, mask=minibatch.response_mask, ddof=ppo.whiten_ddof
    )
    return dataclasses.replace(minibatch, advantages=whitened)


def _ptx_gradient(
    policy: Params, texts: Sequences, *, ppo: PPO, base: Frozen | None
) -> tuple[Params, masked.Stats]:
    """ptx_coef · gradient of the language-model loss at temperature 1.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2.
    """
    num_tokens = sft.predicted(texts).sum(dtype=jnp.float32)

    def loss(trained: Params, part: Sequences) -> tuple[Array, masked.Stats]:
        found, stats = sft.loss(
            adapted.params(trained, base=base, lora=ppo.lora),
            part,
            model=ppo.model,
            num_tokens=num_tokens,
        )
        return ppo.ptx_coef * found, {"loss/ptx": stats["loss/language_model"]}

    held = ppo.micro_batch_size
    if held is not None and held >= texts.tokens.shape[0]:
        held = None
    return state_.accumulate(loss, policy, texts, micro_batch_size=held)


def _guards(stats: masked.Stats, ppo: PPO) -> tuple[Array, Array, masked.Stats]:
    """(apply this minibatch, end the updates of this batch, what to log of it)."""
    kept, stopped = jnp.bool_(True), jnp.bool_(False)
    logged: masked.Stats = {}
    one = jnp.ones((), jnp.float32)
    means = masked.mean_stats(stats)
    if ppo.max_ratio_mean is not None:
        kept &= means["policy/ratio_mean"] <= ppo.max_ratio_mean
        logged["update/guarded"] = ((~kept).astype(jnp.float32), one)
    if ppo.stop_approxkl is not None:
        stopped = means["policy/approxkl"] > ppo.stop_approxkl
        kept &= ~stopped
        logged["update/stopped"] = (stopped.astype(jnp.float32), one)
    return kept, stopped, logged
