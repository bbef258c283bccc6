"""Perplexity of fixed texts and a judge's mean, against loops over logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import toys
from tiers import one_in

from rlhf_jax import batch, masked
from rlhf_jax.algorithms import evaluation
from rlhf_jax.data import batches
from rlhf_jax.data.examples import Example

PARAMS = toys.params()
EXAMPLES = [
    Example((3, 4), (5, 6, 1)),
    Example((), (7, 8, 9, 3)),  # nothing predicts its first token
    Example((9,), (4, 2)),
]
text_stats = toys.jit(evaluation.text_stats, static_argnames=("model",))


def texts(*, batch_size: int, examples=EXAMPLES) -> batch.Sequences:
    rows = batches.sequences_in_order(examples, batch_size=batch_size, pad_id=0)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *rows)


def surprise(tokens: list[int], *, first: int) -> list[float]:
    """-log π of tokens[first:], from the logits of this text alone."""
    row = jnp.asarray([tokens], jnp.int32)
    logits = np.asarray(
        toys.logits(PARAMS, model=toys.GPT2, tokens=row, mask=jnp.ones_like(row, bool)),
        np.float64,
    )[0]
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    return [-np.log(probabilities[t - 1, tokens[t]]) for t in range(first, len(tokens))]


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", one_in(3, [2, 1, 3]))
def test_perplexity_is_a_mean_over_tokens_however_they_are_batched(batch_size):
    stats = text_stats(
        PARAMS,
        {
            "held_out": texts(batch_size=batch_size),
            "out_of_domain": texts(batch_size=batch_size, examples=EXAMPLES[2:]),
        },
        model=toys.GPT2,
    )
    expected = [
        surprise([3, 4, 5, 6, 1], first=2),
        surprise([7, 8, 9, 3], first=1),
        surprise([9, 4, 2], first=1),
    ]
    total, weight = stats["eval/held_out_nll"]
    assert float(weight) == 8
    assert float(total) == pytest.approx(sum(map(sum, expected)), rel=1e-5)
    total, weight = stats["eval/out_of_domain_nll"]
    assert float(weight) == 2
    assert float(total) == pytest.approx(sum(expected[2]), rel=1e-5)
    assert stats.keys() == {"eval/held_out_nll", "eval/out_of_domain_nll"}


def test_padding_does_not_count():
    clean = texts(batch_size=3)
    dirty = dataclasses.replace(clean, tokens=np.where(clean.mask, clean.tokens, 7))
    assert not np.array_equal(clean.tokens, dirty.tokens)
    stats = [
        text_stats(PARAMS, {"held_out": texts}, model=toys.GPT2)["eval/held_out_nll"]
        for texts in (clean, dirty)
    ]
    assert float(stats[0][0]) == float(stats[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_kl_of_each_response(temperature):
    """Compares with a loop over the response's tokens and the logits of both models.

    column           0  1  2  3  4  5  6
    tokens           ·  3  4  5  6  1  ·
    response_mask    0  0  0  1  1  1  0
    """
    tokens = jnp.asarray([[0, 3, 4, 5, 6, 1, 0], [7, 8, 9, 3, 4, 5, 6]], jnp.int32)
    mask = jnp.asarray([[0, 1, 1, 1, 1, 1, 0], [1] * 7], bool)
    columns = jnp.arange(7)[None, :] >= 3
    zeros = jnp.zeros(tokens.shape, jnp.float32)
    responses = batch.Rollout(
        tokens=tokens,
        mask=mask,
        response_mask=mask & columns,
        old_logprobs=zeros,
        entropy=zeros,
        index=jnp.arange(2, dtype=jnp.int32),
        sample=jnp.zeros(2, jnp.int32),
    )
    reference = toys.params(toys.LLAMA)
    measured = toys.jit(
        evaluation.response_kl,
        static_argnames=("model", "ref_model", "max_new_tokens", "temperature"),
    )(
        PARAMS,
        reference,
        rollout=responses,
        model=toys.GPT2,
        ref_model=toys.LLAMA,
        max_new_tokens=4,
        temperature=temperature,
    )
    logits, ref_logits = (
        np.asarray(toys.logits(params, model=model, tokens=tokens, mask=mask))
        for params, model in ((PARAMS, toys.GPT2), (reference, toys.LLAMA))
    )
    exact = oracles.exact_kl(logits, ref_logits, temperature)
    scaled = [np.asarray(of, np.float64) / temperature for of in (logits, ref_logits)]
    ours, theirs = (
        of - np.log(np.exp(of).sum(axis=-1, keepdims=True)) for of in scaled
    )
    for row in range(2):
        at = np.flatnonzero(np.asarray(responses.response_mask)[row])
        ids = np.asarray(tokens)[row, at]
        ref = theirs[row, at - 1, ids].sum()
        assert measured.exact[row] == pytest.approx(exact[row, at - 1].sum(), rel=1e-4)
        assert measured.ref_logprobs[row] == pytest.approx(ref, rel=1e-4)
        assert measured.k1[row] == pytest.approx(
            ours[row, at - 1, ids].sum() - ref, abs=1e-3
        )


def test_a_judges_mean():
    stats = evaluation.judge_stats(jnp.asarray([1.0, -2.5, 3.0], jnp.float32))
    assert float(masked.mean_stats(stats)["judge/score"]) == 0.5
    assert float(stats["judge/score"][1]) == 3
    with pytest.raises(TypeError, match="scores"):
        evaluation.judge_stats(jnp.asarray([1, 2], jnp.int32))
    with pytest.raises(ValueError, match="scores: expected shape"):
        evaluation.judge_stats(jnp.ones((2, 1)))


def test_a_judge_that_failed_for_some_counts_nothing_there():
    """Values without a score are not read, and a mean over no scores is NaN."""
    scores = jnp.asarray([1.0, jnp.nan, 3.0, jnp.inf], jnp.float32)
    judged = jnp.asarray([True, False, True, False])
    stats = evaluation.judge_stats(scores, judged=judged)
    means = {name: float(x) for name, x in masked.mean_stats(stats).items()}
    assert means == {"judge/score": 2.0, "judge/failed": 0.5}
    none = evaluation.judge_stats(scores, judged=jnp.zeros(4, bool))
    assert [float(x) for x in none["judge/score"]] == [0.0, 0.0]
    assert [float(x) for x in none["judge/failed"]] == [4.0, 4.0]
    with pytest.raises(TypeError, match="judged: expected bool"):
        evaluation.judge_stats(scores, judged=jnp.ones(4))
    with pytest.raises(ValueError, match="expected arrays of one shape"):
        evaluation.judge_stats(scores, judged=judged[:3])
