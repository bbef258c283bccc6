"""The data of `rlhf-jax sft`: demonstrations, episodes of several turns, or text."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import encoding, files, formats, json_lines
from rlhf_jax.data.examples import Text
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text.messages import AssistantTurns
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.train.config import capabilities


@dataclasses.dataclass(frozen=True, kw_only=True)
class Demonstrations:
    """The demonstrations or text of SFT."""

    data: str
    """Demonstrations or text: JSONL, .txt, or hf:NAME:SPLIT."""
    prompt_field: str = "prompt"
    """Field of a row with its prompt."""
    response_field: str = "response"
    """Field of a row with its response."""
    assistant_turns: AssistantTurns = "last"
    """Turns of the assistant that are learned in a conversation: the last, all, or the
    marked ones. A message's own mark (weight, train or loss_mask, 0 or 1) takes
    precedence."""
    max_length: int | None = None
    """Longest example, or block of text, tokens; None is the model's context."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of longer examples: error stops, drop leaves them out."""
    buckets: tuple[int, ...] | None = None
    """Widths to which batches are padded, tokens; None pads all to the longest
    example."""
    row_width: int | None = None
    """Width of rows into which examples are packed, tokens; None is one row per
    example."""

    def __post_init__(self) -> None:
        checks.positive(row_width=self.row_width)
        capabilities.exclude(
            {"--row-width": self.row_width is not None},
            {"--buckets": self.buckets is not None},
            reason="all packed rows have one width",
        )

    @property
    def widest(self) -> int | None:
        """Most tokens of a row of a batch; None if they are not limited."""
        if self.buckets is not None:
            return max(self.buckets, default=0)
        return self.row_width


def read(options: Demonstrations, *, receipt: Receipt | None = None) -> Any:
    """Reads a .txt file as text, and other files as rows with responses or turns."""
    if formats.is_text(options.data):
        return json_lines.read_text(options.data, receipt=receipt)
    return files.read_demonstrations(
        options.data,
        prompt=options.prompt_field,
        response=options.response_field,
        turns=True,
        receipt=receipt,
    )


def encode(
    rows: Any,
    *,
    options: Demonstrations,
    start: Pretrained,
    receipt: Receipt | None = None,
) -> Sequence[Text]:
    """Encodes responses to prompts, episodes of turns, or blocks of plain text."""
    contract, longest = start.contract(receipt), start.limit(options.max_length)
    if isinstance(rows, str):
        return encoding.encode_text(contract, rows, block_size=longest)
    limits = Limits(longest, options.overlong, options.widest)
    prompt = options.prompt_field
    of_turns = [row for row in rows if row.get(options.response_field) is None]
    if of_turns and len(of_turns) < len(rows):
        raise InputError(
            f"{options.data}: expected {options.response_field!r} in every row, or "
            f"'turns' in every row, got {len(of_turns)} of {len(rows)} rows with "
            f"turns; write a response as a list of one turn"
        )
    if of_turns:
        return encoding.encode_episodes(contract, rows, limits=limits, prompt=prompt)
    return encoding.encode_demonstrations(
        contract,
        rows,
        limits=limits,
        prompt=prompt,
        response=options.response_field,
        assistant_turns=options.assistant_turns,
    )
