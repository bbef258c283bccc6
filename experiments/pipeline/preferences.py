"""Pairs of samples, labelled by a judge who stands in for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from pipeline.options import PROMPT_COLUMNS, TRAIN_PROMPTS, Config
from worlds import reviews

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Pair
from rlhf_jax.functional import checks
from rlhf_jax.roles.rewards import transcripts

Array = jax.Array
Params = Any


def label_pairs(
    params: Params,
    generate: Any,
    *,
    judge: Callable[[Sequence[str], Sequence[str]], float],
    key: Array,
    options: Config,
) -> tuple[list[Pair], list[Pair]]:
    """Samples two responses per prompt and labels each pair with a noisy judge.

    Returns:
      Training pairs and held-out pairs. The margin of a held-out pair is the noise-free
      gold score of its chosen response minus that of the rejected one; it is negative
      where the noise decided.

    Raises:
      InputError: the judge scores both responses of every held-out pair alike.
    """
    prompts = batches.prompt_batches(
        TRAIN_PROMPTS,
        batch_size=options.num_evaluated,
        samples_per_prompt=2,
        seed=options.seed,
        pad_id=reviews.PAD_ID,
        buckets=(PROMPT_COLUMNS,),
    )
    sampled: list[tuple[str, str]] = []
    while len(sampled) < 2 * options.num_pairs:
        batch = prompts[len(sampled) // options.num_evaluated]
        sampled += answers_in(generate(params, prompts=batch, key=key))
    gold = np.array(
        [judge(prompt.split(), response.split()) for prompt, response in sampled]
    )
    labels = reviews.noisy_preferences(
        np.random.default_rng(options.seed), gold[::2], gold[1::2], options.label_noise
    )
    pairs = []
    for number, first_is_chosen in enumerate(labels[: options.num_pairs]):
        chosen = 2 * number + (not first_is_chosen)
        rejected = 2 * number + first_is_chosen
        (prompt, better), (_, worse) = sampled[chosen], sampled[rejected]
        if better != worse:
            texts = map(ids_of, (prompt, better, worse))
            pairs.append(Pair(*texts, margin=float(gold[chosen] - gold[rejected])))
    held_out = pairs[: len(pairs) // 8]
    if not any(pair.margin for pair in held_out):
        raise checks.InputError(
            f"expected pairs of responses that the judge tells apart, got "
            f"{len(held_out)} of equal gold, as where nothing parses; give more "
            f"--sft-steps or --num-pairs"
        )
    return [pair._replace(margin=None) for pair in pairs[len(held_out) :]], held_out


def answers_in(answered: Rollout) -> list[tuple[str, str]]:
    """Returns (prompt, response) of every row as text."""
    return transcripts.texts(answered, decode=text_of)


def text_of(ids: list[int]) -> str:
    """Decodes ids to words separated by blanks."""
    return " ".join(reviews.decode(ids))


def ids_of(text: str) -> list[int]:
    return reviews.encode(text.split())
