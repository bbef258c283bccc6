"""Compares a server's log-probs with the trainer's, on fixed prompts.

The server responds to the prompts, and the trainer computes log-probs of the same
tokens. They differ if the server kept some old weights, or reports log-probs before
the temperature.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from rlhf_jax.algorithms import self_check
from rlhf_jax.algorithms.batch import Prompts
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.devices import row_sharding, sharding
from rlhf_jax.functional import unused_ids
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles.policy import logprobs
from rlhf_jax.samplers.protocol import Drawn, rollout_of

Params = Any
ROWS = 8
PROMPT_COLUMNS = 16
RESPONSE_COLUMNS = 16
ADVICE = (
    "The server does not sample with the weights that it was handed over. See that it "
    "serves this model in --dtype and reports processed log-probs (vLLM: "
    "--logprobs-mode processed_logprobs). Where the policy's output head is tied, "
    "serve a checkpoint of `python -m rlhf_jax.samplers.served MODEL FOLDER`, whose "
    "head is reloaded too. Or raise check_tolerance= of --sampler"
)


class Agreement:
    """The fixed prompts, and the trainer's program that checks the responses."""

    def __init__(self, recipe: PolicyGradient, *, tolerance: float, mesh: Mesh) -> None:
        """Makes the prompts; compiles nothing yet.

        Args:
          recipe: without adapters.
          tolerance: the largest mean distance of a response, nats per token.
          mesh: of the policy; its devices compute the trainer's log-probs.
        """
        model = recipe.model
        self.max_new_tokens = min(RESPONSE_COLUMNS, recipe.max_new_tokens)
        width = min(PROMPT_COLUMNS, model.max_positions - self.max_new_tokens)
        # The least multiple of the number of row shards that is at least ROWS.
        blocks = row_sharding.row_share(mesh).count
        self.prompts = _prompts(-(-ROWS // blocks) * blocks, width, model=model)
        self._tolerance, self._mesh = tolerance, mesh
        self._logprobs = jax.jit(
            functools.partial(
                sharding.on(mesh, logprobs),
                model=model,
                temperature=recipe.temperature,
                first_column=width,
            )
        )

    def require(self, params: Params, drawn: Drawn) -> float:
        """Returns the largest mean distance of a response, nats per token.

        Args:
          params: of the policy, on its mesh.
          drawn: the server's responses to `prompts`.

        Raises:
          SelfCheckError: the distance exceeds the tolerance.
        """
        rollout = rollout_of(self.prompts, drawn, version=None)
        rows = row_sharding.put_rows(
            (rollout.tokens, rollout.mask, rollout.experts), mesh=self._mesh
        )
        tokens, mask, experts = rows
        # With routing replay the trainer meets the server's experts, as in an update.
        trainers = self._logprobs(params, tokens=tokens, mask=mask, experts=experts)
        return self_check.compare(
            jax.device_get(trainers),
            rollout.old_logprobs,
            mask=rollout.response_mask,
            tolerance=self._tolerance,
            names=("the trainer's log-probs", "the server's after this hand-over"),
            advice=ADVICE,
        )


def _prompts(rows: int, width: int, *, model: ModelConfig) -> Prompts:
    """Draws Prompts[rows, width] of 1 to `width` random tokens."""
    # The same in every run, so that distances of all hand-overs are comparable.
    random = np.random.default_rng(0)
    lengths = np.linspace(1, width, rows).round().astype(np.int32)
    mask = np.arange(width) >= width - lengths[:, None]
    ids = np.delete(  # a server may refuse ids without a token
        np.arange(model.vocab_size, dtype=np.int32),
        unused_ids.listed(model.unused_ids),
    )
    tokens = ids[random.integers(len(ids), size=(rows, width), dtype=np.int32)]
    return Prompts(
        tokens=np.where(mask, tokens, 0),  # type: ignore[arg-type]
        mask=mask,  # type: ignore[arg-type]
        index=np.arange(rows, dtype=np.int32),  # type: ignore[arg-type]
        sample=np.zeros(rows, np.int32),  # type: ignore[arg-type]
    )
