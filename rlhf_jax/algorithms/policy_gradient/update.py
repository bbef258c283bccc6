"""Experience -> TrainState: epochs over minibatches, with one optimizer step each.

experience ─shuffled─> minibatch ─loss─> gradient ─guards─> optimizer
           └───────── epochs x minibatches, one scan ───────────┘

It is the same for every policy gradient: the recipe has the loss.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax

from rlhf_jax.algorithms.batch import PolicyExperience, RolloutPacking, Sequences
from rlhf_jax.algorithms.flow import ledger
from rlhf_jax.algorithms.policy_gradient.algorithm import MinibatchLoss, PolicyGradient
from rlhf_jax.algorithms.state import (
    Optimizer,
    PackedParts,
    TrainState,
    accumulate,
    apply_gradients,
    count_skips,
    packed_parts,
)
from rlhf_jax.functional import masked
from rlhf_jax.functional.checks import InputError
from rlhf_jax.functional.kl import k1
from rlhf_jax.roles.reference.frozen import NO_MODELS, FrozenModels, adapted_params

Array = jax.Array
Params = Any


def update(
    state: TrainState,
    *,
    experience: PolicyExperience,
    key: Array,
    recipe: PolicyGradient,
    frozen: FrozenModels = NO_MODELS,
    ptx: Sequences | None = None,
    packing: RolloutPacking | None = None,
) -> tuple[TrainState, masked.Stats]:
    """Epochs over reshuffled minibatches, one optimizer step each, in one program.

    Args:
      state: donated by the caller's `jit`. Where it lacks the algorithm's critic,
        another program updates the critic (`ppo.critic_apart`).
      key: shuffles; epoch e uses fold_in(key, e).
      ptx: Sequences[M, S'], for `recipe.ptx_coef`.
      packing: packed layout for the lengths of this experience and the order of
        `minibatches(key)`, which the host recomputes: one small transfer per iteration.
        Its parts are the micro-batches. None reads padded rows.

    Returns:
      The state of the next iteration and stats over all minibatches that were used. A
      minibatch whose gradient is not finite changes only `state.skipped`. A minibatch
      that `max_ratio_mean` leaves out, or that follows the end of the updates by
      `stop_approxkl`, changes nothing.
      `policy/sampler_mismatch` is mean |log π_trainer - log π_sampler| over the first
      minibatch, before any step, nats per token. The ledger of trust (`flow.ledger`)
      is of that minibatch too, if the experience has entries for it.

    Raises:
      InputError: batch sizes do not divide; the state has a critic but the algorithm
        has none, or lacks a critic that cannot be trained apart; only one is given of
        the base and `recipe.lora`, or of `ptx` and `recipe.ptx_coef`; or the packing
        has another number of steps.
    """
    critic, critic_optimizer, policy_waits = recipe.critic, None, None
    if critic is not None:
        # Traced: warm-up ends without another compilation.
        policy_waits = state.step < critic.warmup
        critic_optimizer = critic.optimizer
        # Without the critic's moments, another program trains it on its own devices.
        if state.critic_opt is None:
            critic_optimizer = None
            recipe.refuse_critic_apart()
    elif state.critic_opt is not None:
        raise InputError(
            "expected a state without a critic, as the algorithm has none, got one "
            "with; make it by state.grpo_state"
        )
    rows = experience.tokens.shape[0]
    texts = ptx_parts(ptx, recipe)

    # i32[T, b]: the scan gathers rows step by step, so the experience is never copied
    # whole in a new order.
    order = minibatches(key, rows=rows, recipe=recipe)
    loss_of = functools.partial(
        recipe.minibatch_loss,
        # The β of `make_experience`: the controller moves once, after the scan.
        kl_coef=recipe.kl_coef(state),
        frozen=frozen,
    )

    def step(
        carry: tuple[TrainState, Array], turn: tuple[Array, Array, PackedParts | None]
    ) -> tuple[tuple[TrainState, Array], masked.Stats]:
        number, chosen, parts = turn

        def take(state: TrainState) -> tuple[TrainState, Array, masked.Stats]:
            # Minibatch i of every epoch mixes in the same texts.
            part = number % recipe.num_minibatches
            return _step(
                state,
                minibatch=jax.tree.map(lambda leaf: leaf[chosen], experience),
                recipe=recipe,
                loss_of=loss_of,
                critic_optimizer=critic_optimizer,
                frozen=frozen,
                policy_waits=policy_waits,
                ptx=jax.tree.map(lambda leaf: leaf[part], texts),
                parts=parts,
            )

        def leave(state: TrainState) -> tuple[TrainState, Array, masked.Stats]:
            # Both branches of a `cond` return the same structure: zeros in the shapes
            # of `take`, which is not computed.
            _, _, stats = jax.eval_shape(take, state)
            nothing = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), stats)
            one = jnp.ones((), jnp.float32)
            return state, jnp.bool_(True), nothing | {"update/stopped": (one, one)}

        state, stopped = carry
        # Static: without this guard there is no `cond` in the program at all.
        if recipe.stop_approxkl is None:
            state, _, stats = take(state)
        else:
            # A branch, not a `where`: minibatches after the stop are not computed.
            state, stopped, stats = jax.lax.cond(stopped, leave, take, state)
        return (state, stopped), stats

    parts = packed_parts(packing, steps=len(order))
    turns = jnp.arange(len(order)), order, parts
    # One body for all epochs and minibatches compiles once.
    (state, _), stats = jax.lax.scan(step, (state, jnp.bool_(False)), turns)
    # Trainer and sampler are compared before the first step only: entry 0 of [T].
    mismatch = stats.pop("policy/sampler_mismatch")
    of_ledger = [name for name in stats if name.startswith(ledger.PREFIX)]
    trust = {name: stats.pop(name) for name in of_ledger}
    stats = masked.total_stats(stats)
    stats |= ledger.settle(jax.tree.map(lambda leaf: leaf[0], trust))
    if not recipe.recomputes_logprobs:  # else `make_experience` has compared them
        stats["policy/sampler_mismatch"] = jax.tree.map(lambda leaf: leaf[0], mismatch)
    kl_of_response = None
    mask = experience.response_mask
    # Rows that are left out, and episodes that never began, have no token.
    began = experience.responses
    responses = jnp.maximum(began.sum(dtype=jnp.float32), 1.0)
    # k1 of the samples before the update: a controller does not react to the epochs of
    # this update.
    if experience.ref_logprobs is not None:
        per_token = k1(experience.old_logprobs, experience.ref_logprobs)
        kl_of_response = masked.masked_sum(per_token, mask=mask) / responses
        # The KL of no responses is not 0: NaN leaves β as it is.
        kl_of_response = jnp.where(mask.any(), kl_of_response, jnp.nan)
    kl = state.kl.update(
        kl=kl_of_response,
        mean_length=mask.sum(dtype=jnp.float32) / responses,
        # Iterations without a KL since the last one count towards the horizon too.
        num_episodes=began.size * recipe.lifecycle.kl_every,
    )
    return dataclasses.replace(state, kl=kl, step=state.step + 1), stats


def shuffle_key(key: Array) -> Array:
    """The key of `update` in an iteration: the second of the two split from `key`."""
    return jax.random.split(key)[1]


def minibatches(key: Array, *, rows: int, recipe: PolicyGradient) -> Array:
    """The rows of every minibatch of an update; epoch e uses fold_in(key, e).

    Returns:
      i32[num_epochs · num_minibatches, B / num_minibatches].
    """
    size = recipe.minibatch_size(rows)

    def shuffled(epoch: Array) -> Array:
        return jax.random.permutation(jax.random.fold_in(key, epoch), rows)

    # Every epoch is a permutation that visits each row once, cut into minibatches.
    epochs = jnp.arange(recipe.num_epochs)
    return jax.vmap(shuffled)(epochs).reshape(-1, size)


def _step(
    state: TrainState,
    *,
    minibatch: PolicyExperience,
    recipe: PolicyGradient,
    loss_of: MinibatchLoss,
    critic_optimizer: Optimizer | None,
    frozen: FrozenModels,
    ptx: Sequences | None,
    policy_waits: Array | None,
    parts: PackedParts | None,
) -> tuple[TrainState, Array, masked.Stats]:
    """One optimizer step, or none; bool[] is True to end the updates of this batch."""
    minibatch, loss = loss_of(minibatch)

    def gradients(policy: Params) -> tuple[tuple[Params, Params], masked.Stats]:
        return accumulate(
            loss,
            (policy, state.critic),
            minibatch,
            micro_batch_size=recipe.micro_batch_size,
            parts=parts,
        )

    (policy_grads, critic_grads), stats = gradients(state.policy)
    if recipe.gradient_penalty is not None:
        from rlhf_jax.algorithms.policy_gradient.gradient_penalty import penalised

        policy_grads = penalised(
            lambda policy: gradients(policy)[0][0],
            state.policy,
            policy_grads,
            penalty=recipe.gradient_penalty,
        )
    if ptx is not None:
        grads, ptx_stats = ptx_gradient(state.policy, ptx, recipe=recipe, frozen=frozen)
        policy_grads = jax.tree.map(jnp.add, policy_grads, grads)
        stats |= ptx_stats
    norms = {"policy/grad_norm": optax.tree.norm(policy_grads)}
    if critic_optimizer is not None:
        norms["critic/grad_norm"] = optax.tree.norm(critic_grads)
    # A norm is finite only if every entry and its square are: one scalar checks the
    # whole tree. NaN in either model skips both, which keeps them in step.
    finite = functools.reduce(jnp.logical_and, map(jnp.isfinite, norms.values()))
    # From this minibatch's own forward pass: a step beyond a guard is not taken.
    accepted, stopped, guard_stats = _guards(stats, recipe)
    stats |= {name: (norm, jnp.ones_like(norm)) for name, norm in norms.items()}
    moves = finite & accepted
    policy, policy_opt = apply_gradients(
        state.policy,
        state.policy_opt,
        policy_grads,
        optimizer=recipe.policy_optimizer,
        # Warm-up computes the policy's gradient and discards it, so that one program
        # serves before and after.
        finite=moves if policy_waits is None else moves & ~policy_waits,
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
    # Only by `finite`: minibatches that a guard leaves out are no failure.
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


def _guards(
    stats: masked.Stats, recipe: PolicyGradient
) -> tuple[Array, Array, masked.Stats]:
    """(apply this minibatch, end the updates of this batch, stats)."""
    accepted, stopped = jnp.bool_(True), jnp.bool_(False)
    logged: masked.Stats = {}
    one = jnp.ones((), jnp.float32)
    # Sums over all micro-batches: guards act on the whole minibatch, however it is cut.
    means = masked.mean_stats(stats)
    if recipe.max_ratio_mean is not None:
        accepted &= means["policy/ratio_mean"] <= recipe.max_ratio_mean
        logged["update/guarded"] = ((~accepted).astype(jnp.float32), one)
    if recipe.stop_approxkl is not None:
        stopped = means["policy/approxkl"] > recipe.stop_approxkl
        accepted &= ~stopped
        logged["update/stopped"] = (stopped.astype(jnp.float32), one)
    return accepted, stopped, logged


def ptx_parts(ptx: Sequences | None, recipe: PolicyGradient) -> Sequences | None:
    """Divides the texts over the minibatches of an epoch.

    Args:
      ptx: Sequences[M, S'].

    Returns:
      Sequences[num_minibatches, M / num_minibatches, S'].

    Raises:
      InputError: only one of texts and `ptx_coef` is given, or M does not divide.
    """
    if (ptx is None) != (recipe.ptx_coef == 0):
        texts = "none" if ptx is None else "some"
        raise InputError(
            f"expected ptx texts if, and only if, ptx_coef is above 0, got {texts} "
            f"with ptx_coef {recipe.ptx_coef:g}; give both or neither"
        )
    if ptx is None:
        return None
    rows, count = ptx.tokens.shape[0], recipe.num_minibatches
    if rows % count:
        raise InputError(
            f"expected num_minibatches to divide the {rows} rows of ptx, got {count}; "
            f"change either"
        )
    return jax.tree.map(
        lambda leaf: leaf.reshape(count, rows // count, *leaf.shape[1:]), ptx
    )


def ptx_gradient(
    policy: Params, texts: Sequences, *, recipe: PolicyGradient, frozen: FrozenModels
) -> tuple[Params, masked.Stats]:
    """ptx_coef · gradient of the language-model loss at temperature 1.

    Source: Ouyang et al. 2022, arXiv:2203.02155, eq. 2.
    """
    from rlhf_jax.algorithms import sft  # few runs mix texts in

    # Over all texts of the minibatch, so that micro-batches add up to its mean.
    num_tokens = sft.predicted(texts).sum(dtype=jnp.float32)

    def ptx_loss(trained: Params, part: Sequences) -> tuple[Array, masked.Stats]:
        loss, stats = sft.loss(
            adapted_params(trained, base=frozen.base, lora=recipe.lora),
            part,
            model=recipe.model,
            num_tokens=num_tokens,
        )
        return recipe.ptx_coef * loss, {"loss/ptx": stats["loss/language_model"]}

    # There may be fewer texts than responses: one micro-batch then has them all.
    size = recipe.micro_batch_size
    if size is not None and size >= texts.tokens.shape[0]:
        size = None
    return accumulate(ptx_loss, policy, texts, micro_batch_size=size)
