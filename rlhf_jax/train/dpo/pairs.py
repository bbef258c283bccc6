"""The data of `rlhf-jax dpo`: pairs, or for KTO single responses with a label."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import encoding, files, packing, splits, unpaired
from rlhf_jax.data.examples import Labelled, Pair
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.packing import PackedRow
from rlhf_jax.data.receipts import Receipt, items
from rlhf_jax.train.dpo.options import Config


class Packed(NamedTuple):
    """One side of the data, trained on or held out."""

    rows: list[PackedRow]
    digested: Sequence[Pair | Labelled]  # what a resumed run must find again
    labels: list[bool] | None  # of KTO's texts

    @property
    def called(self) -> str:
        """What the data is made of, for a person."""
        return "pairs" if self.labels is None else "texts"


def read(options: Config, *, receipt: Receipt | None = None) -> list[Row]:
    """The rows of --data, before a model is loaded.

    Args:
      receipt: is told of every row, and of those that are left out.

    Raises:
      InputError: the file is empty or malformed, or for KTO all labels are the same.
    """
    if options.dpo.kind == "kto":
        return unpaired.read_labelled(
            options.data, blank=options.blank, receipt=receipt
        )
    return files.read_preferences(options.data, blank=options.blank, receipt=receipt)


def encode(
    rows: list[Row],
    *,
    options: Config,
    start: Pretrained,
    receipt: Receipt | None = None,
) -> tuple[Packed, Packed]:
    """(what is trained on, what is held out), packed into rows.

    Args:
      receipt: of these rows; it is told of those that are left out, and of both uses.

    Raises:
      InputError: a text is too long or has no room in a row, or nothing is left to
        train on or to hold out.
    """
    max_length = start.limit(options.max_length)
    hold_out: Any = {
        "share": options.held_out,
        "seed": options.seed,
        "receipt": receipt,
    }
    if options.dpo.kind == "kto":
        texts = unpaired.encode_labelled(
            start.tokenizer,
            rows,
            max_length=max_length,
            seed=options.seed,
            stop_ids=start.stop_ids,
            overlong=options.overlong,
            widest=options.row_width,
            receipt=receipt,
        )
        together = itertools.chain.from_iterable(splits.by_prompt(texts))
        kept, held = splits.hold_out([*together], **hold_out)
        if receipt is not None:
            receipt.use("training", items.of_labelled(kept))
            receipt.use("held out", items.of_labelled(held))
        return _pack_labelled(kept, options), _pack_labelled(held, options)
    pairs = encoding.encode_preferences(
        start.tokenizer,
        rows,
        max_length=max_length,
        stop_ids=start.stop_ids,
        overlong=options.overlong,
        widest=options.row_width,
        packed=True,
        receipt=receipt,
    )
    kept, held = splits.hold_out(pairs, **hold_out)
    if receipt is not None:
        receipt.use("training", items.of_pairs(kept))
        receipt.use("held out", items.of_pairs(held))
    return (
        Packed(_pack(kept, options), kept, None),
        Packed(_pack(held, options), held, None),
    )


def _pack(pairs: Sequence[Pair], options: Config) -> list[PackedRow]:
    return packing.pack(pairs, width=options.row_width) if pairs else []


def _pack_labelled(texts: Sequence[Labelled], options: Config) -> Packed:
    rows = _pack([text.pair for text in texts], options)
    return Packed(rows, texts, [text.desirable for text in texts])
