"""The responses on which a reward model's scores are normalised."""

from __future__ import annotations

import dataclasses

from rlhf_jax.algorithms.batch import Sequences
from rlhf_jax.checkpoints.pretrained import Pretrained
from rlhf_jax.data import batches, encoding, files
from rlhf_jax.data.examples import Pair, Tokens
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.receipts import Receipt, items
from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError


@dataclasses.dataclass(frozen=True)
class Samples:
    """Mean 0 and standard deviation 1 on samples of --model, before and after."""

    num_samples: int = 256
    max_new_tokens: int = 48
    temperature: float = 0.7

    def __post_init__(self) -> None:
        checks.positive(**vars(self))


@dataclasses.dataclass(frozen=True)
class Demonstrations:
    """Mean 0 on demonstrations, by setting the bias after training."""

    source: str


def prompts_to_answer(
    pairs: list[Pair], *, max_new_tokens: int, start: Pretrained, receipt: Receipt
) -> list[Tokens]:
    """Returns the prompts of pairs that leave room for a response."""
    room = start.room(max_new_tokens=max_new_tokens)
    short = [pair.prompt for pair in pairs if len(pair.prompt) <= room]
    if not short:
        raise InputError(
            f"expected a prompt of at most {room} tokens to sample a response to (the "
            f"context of {start.model.max_positions} less max_new_tokens of "
            f"--normalise samples), got none; ask for fewer new tokens"
        )
    for where, pair in zip(receipt.places, pairs, strict=True):
        if len(pair.prompt) > room:
            reason = f"no room for a response of {max_new_tokens} tokens"
            receipt.drop(reason, where=where)
    receipt.use("normalised on", items.of_prompts(short))
    return short


def demonstrations_to_score(
    source: str,
    *,
    start: Pretrained,
    limits: Limits,
    batch_size: int,
    receipt: Receipt,
) -> tuple[list[Sequences], int]:
    """Reads demonstrations; returns batches, and the number of rows without filling."""
    examples = encoding.encode_demonstrations(
        start.contract(receipt),
        files.read_demonstrations(source, receipt=receipt),
        limits=limits,
    )
    receipt.use("normalised on", items.of_texts(examples))
    texts = batches.sequences_in_order(
        examples, batch_size=batch_size, pad_id=start.pad_id
    )
    return texts, len(examples)
