"""Reads weights in MXFP4 as bfloat16: numbers of 4 bits, 32 of which share a scale.

    W_blocks  u8[E, out, in / 32, 16]    two numbers per byte, the first in its low bits
    W_scales  u8[E, out, in / 32]        exponents of 2, plus 127

encode W bf16[E, in, out] = number · 2^(scale - 127), which bfloat16 holds exactly.

Source: OCP Microscaling Formats (MX) Specification 1.0, sections 5.2, 5.3.3 and 6.3.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from rlhf_jax.checkpoints import mapping, shards
from rlhf_jax.functional.checks import InputError

BLOCKS, SCALES = "_blocks", "_scales"
SIZE = 32  # numbers with one scale
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NUMBERS = np.array([*_POSITIVE, *(-number for number in _POSITIVE)], np.float32)


class Tensors(shards.Tensors):
    """The tensors of some shards, with packed ones under the name of the weight.

    Slices of packed tensors can be read, too; only the blocks that they need are read.
    """

    def __init__(
        self, folder: Path, *, named: Callable[[str], str | None] = str
    ) -> None:
        """Reads the headers only.

        Args:
          named: as in `shards.Tensors`.

        Raises:
          InputError: as `shards.Tensors`; or scales are missing, or a shape is wrong.
        """
        super().__init__(folder, named=named)
        self._packed = {
            name.removesuffix(BLOCKS)
            for name, header in self.headers.items()
            if name.endswith(BLOCKS) and header.dtype == "U8"
        }
        for name in self._packed:
            blocks = self.headers.pop(name + BLOCKS)
            scales = self.headers.pop(name + SCALES, None)
            shape = blocks.shape
            fits = len(shape) == 4 and shape[3] == SIZE // 2
            if not fits or scales != mapping.Header(shape[:3], "U8"):
                raise InputError(
                    f"expected {name}{BLOCKS} u8[experts, out, in / 32, 16] and "
                    f"{name}{SCALES} u8 of all but its last dimension, got "
                    f"{blocks.dtype}{list(shape)} and "
                    f"{'none' if scales is None else scales.dtype + str(scales.shape)}"
                    f"; fetch the checkpoint again"
                )
            experts, size_out, groups, _ = shape
            shape = (experts, groups * SIZE, size_out)
            self.headers[name] = mapping.Header(shape, "BF16")

    def read(self, name: str, window: Any) -> np.ndarray:
        """Reads a slice of a tensor; a packed one becomes bfloat16."""
        if name not in self._packed:
            return super().read(name, window)
        shape = self.headers[name].shape
        window = window if isinstance(window, tuple) else (window,)
        window = (*window, *(slice(None),) * (len(shape) - len(window)))
        experts, rows, columns = (
            slice(*part.indices(size)[:2])
            for part, size in zip(window, shape, strict=True)
        )
        if rows.start >= rows.stop:  # safetensors rejects an empty slice at the end
            sizes = (len(range(part.start, part.stop)) for part in (experts, columns))
            return np.zeros((next(sizes), 0, next(sizes)), ml_dtypes.bfloat16)
        groups = slice(rows.start // SIZE, -(-rows.stop // SIZE))
        packed = experts, columns, groups
        numbers = unpacked(
            super().read(name + BLOCKS, packed), super().read(name + SCALES, packed)
        )
        first = groups.start * SIZE
        return numbers[:, rows.start - first : rows.stop - first]


def unpacked(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Decodes u8[E, out, in / 32, 16] and u8[E, out, in / 32] to bf16[E, in, out]."""
    halves = np.stack([blocks & 15, blocks >> 4], axis=-1)
    numbers = NUMBERS[halves.reshape(*blocks.shape[:-1], SIZE)]
    exponents = scales.astype(np.int32) - 127
    numbers = np.ldexp(numbers, exponents[..., None])
    numbers = numbers.reshape(*blocks.shape[:2], -1).swapaxes(1, 2)
    return numbers.astype(ml_dtypes.bfloat16)
