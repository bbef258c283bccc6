"""The experts that a server's routers chose, as it returns them with a response.

vLLM (0.22 or newer, with --enable-return-routed-experts) adds to a choice

    "routed_experts"    base64 of a .npy file, uint8, uint16 or int32 [P + R - 1, L, k]

for the P tokens of the prompt and the R of the response. Its last token is drawn, but
not run. An expert's id is its row of the checkpoint's router, as here.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlhf_jax.models.config import ModelConfig

NAME = "routed_experts"
FLAG = "--enable-return-routed-experts"


def read(choice: dict[str, Any]) -> Any:
    """The record of a choice, an array of any shape and dtype; None without one."""
    try:
        file = io.BytesIO(base64.b64decode(choice[NAME], validate=True))
        return np.lib.format.read_array(file, allow_pickle=False)
    except Exception:  # NumPy raises many kinds for bytes that are no array
        return None


def required(
    choice: dict[str, Any], *, model: ModelConfig, tokens: int
) -> Iterator[tuple[bool, str, str]]:
    """Yields (condition, what is expected, remedy); later ones need earlier ones.

    Args:
      model: a mixture, the policy.
      tokens: P + R - 1.
    """
    record, experts = read(choice), model.experts
    assert experts is not None
    yield (
        isinstance(record, np.ndarray),
        f"{NAME} in a choice, the base64 of a NumPy array",
        f"serve with {FLAG} (vLLM 0.22 or newer, and its model runner V2), or choose "
        f"--routing-replay old",
    )
    shape = tokens, model.num_layers, experts.per_token
    yield (
        record.shape == shape and record.dtype.kind in "iu",
        f"{NAME} of integers {list(shape)}, [tokens but the last, layers, experts per "
        f"token], not {record.dtype}{list(record.shape)}",
        "serve the model that is trained",
    )
    yield (
        bool((record >= 0).all() and (record < experts.count).all()),
        f"{NAME} from 0 to {experts.count - 1}, not {record.min()} to {record.max()}",
        "serve the model that is trained",
    )
    yield (
        bool((np.diff(np.sort(record, axis=-1).astype(int), axis=-1) > 0).all()),
        f"{experts.per_token} different {NAME} of each token in each layer",
        "serve with a version that records all layers",
    )
