"""A checkpoint together with its tokenizer, as experiments load it.

start = pretrained.load("gpt2")
...
pretrained.save(out, params, start=start, base=None, lora=None, name="gpt2")
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.checkpoints import hf
from rlhf_jax.checkpoints.hf import SaveDtype
from rlhf_jax.data import (
    batches,
    encoding,
    files,
    formats,
    hub,
    json_lines,
    tokenization,
)
from rlhf_jax.data.examples import Text
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.receipts import Receipt, items
from rlhf_jax.data.text import TextContract
from rlhf_jax.devices import processes
from rlhf_jax.functional import checks
from rlhf_jax.functional.errors import located
from rlhf_jax.models import layout
from rlhf_jax.models.config import Attention, ModelConfig, Remat
from rlhf_jax.models.lora import LoRA, merge
from rlhf_jax.roles.reference import frozen
from rlhf_jax.roles.reference.frozen import Frozen
from rlhf_jax.runs.proof import exported

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Params = Any


class Pretrained(NamedTuple):
    """A causal language model with its tokenizer."""

    model: ModelConfig
    params: Params  # f32, trainable
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]  # tokens that end a response
    save_dtype: SaveDtype = "float32"  # of saved checkpoints; that of the one read
    backend: str | None = None  # of the plan; None is the backend of this process

    @property
    def pad_id(self) -> int:
        """The id that pads rows."""
        return tokenization.pad_token_id(self.tokenizer)

    def contract(self, receipt: Receipt | None = None) -> TextContract:
        """Returns the text contract of this tokenizer and model."""
        return TextContract(self.tokenizer, stop_ids=self.stop_ids, receipt=receipt)

    @property
    def meta(self) -> dict[str, list[list[int]]]:
        """What snapshots record about the vocabulary: ids without a token, if any."""
        unused = [list(edges) for edges in self.model.unused_ids]
        return {"unused_ids": unused} if unused else {}

    def limit(self, max_length: int | None) -> int:
        """Returns the most tokens of a row: `max_length`, or the context if None.

        Raises:
          InputError: max_length is below 1 or exceeds the context.
        """
        context = self.model.max_positions
        if max_length is None:
            return context
        checks.at_least_one(max_length=max_length)
        checks.within(
            most=context,
            advice=f"the model's context has no more tokens; lower it, or leave it out"
            f"{self._longer}",
            max_length=max_length,
        )
        return max_length

    def room(self, *, max_new_tokens: int, context: int | None = None) -> int:
        """Returns the most tokens of a prompt before a response of `max_new_tokens`.

        Args:
          context: context of another model that reads both, tokens; None is this
            model's.

        Raises:
          InputError: a prompt of one token does not fit.
        """
        context = self.model.max_positions if context is None else context
        checks.within(
            below=context,
            advice=f"the context of the model has to hold a prompt too; lower it"
            f"{self._longer}",
            **{"--max-new-tokens": max_new_tokens},
        )
        return context - max_new_tokens

    @property
    def _longer(self) -> str:
        """Advice on a longer context, for errors; "" for learned positions."""
        if self.model.positions == "learned":
            return ""
        return (
            "; a model that reads more says so in its config.json, by "
            "max_position_embeddings or a rope_scaling of type yarn"
        )

    def decode(self, tokens: list[int]) -> str:
        """Decodes token ids, without padding, BOS and stop tokens.

        Every other special token is kept, such as <think>.
        """
        return tokenization.spoken(self.tokenizer, tokens, stop_ids=self.stop_ids)


def described(
    path_or_repo_id: str, *, tokenizer: str | None = None, option: str = "--model"
) -> Pretrained:
    """Reads the small files of a checkpoint: everything but the parameters, None here.

    The model will not predict ids without a token. If there is a chat template, the
    process that renders it starts in the background. `option` names the checkpoint in
    errors.

    Raises:
      InputError: the checkpoint or the tokenizer is missing or unreadable, or the
        tokenizer has ids that the model lacks.
    """
    with located(option, hub.NoCheckpoint):
        # First, so that a missing checkpoint is not reported as a missing tokenizer.
        model = hf.model_config(path_or_repo_id)
    with located(option if tokenizer is None else "--tokenizer", hub.NoCheckpoint):
        reader = tokenization.load_tokenizer(
            path_or_repo_id if tokenizer is None else tokenizer
        )
    if reader.chat_template is not None:
        from rlhf_jax.data.text import templates  # only needed with a template

        templates.begin()
    tokenization.check_vocabulary(reader, vocab_size=model.vocab_size)
    unused = tokenization.ids_without_token(reader, vocab_size=model.vocab_size)
    # A chat model may have further stop ids than the tokenizer's EOS, or no EOS.
    stop_ids = [reader.eos_token_id, *hf.stop_ids(path_or_repo_id)]
    never = sorted(
        {i for i in stop_ids if i is not None and any(a <= i < b for a, b in unused)}
    )
    if never:
        print(
            f"note: {path_or_repo_id}: no response will end with the stop ids "
            f"{', '.join(map(str, never))}, for which its tokenizer has no token",
            file=sys.stderr,
        )
    return Pretrained(
        model=dataclasses.replace(model, unused_ids=unused),
        params=None,
        tokenizer=reader,
        stop_ids=tuple(dict.fromkeys(i for i in stop_ids if i is not None)),
        save_dtype=hf.stored_dtype(path_or_repo_id),
    )


def load(
    path_or_repo_id: str,
    *,
    tokenizer: str | None = None,
    dtype: str = "float32",
    remat: Remat = "none",
    attention: Attention = "xla",
    sharding: Any = None,
    start: Pretrained | None = None,
) -> Pretrained:
    """Reads a checkpoint to train, and checks that its tokenizer fits it.

    Args:
      tokenizer: folder or hub id of the tokenizer; None is the checkpoint's own.
      dtype: of activations; the parameters are float32.
      sharding: of the parameters, as for `hf.load`.
      start: the result of `described`, if it was called before; None calls it.

    Raises:
      InputError: the checkpoint or tokenizer is missing or unreadable (`hf.load`), the
        tokenizer has ids that the model lacks, or this backend lacks the attention.
    """
    if start is None:
        start = described(path_or_repo_id, tokenizer=tokenizer)
    model, params = hf.load(path_or_repo_id, dtype="float32", sharding=sharding)
    return start._replace(
        model=layout.fastest(
            dataclasses.replace(
                model,
                unused_ids=start.model.unused_ids,
                dtype=dtype,
                remat=remat,
                attention=attention,
            )
        ),
        params=params,
    )


def save(
    folder: Path,
    trained: Params,
    *,
    start: Pretrained,
    base: Frozen | None,
    lora: LoRA | None,
    name: str,
) -> None:
    """Writes FOLDER/model for `transformers`, and FOLDER/adapter for PEFT.

    Both are in `start.save_dtype`, each with a manifest. Existing ones are complete,
    left by a finished run that is resumed, and stay.

    Args:
      trained: parameters, or adapters if there is a base.
      start: the checkpoint that was trained; its params are not read.
      base, lora: the base and settings of adapters, which are merged into FOLDER/model;
        None without adapters.
      name: folder or hub id of the base, for PEFT.

    Raises:
      InputError: start.save_dtype cannot hold a weight.
    """
    if base is not None and lora is not None:
        save_adapter(folder, trained, start=start, base=base, lora=lora, name=name)
        trained = merge(
            frozen.read(base), trained, lora=lora, rounded_to=start.save_dtype
        )
    new = is_new(folder / "model", start=start)
    if new:
        hf.save(
            folder / "model",
            start.model,
            trained,
            tokenizer=start.tokenizer,
            stop_ids=start.stop_ids,
            dtype=start.save_dtype,
        )
    exported.write(folder / "model", anew=new)


def save_adapter(
    folder: Path,
    adapters: Params,
    *,
    start: Pretrained,
    base: Frozen,
    lora: LoRA,
    name: str,
) -> None:
    """Writes FOLDER/adapter, unless it is there; arguments as for `save`."""
    adapter = folder / "adapter"
    new = not adapter.exists()
    if new:
        from rlhf_jax.checkpoints import peft

        fingerprint = frozen.source_fingerprint_of(base, fetch=processes.whole)
        peft.save(
            adapter,
            model=start.model,
            adapters=adapters,
            lora=lora,
            base_fingerprint=fingerprint.root,
            base_name=name,
            dtype=start.save_dtype,
        )
    exported.write(adapter, anew=new)


def is_new(folder: Path, *, start: Pretrained) -> bool:
    """Whether a model must be written; an existing one is complete and stays.

    Prints a line if the existing one is not in `start.save_dtype`.
    """
    if not folder.exists():
        return True
    stored = hf.stored_dtype(folder)
    if stored != start.save_dtype and processes.is_first():
        print(
            f"{folder} stays as it is, in {stored}; to write it in {start.save_dtype}, "
            f"move it away and give --resume again"
        )
    return False


def read_examples(
    start: Pretrained,
    source: str,
    *,
    max_length: int | None = None,
    receipt: Receipt | None = None,
) -> list[Text]:
    """Reads plain text (.txt), cut into blocks, or demonstrations (JSONL).

    Args:
      source: a file; demonstrations longer than `max_length` are left out.
      max_length: the most tokens of a row; None is the context.
      receipt: records every row, and those that are left out.

    Raises:
      InputError: the file is unreadable or empty, or no row is short enough.
    """
    longest, contract = start.limit(max_length), start.contract(receipt)
    if formats.is_text(source):
        text = json_lines.read_text(source, receipt=receipt)
        return [*encoding.encode_text(contract, text, block_size=longest)]
    return encoding.encode_demonstrations(
        contract,
        files.read_demonstrations(source, receipt=receipt),
        limits=Limits(longest, overlong="drop"),
    )


def read_texts(
    start: Pretrained,
    source: str,
    *,
    batch_size: int,
    max_rows: int,
    max_length: int | None = None,
    receipt: Receipt | None = None,
) -> Sequences:
    """Reads texts on which to watch the policy's perplexity (`evaluation.text_stats`).

    Args:
      source, max_length, receipt: as in `read_examples`.
      max_rows: rows after these are left out.

    Returns:
      Sequences[M, batch_size, S] of NumPy arrays.

    Raises:
      InputError: as `read_examples`.
    """
    examples = read_examples(start, source, max_length=max_length, receipt=receipt)
    examples = examples[:max_rows]
    if receipt is not None:
        receipt.keep(max_rows, reason=f"after the first {max_rows} asked for")
        receipt.use("watched", items.of_texts(examples))
    rows = batches.sequences_in_order(
        examples, batch_size=batch_size, pad_id=start.pad_id
    )
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
