"""The checkpoint that a trainer starts from: the options of its model, and loading."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any, Literal

from jax.sharding import Mesh

from rlhf_jax.checkpoints import hf, pretrained
from rlhf_jax.checkpoints.hf import SaveDtype
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import tokenization
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.data.text import Asked
from rlhf_jax.data.text.asked import Written
from rlhf_jax.devices import sharding
from rlhf_jax.models import axes, engine_choice
from rlhf_jax.models.config import Attention, Remat
from rlhf_jax.runs import run_config


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartConfig(run_config.RunConfig):
    """What every command with a model asks for; each adds its own fields."""

    tokenizer: str | None = None
    """Tokenizer, a folder or hub id; None takes the one in --model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of activations; trained parameters stay float32."""
    remat: Remat = "none"
    """What of a layer the backward pass rematerialises, to save memory."""
    attention: Attention = "auto"
    """What computes attention over whole sequences; auto takes the flash attention of
    the backend for long rows, and says so at the start."""

    def changed(self, *names: str) -> dict[str, Any]:
        """{"--name": value} of the options that were set to something else.

        Args:
          names: of fields with a default.
        """
        defaults = {each.name: each.default for each in dataclasses.fields(self)}
        return {
            f"--{name.replace('_', '-')}": value
            for name in names
            if (value := vars(self)[name]) != defaults[name]
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainerConfig(StartConfig):
    """What every trainer asks for beside: how OUT/model and OUT/adapter are written."""

    save_dtype: SaveDtype | None = None
    """Dtype of OUT/model and OUT/adapter; None is that of most weights of --model, and
    float32 for a fresh model. Weights are trained in float32: 16 bits lose what is
    smaller than a 256th (bfloat16) or a 2048th (float16) of a weight."""

    def saved(self, start: Pretrained) -> Pretrained:
        """`start`, whose folders are written as asked for.

        Raises:
          InputError: its parameters do not fit the dtype already.
        """
        if self.save_dtype is None:
            return start
        hf.check_dtype(start.params, dtype=self.save_dtype)
        return start._replace(save_dtype=self.save_dtype)


def receipt_of(receipts: Receipts, *, start: Pretrained) -> dict[str, Any]:
    """What a run prints of its data and keeps as data.json.

    Args:
      receipts: of all that was read.
      start: whose tokenizer shows an example, its special tokens among them.
    """
    decode = functools.partial(tokenization.decode, start.tokenizer)
    (unprompted,) = start.contract.prompts([Asked("")])
    return receipts.to_json(decode=decode, unprompted=unprompted)


def prompts_given(asked: Iterable[Written]) -> dict[str, str]:
    """What snapshots say of the prompts that a user's function scores, if of messages.

    Args:
      asked: a text or messages of each row.
    """
    of_texts = all(isinstance(each, str) for each in asked)
    return {} if of_texts else {"prompts_given": "messages"}


def load_start(path_or_repo_id: str, *, options: StartConfig, mesh: Mesh) -> Pretrained:
    """The checkpoint with its tokenizer, sharded over `mesh`.

    Args:
      path_or_repo_id: The checkpoint, usually --model.
      options: Tokenizer, dtype, rematerialisation and attention; a trainer's dtype of
        what it saves.
      mesh: The devices of the policy.

    Raises:
      InputError: As `pretrained.load`, the mesh shares columns, which the attention
        that is asked for cannot, or --save-dtype does not hold the parameters.
    """
    if mesh.shape.get(axes.CONTEXT_AXIS, 1) > 1:
        engine_choice.refuse_context(options.attention)
    start = pretrained.load(
        path_or_repo_id,
        tokenizer=options.tokenizer,
        dtype=options.dtype,
        remat=options.remat,
        attention=options.attention,
        sharding=functools.partial(sharding.shardings, mesh=mesh),
    )
    return options.saved(start) if isinstance(options, TrainerConfig) else start
