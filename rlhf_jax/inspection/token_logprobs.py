"""Log-probs and KL of every token of a text under a policy and its reference."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rlhf_jax.data import tokenization
from rlhf_jax.functional import kl, logprobs
from rlhf_jax.functional.errors import refuse
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.roles import policy

Array = jax.Array
Params = Any


class Alternative(NamedTuple):
    """A token that the policy finds likely at some place."""

    text: str
    logprob: float  # nats, under the policy
    ref_logprob: float  # nats


class Divergence(NamedTuple):
    """The numbers of one token under both models, given the tokens before it."""

    logprob: float  # nats, under the policy
    ref_logprob: float  # nats
    exact: float  # nats, Σ_v π log(π/π_ref) over the vocabulary
    alternatives: tuple[Alternative, ...]  # the most likely under the policy first

    @property
    def k1(self) -> float:
        """log π - log π_ref, nats: above 0 where the policy prefers the token."""
        return self.logprob - self.ref_logprob


class Token(NamedTuple):
    """A token's text in its context, and its numbers."""

    text: str
    divergence: Divergence | None  # None for the first token, which nothing predicts


def compute(
    params: Params,
    ref_params: Params,
    *,
    model: ModelConfig,
    ref_model: ModelConfig,
    tokens: Sequence[int],
    decode: Callable[[list[int]], str],
    temperature: float = 1.0,
    alternatives: int = 3,
) -> list[Token]:
    """Computes the log-probs of a text of any length under both models.

    A text longer than the shorter context is read in windows that overlap by half.
    Every token of a later window then follows at least half a context of others.

    Args:
      params, ref_params: parameters of the decoders, in any storage.
      decode: ids -> text, special tokens included.
      temperature: divides the logits of both models.
      alternatives: number of the policy's most likely tokens to return at each place.

    Raises:
      InputError: the vocabularies differ in size, or there are fewer than two tokens.
    """
    faults = []
    if model.vocab_size != ref_model.vocab_size:
        faults.append(
            f"expected models of one vocabulary, got {model.vocab_size} ids of the "
            f"policy and {ref_model.vocab_size} of the reference; their KL is over "
            "the same tokens"
        )
    if len(tokens) < 2:
        faults.append(
            f"expected a text of at least 2 tokens, got {len(tokens)}: nothing "
            "predicts the first; give a longer one"
        )
    refuse(faults)
    columns = _columns(
        params,
        ref_params,
        ids=np.asarray(tokens, np.int32),
        context=min(model.max_positions, ref_model.max_positions),
        program=jax.jit(
            functools.partial(
                _window,
                model=model,
                ref_model=ref_model,
                temperature=temperature,
                alternatives=min(alternatives, model.num_tokens),
            )
        ),
    )
    piece = functools.partial(tokenization.piece, decode=decode)
    read = [Token(piece(tokens[0], before=[]), None)]
    for t in range(1, len(tokens)):
        own, ref, exact, ids, *pairs = (column[t].tolist() for column in columns)
        before = list(tokens[max(0, t - tokenization.CONTEXT) : t])
        others = [
            Alternative(piece(token, before=before), likely, ref_likely)
            for token, likely, ref_likely in zip(ids, *pairs, strict=True)
        ]
        text = piece(tokens[t], before=before)
        read.append(Token(text, Divergence(own, ref, exact, tuple(others))))
    return read


def _window(
    params: Params,
    ref_params: Params,
    tokens: Array,
    *,
    model: ModelConfig,
    ref_model: ModelConfig,
    temperature: float,
    alternatives: int,
) -> tuple[Array, ...]:
    """For tokens i32[W]: log-probs and KL [W], alternatives [W, A]; about tokens[t]."""
    row, mask = tokens[None], jnp.ones((1, tokens.size), jnp.bool_)

    def under(model_params: Params, shape: ModelConfig) -> tuple[Array, Array, Array]:
        logits = policy.logits(model_params, model=shape, tokens=row, mask=mask)
        of_tokens = logprobs.token_logprobs(logits, row, temperature=temperature)
        return logits, of_tokens[0], jax.nn.log_softmax(logits[0] / temperature)

    logits, own, every = under(params, model)
    ref_logits, ref, ref_every = under(ref_params, ref_model)
    exact = kl.exact(logits, ref_logits, temperature=temperature)[0]
    likely, ids = jax.lax.top_k(every, alternatives)
    ref_likely = jnp.take_along_axis(ref_every, ids, axis=-1)
    # Entry t of these is about the token after tokens[t].
    shifted = (jnp.roll(array, 1, axis=0) for array in (exact, ids, likely, ref_likely))
    return (own, ref, *shifted)


def _columns(
    params: Params,
    ref_params: Params,
    *,
    ids: np.ndarray,
    context: int,
    program: Callable[..., tuple[Array, ...]],
) -> list[np.ndarray]:
    """The outputs of `_window` for all ids; entry 0 of each has no meaning.

    tokens      0 1 2 3 4 5 6 7 8 9     context 4
    windows     0 1 2 3
                    2 3 4 5             of which 4 5 is new
                        4 5 6 7
                            6 7 8 9
    """
    size = min(len(ids), context)
    starts = [0]
    while starts[-1] + size < len(ids):
        starts.append(min(starts[-1] + size - size // 2, len(ids) - size))
    parts, done = [], 0
    for start in starts:  # windows of one size share one program
        window = jax.device_get(
            program(params, ref_params, jnp.asarray(ids[start : start + size]))
        )
        parts.append([column[done - start :] for column in window])
        done = start + size
    return [np.concatenate(columns) for columns in zip(*parts, strict=True)]
