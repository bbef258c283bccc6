"""Memory before anything is allocated: from shapes, and from the compiler."""

from __future__ import annotations

from typing import Any

WAYS: dict[str, dict[str, Any]] = {
    "copy": {},
    "bfloat16": {"dtype": "bfloat16"},
    "float16": {"dtype": "float16"},
    "int8": {"dtype": "int8"},
    "int8-bfloat16": {"dtype": "int8", "embeddings": "bfloat16"},
    "host": {"memory": "pinned_host"},
    "host-int8": {"dtype": "int8", "memory": "pinned_host"},
}
"""Storages by the name a command line has for them, as options of `frozen.freeze`."""
