"""Prompts -> Rollout: sampled responses with the log-probs of their tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.experts import OWN
from rlhf_jax.models.generation import decode
from rlhf_jax.models.packing import Packing, SizedPacking, at_size, texts_of
from rlhf_jax.roles.policy import logprobs

Array = jax.Array
Params = Any


@jax.named_scope("rollout")
def rollout(
    policy: Params,
    *,
    model: ModelConfig,
    prompts: Prompts,
    key: Array,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    temperature: float,
    shaping: decode.Shaping | None = None,
    group_size: int = 1,
    continuous_batching: int | None = None,
    version: Array | None = None,
    record_experts: bool = False,
    record_top_k: int | None = None,
) -> Rollout:
    """Samples one response to every row of prompts.

    Args:
      key: key of this step; row keys are folded from it by index and sample number.
      shaping: for evaluation samples only.
      group_size: neighbouring rows with the same prompt, which is run once.
      continuous_batching: rows sampled at a time; None samples all at once.
      version: i32[], version of the policy, recorded for every sampled token; None
        records none.
      record_experts: record the experts of every token of a mixture, for replay.
      record_top_k: number of likeliest tokens to record at each position; None: none.

    Returns:
      Rollout[B, P + R]; `old_logprobs` come from the logits the tokens were drawn from,
      and `sampler_logprobs` is None: the sampler counts as the trainer.

    Raises:
      InputError: temperature <= 0, no new tokens, prompts too long for the model,
        continuous_batching below a group or above the rows, or two rows with equal
        index and sample number, where both are concrete arrays.
    """
    # Equal keys draw equal responses: a group of copies would have no advantage.
    _refuse_equal_samples(prompts)
    generated = decode.generate(
        policy,
        model=model,
        tokens=prompts.tokens,
        mask=prompts.mask,
        # By data index and sample number, not by row: a prompt's sample does not depend
        # on batch size, order or devices.
        keys=decode.row_keys(key, index=prompts.index, sample=prompts.sample),
        max_new_tokens=max_new_tokens,
        stop_ids=stop_ids,
        temperature=temperature,
        shaping=shaping,
        group_size=group_size,
        continuous_batching=continuous_batching,
        record_experts=record_experts,
        record_top_k=record_top_k,
    )
    return of_generated(generated, prompts=prompts, version=version)


def of_generated(
    generated: decode.Generated, *, prompts: Prompts, version: Array | None
) -> Rollout:
    """The rollout of responses to prompts, all drawn by one version of the policy."""
    return Rollout(
        tokens=generated.tokens,
        mask=generated.mask,
        response_mask=generated.response_mask,
        old_logprobs=generated.logprobs,
        entropy=generated.entropy,
        index=prompts.index,
        sample=prompts.sample,
        version=None
        if version is None
        # The prompt's columns have version 0.
        else jnp.where(generated.response_mask, version, 0),
        experts=generated.experts,
        top_k=generated.top_k,
    )


def _refuse_equal_samples(prompts: Prompts) -> None:
    rows = prompts.index, prompts.sample
    for numbers in rows:  # traced arrays and those of several processes are not read
        if isinstance(numbers, Tracer):
            return
        if not getattr(numbers, "is_fully_addressable", True):
            return
    pairs, counts = np.unique(np.stack(rows, axis=1), axis=0, return_counts=True)
    if (counts > 1).any():
        index, sample = pairs[counts > 1][0]
        raise InputError(
            f"sample: expected another number for each sample of a prompt, got "
            f"{sample} twice for the prompt of index {index}, whose keys and responses "
            f"would be equal; number them, or give the rows different indices"
        )


def truncate(rollout: Rollout, *, stop_ids: tuple[int, ...], after: int = 0) -> Rollout:
    """Truncates every response after its first stop token, for fixed-length sampling.

        column          0    1    2    3    4    5
        tokens          ·   The  cat  EOS  sat  EOS
        response_mask   0    0    1    1    1    1
        truncated       0    0    1    1    0    0
        after = 2       0    0    1    1    1    1

    Responses must have one turn: an episode of several would end with its first.

    Args:
      rollout: Rollout[B, S], sampled with `stop_ids=()`.
      stop_ids: tokens that end a response, and are kept.
      after: number of tokens at the start among which no stop token counts; OAI: 16.

    Source: `truncate_after` of openai/lm-human-preferences.
    """
    # bool[B, S]. Prompts may contain stop tokens too: `response_mask` excludes them.
    stops = jnp.isin(rollout.tokens, jnp.asarray(stop_ids, jnp.int32))
    position = jnp.cumsum(rollout.response_mask, axis=1) - 1  # in the response, from 0
    stops = stops & rollout.response_mask & (position >= after)
    # Exclusive, so that the first stop token itself stays in the response.
    before = jnp.cumsum(stops, axis=1) - stops  # stop tokens to the left of a column
    return _only(rollout, before == 0)


def leave_out(rollout: Rollout, *, rows: Array) -> Rollout:
    """Removes the responses of the chosen rows, so that nothing is learned from them.

    column          0    1    2    3    4    5
    response_mask   0    1    1    0    1    0      column 3 was observed
    mask            1    1    1    1    1    0
    left out        1    0    0    0    0    0      mask; no response_mask
    """
    # From the first sampled token on, observations between turns included.
    began = jnp.cumsum(rollout.response_mask, axis=1, dtype=jnp.int32) > 0
    return _only(rollout, ~(began & rows[:, None]))


def _only(rollout: Rollout, remaining: Array) -> Rollout:
    """The rollout without the tokens outside bool[B, S]."""
    response_mask = rollout.response_mask & remaining
    of_tokens = {
        "old_logprobs": rollout.old_logprobs,
        "entropy": rollout.entropy,
        "sampler_logprobs": rollout.sampler_logprobs,
        # int32 among float32: `zeros_like` below keeps each dtype.
        "version": rollout.version,
    }
    return dataclasses.replace(
        rollout,
        mask=rollout.mask & remaining,
        response_mask=response_mask,
        **jax.tree.map(
            lambda x: jnp.where(response_mask, x, jnp.zeros_like(x)), of_tokens
        ),
    )


def response_logprobs(
    params: Params,
    *,
    rollout: Rollout,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
    packing: SizedPacking | None = None,
) -> Array:
    """log π of the response tokens, f32[B, S], nats; 0 elsewhere.

    Tokens are routed to the experts that the rollout has recorded, if any.
    """

    def compute(packing: Packing | None) -> Array:
        return logprobs(
            params,
            model=model,
            tokens=rollout.tokens,
            mask=rollout.mask,
            temperature=temperature,
            first_column=rollout.tokens.shape[1] - max_new_tokens,
            packing=packing,
            experts=rollout.experts,
        )

    # Observed tokens between turns have log-probs too, but were not sampled.
    return jnp.where(rollout.response_mask, at_size(packing, compute), 0.0)


def record_experts(
    rollout: Rollout,
    policy: Params,
    *,
    model: ModelConfig,
    max_new_tokens: int,
    packing: SizedPacking | None = None,
    group_size: int = 1,
) -> Rollout:
    """Records the experts that this policy chooses, by one forward pass.

    Args:
      group_size: neighbouring rows with the same prompt. A packing may hold the prompt
        once, in any of these rows; its experts are copied to all of them.
    """
    first_column = rollout.tokens.shape[1] - max_new_tokens

    def compute(packing: Packing | None) -> Array:
        texts = texts_of(
            rollout.tokens, rollout.mask, first_column=first_column, packing=packing
        )
        return texts.hidden_and_routing(policy, model=model)[1].chosen

    experts = at_size(packing, compute)
    if group_size > 1:
        prompts = experts[:, :first_column]
        groups = prompts.reshape(-1, group_size, *prompts.shape[1:])
        # The first row of the group in which the prompt's experts are recorded.
        first = (groups != OWN).argmax(axis=1, keepdims=True)
        shared = jnp.take_along_axis(groups, first, axis=1)
        filled = jnp.where(groups == OWN, shared, groups).reshape(prompts.shape)
        experts = experts.at[:, :first_column].set(filled)
    return dataclasses.replace(rollout, experts=experts)


def recompute_logprobs(
    rollout: Rollout,
    policy: Params,
    *,
    model: ModelConfig,
    max_new_tokens: int,
    temperature: float,
    packing: SizedPacking | None = None,
) -> Rollout:
    """Recomputes `old_logprobs` by one forward pass of the trainer.

    In bfloat16 trainer and sampler differ by more than a clip range. The log-probs of
    the policy that drew the tokens move to `sampler_logprobs`.

    Args:
      policy: the trainer's parameters before the update; the sampler may be an older
        policy, or one in fewer bits.
    """
    old_logprobs = response_logprobs(
        policy,
        rollout=rollout,
        model=model,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        packing=packing,
    )
    return dataclasses.replace(
        rollout, old_logprobs=old_logprobs, sampler_logprobs=rollout.behaviour_logprobs
    )
