"""The rows of a run as an environment begins them, once, when the data is loaded."""

from __future__ import annotations

from typing import NamedTuple

from rlhf_jax.data import json_lines, lengths
from rlhf_jax.data.examples import Tokens
from rlhf_jax.data.json_lines import Row
from rlhf_jax.data.lengths import Overlong
from rlhf_jax.data.receipts import Receipt
from rlhf_jax.data.text import Written
from rlhf_jax.data.turns import TurnEncoder
from rlhf_jax.environments.pool import EnvironmentPool


class BegunRows(NamedTuple):
    """What episodes begin with; entry n of each list is of row n."""

    rows: list[Row]
    prompts: list[Tokens]
    states: list[bytes]  # of the environment, pickled
    numbers: list[int]  # of the rows in their file, from 0
    written_prompts: list[Written]  # as the environment wrote them
    in_file: int  # rows, with those that are left out

    def first(self, count: int) -> BegunRows:
        """The first rows of these."""
        return self._replace(
            rows=self.rows[:count],
            prompts=self.prompts[:count],
            states=self.states[:count],
            numbers=self.numbers[:count],
            written_prompts=self.written_prompts[:count],
        )


def read_begun(
    source: str,
    *,
    pool: EnvironmentPool,
    encoder: TurnEncoder,
    room: int,
    more: str,
    overlong: Overlong,
    receipt: Receipt | None = None,
) -> BegunRows:
    """The rows whose prompts leave room for an episode.

    Args:
      source: JSONL, or hf:NAME:SPLIT; the environment reads the fields that it needs.
      room: tokens that a prompt may have.
      more: how a prompt may be longer, for the errors.
      overlong: what becomes of longer ones: an error, or left out.
      receipt: is told of every row, and of those that are left out.

    Raises:
      InputError: the file is empty or malformed, the environment cannot begin with a
        row, or no prompt fits; names file and line.
    """
    rows = [row for _, row in json_lines.read_located(source, receipt=receipt)]
    places = [json_lines.place(row, number) for number, row in enumerate(rows)]
    if receipt is not None:
        for where, row in zip(places, rows, strict=True):
            receipt.row(where, row)
    begun = pool.reset(rows)
    prompts = [
        encoder.prompt(started.prompt, where=where)
        for started, where in zip(begun, places, strict=True)
    ]
    fitting = lengths.fits(
        [len(tokens) for tokens in prompts],
        texts=[started.prompt for started in begun],
        places=places,
        max_length=room,
        overlong=overlong,
        widest=None,
        more=more,
        receipt=receipt,
    )
    return BegunRows(
        [rows[n] for n in fitting],
        [prompts[n] for n in fitting],
        [begun[n].state for n in fitting],
        list(fitting),
        [begun[n].prompt for n in fitting],
        len(rows),
    )
