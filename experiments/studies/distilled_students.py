"""Measures a student: its responses, and exact KLs to and from its teacher."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pipeline import preferences
from pipeline.options import (
    HELD_OUT_PROMPTS,
    PROMPT_COLUMNS,
    RESPONSE_COLUMNS,
    STOP_IDS,
)
from worlds import reviews

from rlhf_jax import frozen, policy
from rlhf_jax.algorithms import distill
from rlhf_jax.algorithms.batch import Prompts, Rollout
from rlhf_jax.algorithms.flow import rollout
from rlhf_jax.data import batches
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.packing import texts_of
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any
Row = dict[str, Any]


def prompts_of(rows: Sequence[list[int]], *, count: int, seed: int) -> Any:
    """Batches of prompts, all as wide as the longest prompt."""
    return batches.prompt_batches(
        rows,
        batch_size=count,
        seed=seed,
        pad_id=reviews.PAD_ID,
        buckets=(PROMPT_COLUMNS,),
    )


def respond(params: Params, *, model: ModelConfig, prompts: Prompts, key: Array):
    """Samples responses at temperature 1."""
    return rollout.rollout(
        params,
        model=model,
        prompts=prompts,
        key=key,
        max_new_tokens=RESPONSE_COLUMNS,
        stop_ids=STOP_IDS,
        temperature=1.0,
    )


@functools.partial(jax.jit, static_argnames=("model", "writer"))
def kl_of_responses(
    student: Params, teacher: Frozen, prompts: Prompts, key: Array, *, model, writer
) -> tuple[Rollout, Array]:
    """Responses of `writer`, and the KL from it to the other, nats per response."""
    teacher_model = frozen.shape_of(teacher, policy=model)
    params, its_model = student, model
    if writer == "teacher":
        params, its_model = frozen.read(teacher), teacher_model
    responses = respond(params, model=its_model, prompts=prompts, key=key)
    states = distill.teacher_states(
        teacher,
        rollout=responses,
        model=model,
        max_new_tokens=RESPONSE_COLUMNS,
        temperature=1.0,
    )
    texts = texts_of(responses.tokens, responses.mask, first_column=PROMPT_COLUMNS)
    hidden = texts.hidden_states(student, model=model)
    assert states.hidden is not None  # because the teacher has a head
    kl = policy.exact_kl(
        student,
        hidden,
        frozen.read(teacher),
        states.hidden,
        texts=texts,
        model=model,
        ref_model=teacher_model,
        direction="forward" if writer == "teacher" else "reverse",
    )
    return responses, jnp.where(responses.response_mask, kl, 0.0).sum(axis=1).mean()


def look(
    student: Params, teacher: Frozen, *, seed: int, model: ModelConfig, num_answers: int
) -> Row:
    """Measures a student on held-out prompts and returns the row."""
    prompts = prompts_of(HELD_OUT_PROMPTS, count=num_answers, seed=seed)[0]
    key = jax.random.fold_in(jax.random.key(seed), 1_000_000)
    measure = functools.partial(kl_of_responses, student, teacher, prompts, key)
    responses, reverse = measure(model=model, writer="student")
    _, forward = measure(model=model, writer="teacher")
    parsed = [
        reviews.parses(prompt.split(), response.split())
        for prompt, response in preferences.answers_in(responses)
    ]
    return {
        "kl_to_teacher": float(reverse),
        "kl_from_teacher": float(forward),
        "fluency": float(np.mean(parsed)),
    }
