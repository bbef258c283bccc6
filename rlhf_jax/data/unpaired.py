"""Single responses with a label for KTO: rows, tokens and mismatched responses.

    {"prompt": ..., "completion": ..., "label": true}    or a pair, which counts as two

KTO compares a response with responses to *other* prompts (z0). Each text is encoded
with one of these, so that the loss of a packed row needs no other row:

    prompt, completion  |  the same prompt, a response to another prompt
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from rlhf_jax.data import encoding, files, json_lines, lengths, splits
from rlhf_jax.data.examples import Example, Labelled, Tokens
from rlhf_jax.data.files import Blank, Reading
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import TextContract, messages
from rlhf_jax.functional.errors import InputError, located

MISMATCHED = "the response to another prompt, beside a text, that is too long for it"


def read_labelled(
    source: str | Path, *, blank: Blank = "keep", receipt: Receipt | None = None
) -> list[Row]:
    """Reads rows with prompt, completion and label (true or false).

    A row of `files.read_preferences` becomes two: its chosen response is desirable, its
    rejected one is not.

    Args:
      blank: whether a row with a blank response is kept, left out or an error.
      receipt: records every row (a pair counts as two), the fields that are read, and
        rows left out.

    Raises:
      InputError: the file is empty or malformed, a text, a side of a pair or a label
        is missing, or all labels are the same.
    """

    def read(row: Row) -> Reading:
        if "completion" not in row and {"chosen", "rejected"} <= row.keys():
            pairs, reads, _ = files.preference(row, blank=blank)
            texts = [
                pair | {"completion": pair[side], "label": label}
                for pair in pairs
                for side, label in (("chosen", True), ("rejected", False))
            ]
            return Reading(texts, reads, num_texts=2)
        rows, reads, _ = files.response(row, field="completion", blank=blank)
        if rows and not isinstance(row.get("label"), bool):
            raise InputError(
                f"expected true or false in 'label', got"
                f" {row.get('label')!r:.40}; say whether the completion is desirable,"
                " or give pairs with 'chosen' and 'rejected'"
            )
        return Reading(rows, (*reads, "label"))

    rows = files.read_rows(source, read, receipt=receipt)
    labels = {row["label"] for row in rows}
    if len(labels) < 2:
        got = "none" if not rows else f"only {str(labels.pop()).lower()}"
        raise InputError(
            f"{source}: expected desirable and undesirable completions, got {got} as"
            " 'label'; KTO learns from both"
        )
    return rows


def encode_labelled(
    contract: TextContract, rows: Sequence[Row], *, limits: Limits, seed: int
) -> list[Labelled]:
    """Encodes texts, with responses to other prompts.

    Args:
      rows: from `read_labelled`.
      seed: of the cyclic order, in which a text gets the next response to another
        prompt.
      limits: `widest` is the width of a packed row, which holds the prompt twice.

    Other arguments are as in `encoding.encode_demonstrations`.

    Raises:
      InputError: a prompt or response is empty, a text is too long, all prompts are
        the same tokens, or a row of `widest` tokens does not hold a text with its
        prompt twice.
    """
    widest, of_one = limits.widest, dataclasses.replace(limits, widest=None)
    for index, row in enumerate(rows):
        if not isinstance(row["prompt"], str):
            turns = [*row["prompt"], *messages.as_turn(row["completion"])]
            with located(json_lines.place(row, index)):
                messages.check_unmarked(turns)
    texts = [
        (Example(example.prompt, example.response), label)
        for label in (True, False)
        for example in encoding.encode_demonstrations(
            contract,
            [row for row in rows if row["label"] is label],
            limits=of_one,
            response="completion",
        )
    ]
    prompts = splits.numbered(example.prompt for example, _ in texts)
    if max(prompts, default=0) == 0:
        raise InputError(
            "expected completions of at least 2 prompts, as KTO compares each with one"
            " that was given to another prompt, got 1; give more rows"
        )
    order = np.random.default_rng(seed).permutation(len(texts)).tolist()
    turns = _next_of_another([prompts[i] for i in order])
    others: dict[int, Tokens] = {
        place: texts[order[turn]][0].response
        for place, turn in zip(order, turns, strict=True)
    }
    labelled = []
    for place, ((prompt, completion), label) in enumerate(texts):
        room = limits.max_length - len(prompt)
        if widest is not None:
            size = 2 * len(prompt) + len(completion)
            room = min(room, widest - size)
            lengths.check(
                size + 1,
                widest,
                where=f"response {place} (from 0)",
                holds=", the width of a row, for it, its prompt twice and one token of"
                " another response",
                remedy="make rows wider, or remove such texts",
            )
        if contract.receipt is not None and room < len(others[place]):
            contract.receipt.cut(MISMATCHED)
        labelled.append(Labelled(prompt, completion, others[place][:room], label))
    return labelled


def _next_of_another(prompts: Sequence[int]) -> list[int]:
    """Finds for each place the next one, in cyclic order, with another prompt.

        prompts   7 7 4 7      places 0 1 2 3
        next      2 2 3 2

    Two passes from the end: neighbours with the same prompt have the same next place.
    """
    size = len(prompts)
    next_of_another = [0] * size
    following = 0
    for place in reversed([*range(size), *range(size)]):
        after = (place + 1) % size
        if prompts[after] != prompts[place]:
            following = after
        next_of_another[place] = following
    return next_of_another
