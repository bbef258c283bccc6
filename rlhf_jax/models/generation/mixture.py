"""Sampling from the geometric mixture of two decoders, one token at a time.

    π^mix(token | before) ∝ π(token | before)^(1 - m) · μ(token | before)^m

Both run in one loop, each with its own cache. The mixture is of the distributions of
single tokens; that of whole responses does not factorise over tokens.
"""

from __future__ import annotations

import jax

from rlhf_jax.functional import checks
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.generation import decode
from rlhf_jax.models.generation.decode import Generated
from rlhf_jax.models.generation.sampling import Decoder, Draw

Array = jax.Array


def generate(
    policy: Decoder,
    other: Decoder,
    *,
    share: float,
    tokens: Array,
    mask: Array,
    keys: Array,
    max_new_tokens: int,
    stop_ids: tuple[int, ...],
    temperature: float = 1.0,
) -> Generated:
    """Samples a response to every prompt from the mixture.

    Args:
      policy: π, parameters and shape.
      other: μ, with the same vocabulary; width and depth may differ.
      share: m, the weight of μ's log-probs, between 0 and 1.
      tokens, mask: i32[B, P] and bool[B, P], left-padded prompts of at least one token.
      keys: key[B], from `decode.row_keys`.
      temperature: > 0, divides the logits of both.

    Returns:
      Generated; `logprobs` and `entropy` are those of the mixture, 0 outside the
      response.

    Raises:
      InputError: share is not between 0 and 1, the vocabularies differ, or as
        `decode.generate` for either model.

    Source: Munos et al. 2023, arXiv:2312.00886, sections 6 and 7.
    """
    checks.within(above=0, below=1, advice="choose another", share=share)
    if policy.model.vocab_size != other.model.vocab_size:
        raise InputError(
            f"expected two models of one vocabulary, got {policy.model.vocab_size} and "
            f"{other.model.vocab_size} ids; choose a reference with the policy's"
        )
    draw = Draw(
        stop_ids,
        temperature,
        unused=policy.model.unused_ids,
        # Logits differ from log-probs by a constant per row, which the softmax removes.
        hook=lambda ours, theirs: (1 - share) * ours + share * theirs,
    )
    decoders = policy, other
    state = decode.start(
        decoders,
        tokens=tokens,
        mask=mask,
        keys=keys,
        max_new_tokens=max_new_tokens,
        draw=draw,
    )
    return decode.finish(decoders, state=state, keys=keys, draw=draw).generated
