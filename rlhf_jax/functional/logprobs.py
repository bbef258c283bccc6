"""Log-probs of tokens, and entropies, from logits or from hidden states.

Columns shift by one here: position t - 1 predicts token t.

    column            0    1    2    3
    tokens            a    b    c    d
    logits[:, t]      of b of c of d of ·
    logprobs[:, t]    0    of b of c of d
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Float, Float32, Int32

from rlhf_jax.functional import checks, logprob_chunks, unused_ids

Array = jax.Array
Scalar = checks.Scalar

MAX_LOGITS = 2**24  # in memory at a time on one device, 64 MiB


def token_logprobs(
    logits: Float[Array, "B S V"],
    tokens: Int32[Array, "B S"],
    *,
    temperature: Scalar = 1.0,
) -> Float32[Array, "B S"]:
    """log softmax(logits[:, t-1] / temperature)[tokens[:, t]], column 0 being 0.

    Args:
      logits: floats[B, S, V] of any precision; the log-softmax is taken in float32.

    Returns:
      f32[B, S], nats; column t is about tokens[:, t].

    >>> logits = jnp.log(jnp.array([[[0.25, 0.75], [0.5, 0.5], [0.9, 0.1]]]))
    >>> tokens = jnp.array([[0, 1, 0]])
    >>> print(jnp.exp(token_logprobs(logits, tokens)))  # column 0 is exp(0)
    [[1.   0.75 0.5 ]]
    >>> print(jnp.exp(token_logprobs(logits, tokens, temperature=0.5)))
    [[1.  0.9 0.5]]
    """
    checks.shape((None, None), tokens=tokens)
    checks.shape((*tokens.shape, None), logits=logits)
    checks.floating(logits=logits)
    checks.int32(tokens=tokens)
    checks.positive(temperature=temperature)
    # The last position predicts a token after the row's end.
    logprobs = log_softmax(logits[:, :-1], temperature=temperature)
    drawn = jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1)[..., 0]
    # Nothing predicts column 0.
    return jnp.pad(drawn, ((0, 0), (1, 0)))


def entropy(
    logits: Float[Array, "*shape V"], *, temperature: Scalar = 1.0
) -> Float32[Array, "*shape"]:
    """-Σ_v π(v) log π(v) with π = softmax(logits / temperature) and 0·log 0 = 0.

    Nothing is shifted: entry t is about the token *after* tokens[:, t].

    Args:
      logits: floats[..., V] of any precision; cast to float32.

    >>> print(entropy(jnp.array([[0.0, 0.0], [5.0, 5.0], [0.0, -jnp.inf]])))  # log 2, 0
    [ 0.693  0.693 -0.   ]
    >>> print(entropy(jnp.array([[1.0, 0.0], [2.0, 0.0]]), temperature=2.0))
    [0.663 0.582]
    """
    logprobs = log_softmax(logits, temperature=temperature)
    # 0·log 0 = 0: exp(-inf) · -inf would be NaN.
    possible = jnp.where(logprobs > -jnp.inf, logprobs, 0.0)
    return -jnp.sum(jnp.exp(logprobs) * possible, axis=-1)


def log_softmax(
    logits: Float[Array, "*shape V"], *, temperature: Scalar
) -> Float32[Array, "*shape V"]:
    """log softmax(logits / temperature) in float32; -inf where a logit is -inf.

    The gradient reaches both. A logit of -inf is not divided: its slope with respect to
    the temperature would be infinite.

    >>> logits = jnp.array([0.0, 2.0, -jnp.inf])
    >>> print(log_softmax(logits, temperature=2.0))
    [-1.313 -0.313   -inf]
    >>> print(jax.grad(lambda t: log_softmax(logits, temperature=t)[1])(2.0))
    -0.134
    """
    checks.floating(logits=logits)
    checks.positive(temperature=temperature)
    # A log-softmax in bfloat16 has 3 digits: ratios of 1.00 ± 0.01 would be noise.
    logits = logits.astype(jnp.float32)
    possible = logits > -jnp.inf
    scaled = jnp.where(possible, logits, 0.0) / temperature
    return jax.nn.log_softmax(jnp.where(possible, scaled, -jnp.inf))


def token_logprobs_from_hidden(
    hidden: Float[Array, "B S D"],
    head: Float[Array, "rows D"],
    tokens: Int32[Array, "B S"],
    *,
    temperature: Scalar = 1.0,
    vocab_size: int | None = None,
    softcap: float | None = None,
    first_column: int = 1,
    max_logits: int = MAX_LOGITS,
    unused: unused_ids.Ranges = (),
) -> tuple[Float32[Array, "B S"], Float32[Array, "B S"]]:
    """Log-probs and entropies of logits = hidden·headᵀ, without an array [B, S, V].

    The vocabulary is read in chunks, each for all positions at once. So a sharded batch
    stays sharded, and so does a head that is sharded over the vocabulary, on up to 16
    devices that divide it. The backward pass rematerialises the logits of each chunk.
    `jax.jvp` works on the gradient, not on the function. Products are computed in
    hidden's dtype and accumulated in float32.

    Args:
      hidden: floats[B, S, D], the last layer's output after its norm.
      head: floats[V', D]; rows from `vocab_size` on are padding and have no effect.
      vocab_size: V, the true vocabulary; None when no row is padding.
      softcap: c of logits c·tanh(x / c), before the temperature (Gemma 2,
        arXiv:2408.00118); None disables it.
      first_column: the first column to compute; earlier ones are 0. The prompt's width
        P gives the response alone.
      max_logits: logits in memory at a time, on all devices together. The least is 16
        tokens of the vocabulary for every position (fewer if 16 does not divide V').
      unused: ranges of ids below `vocab_size` that are not tokens; their rows have no
        effect either, and their log-prob is -inf.

    Returns:
      f32[B, S] log-probs and f32[B, S] entropies, nats; column t of both is about the
      distribution that tokens[:, t] was drawn from. Column 0 is 0. The gradient
      reaches `hidden`, `head` and `temperature`. Columns whose cotangents are 0 (masked
      out) do not contribute to it, whatever their hidden states.

    >>> hidden = jnp.array([[[1.0, 0.0], [0.0, 2.0], [9.0, 9.0]]])
    >>> head = jnp.array([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]])
    >>> tokens = jnp.array([[0, 1, 2]])
    >>> logprobs, entropies = token_logprobs_from_hidden(hidden, head, tokens)
    >>> print(logprobs, entropies)
    [[ 0.    -1.408 -0.143]] [[0.    0.832 0.441]]
    >>> print(token_logprobs(hidden @ head.T, tokens))
    [[ 0.    -1.408 -0.143]]
    """
    checks.shape((None, None), tokens=tokens)
    checks.shape((*tokens.shape, None), hidden=hidden)
    checks.shape((None, hidden.shape[-1]), head=head)
    checks.floating(hidden=hidden, head=head)
    checks.int32(tokens=tokens)
    checks.at_least_one(max_logits=max_logits)
    checks.positive(temperature=temperature, first_column=first_column, softcap=softcap)
    batch, columns = tokens.shape
    padded = head.shape[0]
    vocab_size = padded if vocab_size is None else vocab_size
    checks.within(
        least=1,
        most=padded,
        advice="pass the true vocabulary's size, at most the rows of head",
        vocab_size=vocab_size,
    )
    if unused:
        unused_ids.check(unused, vocab_size=vocab_size)

    # Columns that are not computed are padded with zeros, so that columns keep their t.
    before = ((0, 0), (min(first_column, columns), 0))
    if first_column >= columns or batch == 0:
        zeros = jnp.zeros((batch, columns), jnp.float32)
        return zeros, zeros
    predicted = tokens[:, first_column:]
    # Rows and columns become one axis: plain matrix products are fastest everywhere.
    flat = logprob_chunks.logprobs_and_entropy(
        hidden[:, first_column - 1 : -1].reshape(predicted.size, -1),
        head,
        predicted.reshape(-1),
        temperature=temperature,
        plan=logprob_chunks.plan(
            vocab_size=vocab_size,
            rows=padded,
            positions=predicted.size,
            max_logits=max_logits,
            softcap=softcap,
            unused=unused,
        ),
    )
    logprobs, entropies = (
        jnp.pad(array.reshape(predicted.shape), before) for array in flat
    )
    return logprobs, entropies
