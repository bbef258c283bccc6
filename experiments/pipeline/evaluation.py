"""Measures a policy's responses to held-out prompts."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from pipeline.options import HELD_OUT_PROMPTS, PROMPT_COLUMNS, RESPONSE_COLUMNS, Config
from pipeline.preferences import answers_in
from worlds import reviews

from rlhf_jax import rewards
from rlhf_jax.algorithms.flow import score
from rlhf_jax.data import batches
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.reference.frozen import Frozen

Array = jax.Array
Params = Any


def evaluate(
    params: Params,
    *,
    generate: Any,
    reference: Frozen,
    scorer: Frozen,
    key: Array,
    model: ModelConfig,
    options: Config,
) -> tuple[dict[str, float], list[tuple[str, str]]]:
    """Samples responses to held-out prompts and measures them.

    Returns:
      {key of MEASURED: mean over the responses}, by the gold judge, the grammar, the
      reward model and the reference, and the (prompt, response) pairs.
    """
    prompts = batches.prompt_batches(
        HELD_OUT_PROMPTS,
        batch_size=options.num_evaluated,
        seed=options.seed,
        pad_id=reviews.PAD_ID,
        buckets=(PROMPT_COLUMNS,),
    )[0]
    answered = generate(params, prompts=prompts, key=key)
    scored = jax.jit(
        functools.partial(
            score.score,
            model=model,
            max_new_tokens=RESPONSE_COLUMNS,
            temperature=options.temperature,
        )
    )(
        answered,
        scores=rewards.from_model(scorer, model=model)(answered),
        reference=reference,
    )
    answers = answers_in(answered)
    gold = np.array([reviews.gold(response.split()) for _, response in answers])
    lengths = [len(response.split()) for _, response in answers]
    fluent = [
        reviews.parses(prompt.split(), response.split()) for prompt, response in answers
    ]
    return {
        "gold": float(gold.mean()),
        "gold_std": float(gold.std()),
        "score": float(scored.scores.mean()),
        "kl": float(jnp.sum(scored.kl, where=answered.response_mask) / len(answers)),
        "fluency": float(np.mean(fluent)),
        "distinct": len({response for _, response in answers}) / len(answers),
        "length": float(np.mean(lengths)),
    }, answers


MEASURED = {
    "gold": "gold score",
    "gold_std": "gold score, std",
    "score": "reward-model score",
    "kl": "KL to the reference [nats]",
    "fluency": "fluency (share that parses)",
    "distinct": "distinct (share of responses)",
    "length": "length [tokens]",
}
