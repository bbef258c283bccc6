"""`data`: the prompts, and how a row becomes one."""

from __future__ import annotations

import dataclasses
from typing import Literal

from rlhf_jax.data.text.question import PLACE
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
