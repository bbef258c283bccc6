"""Forced response lengths and packing for rlhf_jax in a workload with lengths."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import line_protocol
import numpy as np
from line_protocol import Workload

from rlhf_jax import ppo
from rlhf_jax.algorithms.batch import Rollout, RolloutPacking
from rlhf_jax.algorithms.policy_gradient.update import minibatches, shuffle_key
from rlhf_jax.data import layouts
from rlhf_jax.data.layouts.arrays import Form
from rlhf_jax.models.generation import decode
from rlhf_jax.models.generation.decode import Generated
from rlhf_jax.models.generation.sampling import Draw, Drawn

Array = jax.Array
Pack = Callable[..., RolloutPacking | None]  # (rollout, *, key)
NEVER = -1e9  # a logit


@contextlib.contextmanager
def forced(workload: Workload) -> Iterator[None]:
    """Programs traced inside stop responses at the lengths of the workload.

    The effect is that of a logits processor: only EOS can be drawn as the last token of
    a response, and EOS cannot be drawn earlier.
    """
    if not workload.lengths:
        yield
        return
    generate, pool = decode.generate, np.array(workload.lengths, np.int32)

    def stopping(params: Any, *, tokens: Array, mask: Array, **named: Any) -> Generated:
        sums = tokens.sum(axis=1, where=mask)
        stops = jnp.asarray(pool)[sums % len(pool)]

        class Stopping(Draw):
            def __call__(self, *logits: Array, number: Array, **named: Any) -> Drawn:
                last = (number + 1 == stops)[:, None]
                is_eos = jnp.arange(logits[0].shape[1])[None] == line_protocol.EOS
                forced = jnp.where(last == is_eos, logits[0], NEVER)
                return super().__call__(forced, number=number, **named)

        decode.Draw = Stopping
        return generate(params, tokens=tokens, mask=mask, **named)

    decode.generate = stopping
    try:
        yield
    finally:
        decode.generate, decode.Draw = generate, Draw


class Packer:
    """Packs as `--packing auto` does: the host reads lengths and order and packs.

    Packed rows are 1.5 times as long as padded ones (see `--packing`). If prompts
    fill half of a padded row, two texts do not fit into it.
    """

    def __init__(self, algorithm: ppo.PPO, *, workload: Workload) -> None:
        rows = workload.num_prompts
        prompts = [workload.prompt_length] * rows
        self._pack = layouts.Packer(
            Form(
                rows=rows,
                num_minibatches=workload.num_minibatches,
                max_new_tokens=workload.response_length,
                width=3 * (workload.prompt_length + workload.response_length) // 2,
            ),
            # The lengths of the first rollout, as in a run.
            sample=np.stack([prompts, workload.stops(0)], axis=1),
        )
        order = functools.partial(minibatches, rows=rows, recipe=algorithm)
        self._order = jax.jit(lambda key: order(shuffle_key(key)))
        self._spans = jax.jit(layouts.spans)

    def __call__(self, rollout: Rollout, *, key: Array) -> RolloutPacking | None:
        """Waits for a rollout and returns its packing."""
        lengths, order = jax.device_get((self._spans(rollout), self._order(key)))
        return self._pack(lengths, order, columns=rollout.tokens.shape[1])

    def describe(self) -> dict[str, Any]:
        """The sizes, and the number of uses of each."""
        return self._pack.summary()
