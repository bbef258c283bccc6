"""Digests of data, by which a resumed run checks that its data is unchanged."""

from __future__ import annotations

import hashlib
import json
import pickle
from collections.abc import Sequence
from typing import Any


def of_tokens(rows: Sequence[Sequence[object]]) -> str:
    """SHA-256 of token lists, or of records of them such as `examples.Example`."""
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()


def of_values(values: Any) -> str:
    """SHA-256 of a JSON value, such as all fields of rows, which a reward may read.

    Values that JSON lacks, such as a date of a Parquet file or an image of a Hugging
    Face data set, are digested by their pickle.
    """

    def pickled(value: Any) -> str:
        return hashlib.sha256(pickle.dumps(value, protocol=4)).hexdigest()

    text = json.dumps(values, sort_keys=True, default=pickled)
    return hashlib.sha256(text.encode()).hexdigest()


def of_prompt(row: Any) -> bytes | None:
    """A 16-byte digest of a row's prompt; None if the prompt is missing or empty."""
    prompt: Any = row.get("prompt") if isinstance(row, dict) else row
    prompt = getattr(prompt, "prompt", prompt)
    if not hasattr(prompt, "__len__") or len(prompt) == 0:
        return None
    written = json.dumps(prompt, sort_keys=True, default=lambda array: array.tolist())
    return hashlib.blake2b(written.encode(), digest_size=16).digest()
