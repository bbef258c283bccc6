"""--packing: models read responses of uneven lengths packed, in every iteration.

    rollout ──lengths, order──> host ──Packer──> learn(..., packing=)

The host waits for two integers per response and the order of the minibatches, just
before it starts on the rewards.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax.sharding import Mesh

from rlhf_jax.algorithms.batch import Rollout, RolloutPacking
from rlhf_jax.algorithms.policy_gradient.algorithm import PolicyGradient
from rlhf_jax.algorithms.policy_gradient.update import minibatches, shuffle_key
from rlhf_jax.data import layouts
from rlhf_jax.data.layouts import Packer
from rlhf_jax.data.layouts.arrays import Form
from rlhf_jax.data.layouts.sizes import WIDTHS, best_form
from rlhf_jax.devices import processes, row_sharding, sharding
from rlhf_jax.models import layout
from rlhf_jax.models.packing import SizedPacking
from rlhf_jax.train.config.prompts import Auto

Array = jax.Array


class RolloutPacker:
    """Packs the rollouts of a run; the first one decides the sizes of packed rows."""

    def __init__(
        self,
        options: Auto,
        *,
        recipe: PolicyGradient,
        rows: int,
        mesh: Mesh,
        columns: int | None,
    ) -> None:
        """Compiles nothing yet.

        Args:
          columns: S of the widest rollout; None takes that of the first one.
        """
        self._options, self._recipe, self._rows = options, recipe, rows
        self._devices = row_sharding.row_share(mesh).count
        self._columns = columns
        self._packer: Packer | None = None
        self._of_ends: Packer | None = None
        self._spans = jax.jit(sharding.on(mesh, layouts.spans))
        order = functools.partial(minibatches, rows=rows, recipe=recipe)
        self._order = jax.jit(lambda key: order(shuffle_key(key)))

    def __call__(self, rollout: Rollout, *, key: Array) -> RolloutPacking | None:
        """Waits for a rollout and returns its packing; None keeps it padded."""
        lengths, order = processes.whole((self._spans(rollout), self._order(key)))
        columns = rollout.tokens.shape[1]
        if self._packer is None:
            self._packer = self._best(self._forms(columns), lengths)
            if processes.is_first():
                print(self._packer.describe())
        return self._packer(lengths, order, columns=columns)

    def ends(self, rollout: Rollout) -> SizedPacking | None:
        """As `__call__`, for a reward model: it reads the last token's state alone."""
        lengths = processes.whole(self._spans(rollout))
        columns = rollout.tokens.shape[1]
        if self._of_ends is None:
            self._of_ends = self._best(self._forms_of_ends(columns), lengths)
        return self._of_ends.whole(lengths, columns=columns + 1)

    def summary(self) -> dict[str, Any]:
        """Returns the sizes, and how often each was used, for summary.json."""
        if self._packer is None:
            return {}
        return {"packing": self._packer.summary()}

    def _best(self, forms: list[Form], lengths: Any) -> Packer:
        return Packer(best_form(forms, lengths), sample=lengths)

    def _forms(self, columns: int) -> list[Form]:
        """Returns one form per width, for a first rollout of `columns` columns."""
        recipe, options = self._recipe, self._options
        columns = columns if self._columns is None else self._columns
        max_tokens = options.max_tokens_per_device
        if max_tokens is None and recipe.micro_batch_size is not None:
            row = columns if options.width is None else options.width
            max_tokens = row * max(1, recipe.micro_batch_size // self._devices)
        return [
            Form(
                rows=self._rows,
                num_minibatches=recipe.num_minibatches,
                max_new_tokens=recipe.max_new_tokens,
                width=width,
                columns=columns,
                devices=self._devices,
                after_stop=recipe.critic is not None and recipe.critic.after_stop,
                max_tokens=max_tokens,
                may_pad=options.max_tokens_per_device is None,
                group_size=recipe.rows_per_prompt if self._shares(width) else 1,
            )
            for width in self._widths(columns, max_tokens=max_tokens)
        ]

    def _forms_of_ends(self, columns: int) -> list[Form]:
        columns = columns if self._columns is None else self._columns
        return [
            Form(
                rows=self._rows,
                num_minibatches=1,
                max_new_tokens=self._recipe.max_new_tokens + 1,
                width=width,
                columns=columns,
                devices=self._devices,
                ends=True,
            )
            for width in self._widths(columns)
        ]

    def _widths(self, columns: int, *, max_tokens: int | None = None) -> list[int]:
        """Returns the widths that a packed row may have, tokens, in increasing order.

        Args:
          max_tokens: limit for rows that are wider than padded ones; None has no limit.
        """
        if self._options.width is not None:
            return [self._options.width]
        widths = [int(share * columns) for share in WIDTHS]
        return widths[:1] + [
            width for width in widths[1:] if max_tokens is None or width <= max_tokens
        ]

    def _shares(self, width: int) -> bool:
        """Whether the attention engine lets responses of a group share their prompt."""
        model = self._recipe.model
        engine, _ = layout.choose(model, columns=width)
        whole = model.sliding_window is None and not model.recurrent_layers
        return engine in layout.PREFIXES and whole
