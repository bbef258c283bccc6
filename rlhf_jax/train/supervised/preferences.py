"""The data of `rlhf-jax dpo`: pairs, or for KTO single responses with a label."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import encoding, files, packing, splits, unpaired
from rlhf_jax.data.examples import Labelled, Pair
from rlhf_jax.data.files import Blank
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.packing import PackedRow
from rlhf_jax.data.receipts import Receipt, items
from rlhf_jax.functional import checks


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences:
    """What is learned."""

    data: str
    """Preference pairs, or with --kind kto responses with a label: JSONL, or
    hf:NAME:SPLIT."""
    max_length: int | None = None
    """Longest prompt with its response, tokens; None is the model's context."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of longer pairs: an error, or drop them."""
    blank: Blank = "error"
    """Treatment of pairs in which a response is nothing but white space: an error, or
    drop them."""
    row_width: int | None = None
    """Width of a row that packs pairs, tokens; None is one row per pair."""

    def __post_init__(self) -> None:
        if self.row_width is not None:
            checks.positive(row_width=self.row_width)


class Packed(NamedTuple):
    """One side of the data, trained on or held out."""

    rows: list[PackedRow]
    digested: Sequence[Pair | Labelled]  # what a resumed run must find again
    labels: list[bool] | None  # of KTO's texts

    @property
    def called(self) -> str:
        """What the data is made of, for a person."""
        return "pairs" if self.labels is None else "texts"


def read(
    options: Preferences, *, labelled: bool, receipt: Receipt | None = None
) -> list[Row]:
    """The rows of --data, before a model is loaded.

    Args:
      labelled: whether they are responses with a label, as KTO reads them.

    Raises:
      InputError: the file is empty or malformed, or for KTO all labels are the same.
    """
    read_file = unpaired.read_labelled if labelled else files.read_preferences
    return read_file(options.data, blank=options.blank, receipt=receipt)


def encode(
    rows: list[Row],
    *,
    options: Preferences,
    labelled: bool,
    held_out: float,
    seed: int,
    start: Pretrained,
    receipt: Receipt | None = None,
) -> tuple[Packed, Packed]:
    """(what is trained on, what is held out), packed into rows.

    Args:
      held_out: share that is held out, by prompt.

    Raises:
      InputError: a text is too long or has no room in a row, or nothing is left to
        train on or to hold out.
    """
    hold_out: Any = {"share": held_out, "seed": seed, "receipt": receipt}
    limits: Any = {
        "max_length": start.limit(options.max_length),
        "stop_ids": start.stop_ids,
        "overlong": options.overlong,
        "widest": options.row_width,
        "receipt": receipt,
    }
    width = options.row_width
    if labelled:
        texts = unpaired.encode_labelled(start.tokenizer, rows, seed=seed, **limits)
        together = itertools.chain.from_iterable(splits.by_prompt(texts))
        training, others = splits.hold_out([*together], **hold_out)
        if receipt is not None:
            receipt.use("training", items.of_labelled(training))
            receipt.use("held out", items.of_labelled(others))
        return _pack_labelled(training, width), _pack_labelled(others, width)
    pairs = encoding.encode_preferences(start.tokenizer, rows, packed=True, **limits)
    training, others = splits.hold_out(pairs, **hold_out)
    if receipt is not None:
        receipt.use("training", items.of_pairs(training))
        receipt.use("held out", items.of_pairs(others))
    return (
        Packed(_pack(training, width), training, None),
        Packed(_pack(others, width), others, None),
    )


def _pack(pairs: Sequence[Pair], width: int | None) -> list[PackedRow]:
    return packing.pack(pairs, width=width) if pairs else []


def _pack_labelled(texts: Sequence[Labelled], width: int | None) -> Packed:
    rows = _pack([text.pair for text in texts], width)
    return Packed(rows, texts, [text.desirable for text in texts])
