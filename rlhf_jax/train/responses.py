"""What the policy responds to, and who draws: prompts of a file, or episodes.

rows of a file ──read──> rows, tokens ──batches──> draw ──> rollout, early scores
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from rlhf_jax.algorithms.batch import Rollout
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import json_lines
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.functional import checks
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.train.build import Meshes
from rlhf_jax.train.config.config import PolicyGradientConfig
from rlhf_jax.train.rewards import Early, RewardPools
from rlhf_jax.train.rows import ReadRows, read_prompts

if TYPE_CHECKING:
    from rlhf_jax.train.environment.sampler import EpisodeSampler

# A rollout, and what processes or an environment computed of its scores, or will.
Drawn = tuple[Rollout, Early | Callable[[], Early]]


class Responder:
    """Reads rows as the model is asked them, in an environment or alone."""

    def __init__(
        self,
        config: PolicyGradientConfig,
        *,
        start: Pretrained,
        meshes: Meshes,
        context: int,
        stack: contextlib.ExitStack,
    ) -> None:
        """Processes of an environment start with the first row, and end with `stack`.

        Args:
          context: tokens that every model reads at once.
        """
        self._config, self._start = config, start._replace(params=None)
        self._mesh = meshes.policy
        self._opened = None
        if config.sampler.environment is not None:
            # Here, as environments are modules that no other run needs.
            from rlhf_jax.train.environment.sampler import OpenedEnvironment

            self._opened = OpenedEnvironment(
                config.sampler.environment,
                pool=config.rewards,
                chat=config.data.chat,
                max_new_tokens=config.batch.max_new_tokens,
                start=start,
                mesh=config.placement.sampler.mesh_beside(meshes.policy),
                stack=stack,
            )
        self.room, self._more = config.batch.room(
            start.room(max_new_tokens=config.batch.max_new_tokens, context=context)
        )
        checks.within(
            most=self.room,
            advice=f"the context of {context} has to hold --max-new-tokens too; lower "
            f"either",
            **{"--buckets": max(config.data.buckets or (0,))},
        )

    def read(self, source: str, *, pools: RewardPools, receipt: Receipt) -> ReadRows:
        """The rows of a file that leave room for a response.

        Args:
          receipt: is told of every row, of the fields that are read, and of rows that
            are left out.
        """
        config, options = self._config, self._config.data
        pools.check_answers(lambda: json_lines.read_located(source))
        if self._opened is not None:
            read = self._opened.read(
                source,
                room=self.room,
                more=self._more,
                overlong=options.overlong,
                receipt=receipt,
            )
            pools.tell(receipt)
            return read.fitting()
        read = read_prompts(
            source,
            options=options,
            start=self._start,
            room=self.room,
            more=self._more,
            widest=None if options.buckets is None else max(options.buckets, default=0),
            receipt=receipt,
        )
        pools.tell(receipt)
        if config.watch.judge is not None:
            receipt.gives(f"--judge {config.watch.judge}")
        return read.fitting()

    def episodes(
        self,
        data: ReadRows,
        recipe: PolicyGradient,
        *,
        rows: int,
        base: Frozen | None,
        greedy: bool | None = None,
    ) -> EpisodeSampler | None:
        """`OpenedEnvironment.sampler` of a run's rows; None draws responses."""
        if self._opened is None:
            return None
        return self._opened.sampler(
            recipe, begun=data, rows=rows, home=self._mesh, base=base, greedy=greedy
        )
