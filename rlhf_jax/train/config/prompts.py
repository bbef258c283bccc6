"""`data` and `batch`: the prompts, and the batch of responses of an iteration."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlhf_jax.data.text.messages import PLACE
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AskedPrompts:
    """Where prompts come from, and how a row becomes a prompt."""

    prompts: str
    """Prompts: JSONL, .txt, or hf:NAME:SPLIT."""
    prompt_field: str = "prompt"
    """Field of a row that holds its prompt."""
    template: str = PLACE
    """Text of the prompt, in which {prompt} stands for the row's field."""
    chat: bool = False
    """Whether a prompt that is plain text becomes a user message of the tokenizer's
    chat template."""
    overlong: Literal["error", "drop"] = "error"
    """Treatment of prompts that leave no room for a response: error stops, drop leaves
    them out."""

    def __post_init__(self) -> None:
        if PLACE not in self.template:
            raise InputError(
                f"--template: expected {PLACE} where the prompt is to stand, got "
                f"{self.template!r}; put it in"
            )

    @property
    def writing_option(self) -> str | None:
        """The option, other than --chat, that changes the prompts; None if unset."""
        if self.template != PLACE:
            return "--template"
        return None if self.prompt_field == "prompt" else "--prompt-field"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts(AskedPrompts):
    """The prompts of a policy gradient, and texts that are mixed in."""

    buckets: tuple[int, ...] | None = None
    """Widths to which batches of prompts are padded, tokens; None pads all to the
    longest prompt."""
    ptx: str | None = None
    """Texts or demonstrations whose loss is added, weighted by --ptx-coef; None adds
    none."""
    ptx_batch_size: int = 16
    """Rows of --ptx per iteration."""
    ptx_max_length: int | None = None
    """Longest row of --ptx, tokens; None is the model's context."""

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.rows(ptx_batch_size=self.ptx_batch_size)
        checks.positive(ptx_max_length=self.ptx_max_length)


@dataclasses.dataclass(frozen=True)
class Auto:
    """Packs a batch if the lengths of its responses make that less work."""

    width: int | None = None
    max_tokens_per_device: int | None = None


Packing = Auto | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batch:
    """The batch of an iteration."""

    batch_size: int = 64
    """Responses per iteration."""
    max_new_tokens: int = 128
    """Longest response, tokens. For an episode it counts all turns and the observations
    between them."""
    packing: Packing = None
    """Whether models read several responses in one row: auto packs a batch if its
    lengths make that less work; None pads. width= is the tokens of a packed row; by
    default 1 to 2 padded rows, whichever packs the first responses into the fewest
    tokens. max_tokens_per_device= is the tokens of one forward and backward pass on a
    device; by default those of --micro-batch-size rows."""

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
        """Returns the tokens that a prompt may have, and advice on longer prompts."""
        width = None if self.packing is None else self.packing.width
        if width is None or width - self.max_new_tokens >= room:
            return room, "lower --max-new-tokens"
        more = "raise the width of --packing or lower --max-new-tokens"
        return width - self.max_new_tokens, more
