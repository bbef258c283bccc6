"""Trains a reward model on labelled pairs and measures it on held-out pairs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from pipeline.optimizers import adamw
from pipeline.options import PROMPT_COLUMNS, RESPONSE_COLUMNS, Config
from worlds import reviews

from rlhf_jax import rewards, state
from rlhf_jax.algorithms import reward_model
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Pair
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.runs import run

Params = Any


def train_reward_model(
    params: Params,
    pairs: list[Pair],
    *,
    job: run.Run,
    model: ModelConfig,
    options: Config,
    member: int = 0,
) -> Params:
    """Stage 2: a reward model learns from the labels alone.

    Args:
      member: number of the model in an ensemble; each has its own stage and its own
        order of the pairs.
    """
    preferences = batches.preference_batches(
        pairs,
        batch_size=options.sft_batch_size,
        seed=options.seed + 1000 * member,
        pad_id=reviews.PAD_ID,
        buckets=(PROMPT_COLUMNS + RESPONSE_COLUMNS,),
    )
    optimizer = adamw(
        optax.linear_schedule(options.reward_learning_rate, 0.0, options.reward_steps)
    )
    update = jax.jit(
        functools.partial(reward_model.update, model=model, optimizer=optimizer),
        donate_argnames=("state",),
    )
    initial = state.supervised_state(params, optimizer=optimizer)
    with job.stage(stage_of(member), initial, meta={}) as stage:
        for step in stage.steps():
            stage.state, stats = update(stage.state, batch=preferences[step])
            stage.end_step(step, stats)
    return stage.state.params


def stage_of(member: int) -> str:
    """The name of the stage that trains a member of an ensemble."""
    return f"reward_model_{member}" if member else "reward_model"


def measure_reward_model(
    params: Params, held_out: list[Pair], *, model: ModelConfig
) -> tuple[Params, float]:
    """Normalises the reward model and measures it on held-out pairs.

    Returns:
      The parameters, normalised to scores of mean 0 and standard deviation 1 on these
      samples of the reference, and the share of pairs that the model orders as the
      noise-free gold score does.
    """
    pairs = batches.preference_batches(
        held_out, batch_size=len(held_out), seed=0, pad_id=reviews.PAD_ID
    )[0]
    score = jax.jit(functools.partial(rewards.sequence_scores, model=model))
    chosen, rejected = (
        score(params, tokens=side.tokens, mask=side.mask)
        for side in (pairs.chosen, pairs.rejected)
    )
    lead = np.asarray(pairs.margin)
    agrees = (np.asarray(chosen - rejected) > 0) == (lead > 0)
    everything = jnp.concatenate([chosen, rejected])
    accuracy = float(agrees[lead != 0].mean())
    return rewards.normalise(params, scores=everything), accuracy
