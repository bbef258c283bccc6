"""What a supervised run watches, step by step: texts, what is held out, the drift."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax

from rlhf_jax.algorithms import evaluation
from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.devices import sharding
from rlhf_jax.functional.masked import Stats
from rlhf_jax.models.lora import merge
from rlhf_jax.roles import adapted
from rlhf_jax.roles.reference import drift, frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.train.config.watch import WatchTexts

if TYPE_CHECKING:
    from rlhf_jax.train.supervised.task import Models, Session, Task

Params = Any


class Watcher:
    """What a run looks at and does not train on."""

    def __init__(
        self, task: Task[Any], session: Session, *, texts: Mapping[str, Sequences]
    ) -> None:
        """Measures nothing yet.

        Args:
          texts: {name: Sequences[M, b, S]} of --texts.
        """
        self._task, self._texts = task, texts
        lora, model = task.config.start.lora, session.start.model
        watch = task.config.watch
        self._policy = watch if isinstance(watch, WatchTexts) else None
        self._base: Frozen | None = None
        self._anchor: Frozen | None = None

        def text_stats(
            policy: Params, texts: Mapping[str, Sequences], base: Frozen | None
        ) -> Stats:
            params = adapted.params(policy, base=base, lora=lora)
            return evaluation.text_stats(params, texts, model=model)

        def moved(
            policy: Params, anchor: Frozen, base: Frozen | None
        ) -> dict[str, Any]:
            if base is not None and lora is not None:
                policy = merge(frozen.read(base), policy, lora=lora)
            return drift.weight_drift(policy, anchor.stored)

        self._text_stats = jax.jit(sharding.on(session.mesh, text_stats))
        self._moved = jax.jit(moved)

    def anchored(self, models: Models) -> None:
        """Measures the drift from the reference, or from the base under adapters."""
        self._base, anchor = models.base, models.reference or models.base
        if anchor is not None and anchor.model is None:  # of the policy's shape
            self._anchor = anchor

    def before(self, params: Params, *, step: int) -> Stats:
        """Statistics of what is trained, before it learns."""
        stats: Stats = {}
        watch, every = self._policy, self._task.config.watch.held_out_every
        if watch is not None and self._texts and step % watch.eval_every == 0:
            stats |= self._text_stats(params, self._texts, self._base)
        if every is not None and step % every == 0:
            held_out = self._task.evaluate(params, self._base)
            stats |= {
                f"held_out/{name.replace('/', '_')}": value
                for name, value in held_out.items()
            }
        return stats

    def after(self, params: Params, *, step: int) -> Stats:
        """`drift/...` of what has learned."""
        watch, anchor = self._policy, self._anchor
        if watch is None or anchor is None or step % watch.drift_every:
            return {}
        params = frozen.beside(anchor, params)
        return drift.stats(self._moved(params, anchor, self._base))
