"""`data` and `batch`: the prompts, how a row becomes one, and batches of responses.

`Batch` says how many responses there are, how long, and how models read them.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlhf_jax.data.text.messages import PLACE
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedPrompts:
    """Which prompts a model is asked, and how."""

    prompts: str
    """Prompts: JSONL, .txt, or hf:NAME:SPLIT."""
    prompt_field: str = "prompt"
    """Field of the rows with the prompts."""
    template: str = PLACE
    """What the model is asked; {prompt} stands for the row's prompt."""
    chat: bool = False
    """Whether a prompt that is a text is put as a message of the user, by the
    tokenizer's chat template."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of prompts that leave no room for a response: an error, or drop
    them."""

    def __post_init__(self) -> None:
        if PLACE not in self.template:
            raise InputError(
                f"--template: expected {PLACE} where the prompt is to stand, got "
                f"{self.template!r}; put it in"
            )

    @property
    def writing_option(self) -> str | None:
        """The option that says how a row becomes a prompt; None by default."""
        if self.template != PLACE:
            return "--template"
        return None if self.prompt_field == "prompt" else "--prompt-field"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts(AskedPrompts):
    """Which prompts the policy responds to, and which texts are mixed in."""

    buckets: tuple[int, ...] | None = None
    """Widths to which a batch of prompts may be padded, tokens; None is the longest
    prompt."""
    ptx: str | None = None
    """Text or demonstrations whose loss is mixed in, weighted by --ptx-coef."""
    ptx_batch_size: int = 16
    """Rows of --ptx per iteration."""
    ptx_max_length: int | None = None
    """Longest row of --ptx, tokens; None is the model's context."""


@dataclasses.dataclass(frozen=True)
class Auto:
    """Packs each batch whose lengths make that less work."""

    width: int | None = None
    max_tokens_per_device: int | None = None


Packing = Auto | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch of an iteration."""

    batch_size: int = 64
    """Responses per iteration."""
    max_new_tokens: int = 128
    """Longest response, tokens. Of an episode it counts all turns, with what is
    observed between them."""
    packing: Packing = None
    """Whether models read several responses in one row: auto packs a batch where its
    lengths make that less work. width= is the tokens of a row (else 1 to 2 padded rows,
    whichever packs the first responses into fewest tokens); max_tokens_per_device= is
    the tokens of one forward and backward pass on a device (else --micro-batch-size
    rows)."""

    def __post_init__(self) -> None:
        checks.rows(batch_size=self.batch_size)
        checks.positive(max_new_tokens=self.max_new_tokens)
        if self.packing is None:
            return
        width, most = self.packing.width, self.packing.max_tokens_per_device
        least = self.max_new_tokens + 1
        for name, tokens, at_least in (
            ("width", width, least),
            ("max_tokens_per_device", most, max(least, width or 0)),
        ):
            checks.within(
                least=at_least,
                advice=f"the longest packed row has as many tokens; raise it, or lower "
                f"--max-new-tokens ({self.max_new_tokens})",
                **{f"{name} of --packing": tokens},
            )

    def room(self, room: int) -> tuple[int, str]:
        """Tokens that a prompt may have, and for errors how it may have more."""
        width = None if self.packing is None else self.packing.width
        if width is None or width - self.max_new_tokens >= room:
            return room, "lower --max-new-tokens"
        more = "raise the width of --packing or lower --max-new-tokens"
        return width - self.max_new_tokens, more
