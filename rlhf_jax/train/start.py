"""The checkpoint that a command starts from, and the receipt of what it reads."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from jax.sharding import Mesh

from rlhf_jax.checkpoints import hf, pretrained
from rlhf_jax.checkpoints.hf import SaveDtype
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import tokenization
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.data.text import Question
from rlhf_jax.data.text.question import Written
from rlhf_jax.devices import sharding
from rlhf_jax.models import axes, layout
from rlhf_jax.train.config.start import Compute


def receipt_of(receipts: Receipts, *, start: Pretrained) -> dict[str, Any]:
    """What a run prints of its data and keeps as data.json.

    Args:
      start: whose tokenizer shows an example, its special tokens among them.
    """
    decode = functools.partial(tokenization.decode, start.tokenizer)
    (unprompted,) = start.contract.prompts([Question("")])
    return receipts.to_json(decode=decode, unprompted=unprompted)


def prompts_given(written_prompts: Iterable[Written]) -> dict[str, str]:
    """What snapshots say of prompts that a user's function scores, if of messages."""
    of_texts = all(isinstance(prompt, str) for prompt in written_prompts)
    return {} if of_texts else {"prompts_given": "messages"}


def load_start(
    path_or_repo_id: str,
    *,
    options: Compute,
    mesh: Mesh,
    save_dtype: SaveDtype | None = None,
) -> Pretrained:
    """The checkpoint with its tokenizer, sharded over `mesh`.

    Args:
      save_dtype: Of what is written; None is that of most weights.

    Raises:
      InputError: As `pretrained.load`, the mesh shares columns, which the attention
        that is asked for cannot, or --save-dtype does not hold the parameters.
    """
    if mesh.shape.get(axes.CONTEXT_AXIS, 1) > 1:
        layout.refuse_context(options.attention)
    start = pretrained.load(
        path_or_repo_id,
        tokenizer=options.tokenizer,
        dtype=options.dtype,
        remat=options.remat,
        attention=options.attention,
        sharding=functools.partial(sharding.shardings, mesh=mesh),
    )
    return saved(start, save_dtype)


def saved(start: Pretrained, save_dtype: SaveDtype | None) -> Pretrained:
    """`start`, whose folders are written in a dtype; None changes nothing.

    Raises:
      InputError: its parameters do not fit the dtype already.
    """
    if save_dtype is None:
        return start
    hf.check_dtype(start.params, dtype=save_dtype)
    return start._replace(save_dtype=save_dtype)
