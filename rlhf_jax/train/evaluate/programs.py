"""The compiled programs of an evaluation: `jax.jit` is applied here."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms import evaluation
from rlhf_jax.algorithms.batch import Prompts, Rollout, Sequences
from rlhf_jax.algorithms.evaluation import ResponseKL
from rlhf_jax.algorithms.flow.rollout import rollout
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Tokens
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.models.generation.sampling import Shaping
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.train.evaluate.options import Config

Array = jax.Array


def prompts_of(
    tokens: dict[int, Tokens],
    *,
    rows: list[int],
    count: int,
    num_samples: int,
    pad_id: int,
) -> Prompts:
    """Returns some prompts, each `num_samples` times, as wide as the longest of all.

    Args:
      count: the other rows fill up the batch; their sample numbers are below 0, so that
        no reward on the host is asked about them.
      num_samples: number of neighbouring rows with the same prompt.
      pad_id: token on the left of shorter prompts.
    """
    # The record names jax.Array; these are the NumPy arrays that become one.
    index: Any = np.repeat(np.asarray(rows, np.int32), num_samples)
    padded, mask = batches.pad(
        [tokens[row] for row in index],
        width=max(map(len, tokens.values())),
        pad_id=pad_id,
        left=True,
    )
    sample: Any = np.tile(np.arange(num_samples, dtype=np.int32), len(rows))
    sample[count * num_samples :] = ~sample[count * num_samples :]
    return Prompts(tokens=padded, mask=mask, index=index, sample=sample)


class Programs:
    """The programs, compiled once per shape; frozen models are arguments."""

    def __init__(self, options: Config, *, start: Pretrained, mesh: Mesh) -> None:
        self._mesh, on = mesh, functools.partial(sharding.on, mesh)
        shape = functools.partial(frozen.shape_of, policy=start.model)
        sampled = {
            "max_new_tokens": options.max_new_tokens,
            "temperature": options.temperature,
        }

        def respond(model: Frozen, prompts: Prompts, key: Array, greedy: bool) -> Any:
            return rollout(
                frozen.read(model),
                model=shape(model),
                prompts=prompts,
                key=key,
                stop_ids=start.stop_ids,
                shaping=Shaping(greedy=True) if greedy else None,
                group_size=1 if greedy else options.num_samples,
                **sampled,
            )

        def response_kl(
            policy: Frozen, reference: Frozen, responses: Rollout
        ) -> ResponseKL:
            return evaluation.response_kl(
                frozen.read(policy),
                frozen.read(reference),
                rollout=responses,
                model=start.model,
                ref_model=shape(reference),
                **sampled,
            )

        def text_stats(model: Frozen, texts: Sequences) -> Any:
            return evaluation.text_stats(
                frozen.read(model), {"texts": texts}, model=shape(model)
            )

        self._respond = jax.jit(on(respond), static_argnames="greedy")
        self.response_kl = jax.jit(on(response_kl))
        self._text_stats = jax.jit(on(text_stats))

    def respond(
        self, model: Frozen, prompts: Prompts, *, key: Array, greedy: bool
    ) -> Rollout:
        """Draws responses of a frozen model.

        Args:
          prompts: NumPy arrays from `prompts_of`; one row per prompt if `greedy`.
          key: key of the model; rows fold in their prompt's and sample's numbers.
        """
        mine = row_sharding.own_rows(prompts, mesh=self._mesh)
        prompts = row_sharding.put_rows(mine, mesh=self._mesh)
        return self._respond(model, prompts, key, greedy=greedy)

    def text_loss(self, model: Frozen, texts: Sequences) -> float:
        """Returns -(1/N) Σ log π(token) of texts at temperature 1, nats per token."""
        ((total, weight),) = self._text_stats(model, texts).values()
        return float(total) / float(weight)
