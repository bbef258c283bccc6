"""The data of `rlhf-jax dpo`: pairs, or single responses with a label (KTO)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import encoding, files, packing, splits, unpaired
from rlhf_jax.data.examples import Labelled, Pair
from rlhf_jax.data.files import Blank
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.packing import PackedRow
from rlhf_jax.data.receipts import Receipt, items
from rlhf_jax.functional import checks

if TYPE_CHECKING:
    from rlhf_jax.train.supervised.dpo import Config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Preferences:
    """The preference pairs or labelled responses of DPO."""

    data: str
    """Preference pairs: JSONL, or hf:NAME:SPLIT. With --kind kto rows may also be
    responses with a label."""
    max_length: int | None = None
    """Longest prompt with its response, tokens; None is the model's context."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of longer pairs: error stops, drop leaves them out."""
    blank: Blank = "error"
    """Treatment of pairs with a response of white space only: error stops, drop leaves
    them out."""
    row_width: int | None = None
    """Width of rows into which pairs are packed, tokens; None is one row per pair."""

    def __post_init__(self) -> None:
        checks.positive(row_width=self.row_width)


class Packed(NamedTuple):
    """The training data or the held-out data, packed."""

    rows: list[PackedRow]
    digested: Sequence[Pair | Labelled]  # a resumed run must read the same
    labels: list[bool] | None  # one per text of KTO


def read(
    options: Preferences, *, labelled: bool, receipt: Receipt | None = None
) -> list[Row]:
    """Reads the rows of --data, before a model is loaded.

    Args:
      labelled: whether rows are responses with a label, for KTO.
    """
    read_file = unpaired.read_labelled if labelled else files.read_preferences
    return read_file(options.data, blank=options.blank, receipt=receipt)


def encode(
    rows: list[Row],
    *,
    config: Config,
    start: Pretrained,
    receipt: Receipt | None = None,
) -> tuple[Packed, Packed]:
    """Returns the training data and the held-out data, packed into rows."""
    options, contract = config.data, start.contract(receipt)
    longest = start.limit(options.max_length)
    limits = Limits(longest, options.overlong, options.row_width)
    texts: Sequence[Any]
    used: Callable[..., Any]
    labelled = config.method.kind == "kto"
    if labelled:
        texts = unpaired.encode_labelled(
            contract, rows, limits=limits, seed=config.seed
        )
        texts = [*itertools.chain.from_iterable(splits.by_prompt(texts))]
        used = items.of_labelled
    else:
        texts = encoding.encode_preferences(contract, rows, limits=limits, packed=True)
        used = items.of_pairs
    training, others = splits.hold_out(
        texts, share=config.watch.held_out, seed=config.seed, receipt=receipt
    )
    if receipt is not None:
        receipt.use("training", used(training))
        receipt.use("held out", used(others))

    def packed(side: Sequence[Any]) -> Packed:
        pairs = [text.pair for text in side] if labelled else side
        return Packed(
            packing.pack(pairs, width=options.row_width) if pairs else [],
            side,
            [text.desirable for text in side] if labelled else None,
        )

    return packed(training), packed(others)
