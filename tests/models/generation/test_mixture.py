"""The geometric mixture of two decoders: log-probs and draws by full passes."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import toys

from rlhf_jax import policy
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.generation import decode, mixture
from rlhf_jax.models.generation.sampling import Decoder

pytestmark = pytest.mark.usefixtures("quick_compilation")
OURS = Decoder(toys.params(), toys.GPT2)
FIXED = ("max_new_tokens", "stop_ids", "temperature")
DEEPER = dataclasses.replace(toys.LLAMA, num_layers=2)
SHARE, TEMPERATURE, SIZE = 0.3, 0.7, 4


def prompts(rows):
    rng = np.random.default_rng(0)
    mask = np.arange(4)[None, :] >= rng.integers(0, 3, (rows, 1))
    return np.where(mask, rng.integers(3, 13, (rows, 4)), 0).astype(np.int32), mask


def drawn(other, *, rows=8, stop_ids=toys.STOP, **options):
    """The generated samples, and the arguments of `decode.generate`."""
    tokens, mask = prompts(rows)
    counts = np.arange(rows, dtype=np.int32)
    arguments = {
        "tokens": tokens,
        "mask": mask,
        "keys": decode.row_keys(jax.random.key(2), index=counts, sample=counts),
    }
    fixed = {
        "max_new_tokens": SIZE,
        "stop_ids": stop_ids,
        "temperature": TEMPERATURE,
    }
    draw = functools.partial(
        mixture.generate, OURS, other, **{"share": SHARE, **fixed, **options}
    )
    return toys.jit(draw)(**arguments), arguments | fixed


def mixed(side, other, generated):
    """The mixture's log-probabilities at every column, from two full passes."""
    logits = [
        np.float64(
            policy.logits(
                of.params, model=of.model, tokens=generated.tokens, mask=generated.mask
            )
        )
        / TEMPERATURE
        for of in (side, other)
    ]
    whole = (1 - SHARE) * logits[0] + SHARE * logits[1]
    return whole - np.logaddexp.reduce(whole, axis=-1, keepdims=True)


@pytest.mark.parametrize(
    "model", [toys.GPT2, pytest.param(DEEPER, marks=pytest.mark.slow)]
)
def test_log_probs_are_those_of_the_mixture(model):
    """With a model of another family and depth; also entropies and rows that stop."""
    other = Decoder(toys.params(model, seed=1), model)
    generated, _ = drawn(other)
    mask = np.asarray(generated.response_mask)
    lengths = mask.sum(axis=1)
    assert lengths.min() < lengths.max()
    log_mix = mixed(OURS, other, generated)[:, :-1]
    tokens = np.asarray(generated.tokens)[:, 1:]
    of_token = np.take_along_axis(log_mix, tokens[..., None], axis=-1)[..., 0]
    entropy = -(np.exp(log_mix) * log_mix).sum(axis=-1)
    for output, expected in (
        (generated.logprobs, of_token),
        (generated.entropy, entropy),
    ):
        np.testing.assert_allclose(
            output[:, 1:][mask[:, 1:]], expected[mask[:, 1:]], rtol=1e-3, atol=1e-4
        )
        np.testing.assert_array_equal(np.asarray(output)[~mask], 0)


@pytest.mark.slow
def test_the_mixture_of_a_model_with_itself_draws_what_it_draws():
    generated, arguments = drawn(OURS)
    alone = toys.jit(
        functools.partial(
            decode.generate,
            OURS.params,
            model=OURS.model,
            **{name: arguments.pop(name) for name in FIXED},
        )
    )(**arguments)
    np.testing.assert_array_equal(generated.tokens, alone.tokens)
    np.testing.assert_allclose(generated.logprobs, alone.logprobs, atol=1e-5)


def test_mixtures_that_are_none():
    more = dataclasses.replace(toys.GPT2, vocab_size=14)
    with pytest.raises(InputError, match="share: expected a number above 0 and"):
        drawn(OURS, share=1.0)
    with pytest.raises(InputError, match="two models of one vocabulary, got 13 and 14"):
        drawn(Decoder(OURS.params, more))
    short = dataclasses.replace(toys.GPT2, max_positions=6)
    with pytest.raises(InputError, match=r"at most 6, got 8; shorten"):
        drawn(Decoder(OURS.params, short))
