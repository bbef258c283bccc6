"""The forward pass of the policy and of the reference, which is the same function.

policy.logprobs(state.policy, ...)              with gradient
policy.logprobs(frozen.read(reference), ...)    without
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from rlhf_jax.functional import checks, kl
from rlhf_jax.functional.logprobs import MAX_LOGITS, token_logprobs_from_hidden
from rlhf_jax.models import axes, decoder
from rlhf_jax.models.config import ModelConfig
from rlhf_jax.models.packing import Packing, Texts, texts_of

Array = jax.Array
Params = Any


def logits(params: Params, *, model: ModelConfig, tokens: Array, mask: Array) -> Array:
    """Logits over the true vocabulary, for inspection and tests; -inf at unused ids.

    Training never materialises them: see `logprobs`.

    Returns:
      f32[B, S, V]; entry t is about the token after tokens[:, t].
    """
    hidden = decoder.hidden_states(params, model=model, tokens=tokens, mask=mask)
    return decoder.logits(params, hidden, model=model)


def logprobs(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    temperature: float = 1.0,
    first_column: int = 1,
    segments: Array | None = None,
    packing: Packing | None = None,
    experts: Array | None = None,
) -> Array:
    """log π(tokens[t] | tokens[<t]), the first result of `logprobs_and_entropy`."""
    return logprobs_and_entropy(
        params,
        model=model,
        tokens=tokens,
        mask=mask,
        temperature=temperature,
        first_column=first_column,
        segments=segments,
        packing=packing,
        experts=experts,
    )[0]


def logprobs_and_entropy(
    params: Params,
    *,
    model: ModelConfig,
    tokens: Array,
    mask: Array,
    temperature: float = 1.0,
    first_column: int = 1,
    segments: Array | None = None,
    packing: Packing | None = None,
    experts: Array | None = None,
) -> tuple[Array, Array]:
    """Log-probability of each token and entropy of the distribution it came from.

    Args:
      first_column: columns before it are not computed and are 0; the prompt's
        width gives the response alone.
      segments: i32[B, S], texts packed into one row (`decoder.hidden_states`); None is
        one text per row.
      packing: of these padded rows: the model runs on packed rows, and the results are
        those of the responses, at their padded columns. None runs on padded rows.
      experts: i32[B, S, L, k], as in `decoder.hidden_states`.

    Returns:
      f32[B, S] each, nats; column t is about tokens[:, t]. 0 at padding and at the
      first token of a text, which nothing predicts.
    """
    checks.positive(first_column=first_column)
    texts = texts_of(
        tokens, mask, first_column=first_column, packing=packing, segments=segments
    )
    hidden = texts.hidden_states(params, model=model, experts=experts)
    logprobs, entropy = logprobs_from_hidden(
        params, hidden, texts=texts, model=model, temperature=temperature
    )
    return texts.padded(logprobs), texts.padded(entropy)


def logprobs_from_hidden(
    params: Params,
    hidden: Array,
    *,
    texts: Texts,
    model: ModelConfig,
    temperature: float = 1.0,
) -> tuple[Array, Array]:
    """`logprobs_and_entropy` from hidden states that are computed already.

    Args:
      hidden: floats[*texts.tokens.shape, D], hidden states of these params at `texts`.

    Returns:
      f32, nats, twice, in the layout of `texts`.
    """
    head = decoder.vocabulary_head(params, model=model)
    hidden = decoder.read_by_head(hidden, model=model)
    # A chunk has the tokens of every device that shares the vocabulary.
    shared = axes.vocabulary_devices(head.shape[0])

    def computed(hidden: Array, tokens: Array, *, first_column: int) -> Any:
        return token_logprobs_from_hidden(
            hidden,
            head,
            tokens,
            temperature=temperature,
            vocab_size=model.vocab_size,
            softcap=model.logit_softcap,
            unused=model.unused_ids,
            first_column=first_column,
            max_logits=shared * _max_logits(hidden),
        )

    # With a context axis the columns of a row are on several devices, and the state
    # before a column may be on another device.
    results = axes.per_prediction(
        computed, hidden, tokens=texts.tokens, first_column=texts.first_column
    )
    predicted = _predicted(texts)
    logprobs, entropy = (jnp.where(predicted, array, 0.0) for array in results)
    return logprobs, entropy


def logprobs_of(
    others: Array,
    params: Params,
    hidden: Array,
    *,
    texts: Texts,
    model: ModelConfig,
    logprobs: Array,
    temperature: float = 1.0,
) -> Array:
    """log π of k other tokens that could have been drawn, at every position.

    log π(v) = log π(a) + (z_v - z_a)/τ, with a the token that was drawn and z the
    logits: the vocabulary is not read again. Rows of the head are gathered for a few
    columns at a time, and again in the backward pass.

    Args:
      others: i32[B, S, k].
      hidden, texts: as in `logprobs_from_hidden`, without a packing.
      logprobs: f32[B, S], nats, of the drawn tokens, from `logprobs_from_hidden`.

    Returns:
      f32[B, S, k], nats; column t is about the distribution tokens[:, t] was drawn
      from. 0 before the first column; without meaning at padding and at first tokens.
    """
    head = decoder.vocabulary_head(params, model=model)
    first = texts.first_column
    states = decoder.read_by_head(hidden, model=model)[:, first - 1 : -1]
    ids = jnp.concatenate([texts.tokens[..., None], others], axis=-1)[:, first:]

    @jax.checkpoint
    def distances(column: tuple[Array, Array]) -> Array:
        state, ids = column  # [B, D] and i32[B, k + 1]
        logits = jnp.einsum(
            "bd,bkd->bk",
            state,
            head[ids].astype(state.dtype),
            preferred_element_type=jnp.float32,
        )
        if model.logit_softcap is not None:
            logits = model.logit_softcap * jnp.tanh(logits / model.logit_softcap)
        return (logits[:, 1:] - logits[:, :1]) / temperature

    # Maps over columns, so that rows stay on their devices.
    size = ids.shape[0] * ids.shape[2] * head.shape[1]
    moved = jax.lax.map(
        distances,
        (states.swapaxes(0, 1), ids.swapaxes(0, 1)),
        batch_size=max(1, _max_logits(hidden) // max(1, size)),
    )
    room = ((0, 0), (first, 0), (0, 0))
    return logprobs[..., None] + jnp.pad(moved.swapaxes(0, 1), room)


def exact_kl(
    params: Params,
    hidden: Array,
    ref_params: Params,
    ref_hidden: Array,
    *,
    texts: Texts,
    model: ModelConfig,
    ref_model: ModelConfig | None = None,
    temperature: float = 1.0,
    direction: kl.Direction = "reverse",
    top_k: int | None = None,
    jsd_beta: float | None = None,
    sampled_tail: bool = False,
) -> Any:
    """KL over the vocabulary at every position, from hidden states computed already.

    Args:
      params, hidden: the policy's parameters and hidden states at `texts`,
        floats[B, S, D].
      ref_params, ref_hidden: the reference's, floats[B, S, D']; no gradient reaches
        them.
      model, ref_model: the shapes of both; ref_model None is the policy's.
      top_k: likeliest tokens of the policy to sum over one by one; the rest are one
        bucket, so that the KL is a lower bound. None sums over every token.
      jsd_beta: share of the reference in the mixture of the generalised Jensen-Shannon
        divergence, which then replaces the KL; None computes the KL.
      sampled_tail: compute only the part of the top k, and which tokens of `texts` are
        in it (`kl.head_from_hidden`).

    Returns:
      f32[B, S], nats; column t is about the distribution tokens[:, t] was drawn from.
      0 at padding and at the first token of a row. With `sampled_tail` also bool[B, S].
      Both in the layout of `texts`.
    """
    head = decoder.vocabulary_head(params, model=model)
    ref_model = model if ref_model is None else ref_model
    ref_head = decoder.vocabulary_head(ref_params, model=ref_model)
    # Here too, whatever the caller does: no path may move a reference.
    ref_head = jax.lax.stop_gradient(ref_head)
    ref_hidden = jax.lax.stop_gradient(ref_hidden)
    hidden = decoder.read_by_head(hidden, model=model)
    ref_hidden = decoder.read_by_head(ref_hidden, model=ref_model)

    def computed(
        hidden: Array, ref_hidden: Array, about: Array, *, first_column: int
    ) -> Any:
        options: dict[str, Any] = {
            "temperature": temperature,
            "vocab_size": model.vocab_size,
            "softcap": model.logit_softcap,
            "ref_softcap": ref_model.logit_softcap,
            "unused": model.unused_ids,
            "first_column": first_column,
            "max_logits": _max_logits(hidden),
        }
        models = hidden, head, ref_hidden, ref_head
        if jsd_beta is not None:
            return kl.jensen_shannon_from_hidden(
                *models, beta=jsd_beta, k=top_k, **options
            )
        if sampled_tail and top_k is not None:
            return kl.head_from_hidden(*models, tokens=about, k=top_k, **options)
        return kl.exact_from_hidden(*models, direction=direction, k=top_k, **options)

    results = axes.per_prediction(
        computed,
        hidden,
        ref_hidden,
        tokens=texts.tokens,
        first_column=texts.first_column,
    )
    predicted = _predicted(texts)
    return jax.tree.map(lambda x: jnp.where(predicted, x, jnp.zeros_like(x)), results)


def _max_logits(hidden: Array) -> int:
    """Logits of a chunk, `MAX_LOGITS` per device: each chunk gathers a sharded head."""
    return MAX_LOGITS * axes.row_devices(hidden.shape[0])


def _predicted(texts: Texts) -> Array:
    """bool, like `texts.mask`: tokens except a text's first, which nothing predicts."""
    mask, segments = texts.mask, texts.segments
    # The first token of a packed text would be predicted from another text.
    text = mask if segments is None else segments
    return mask & (text == jnp.pad(text[:, :-1], ((0, 0), (1, 0))))
