"""`batch`: how many responses, how long, and how models read them."""

from __future__ import annotations

import dataclasses

from rlhf_jax.functional import checks


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
