"""Rows of samples.jsonl: the pieces make the text, and numbers are of their tokens."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import toys

from rlhf_jax.data import tokenization
from rlhf_jax.inspection import sampled_tokens

WORDS = [
    *("pad", "<eos>", "<stop>", "it", "is", "a", "fine", "gift", "we", "love"),
    *("not", "so", "dull"),
]


def decode(ids):
    return " ".join(WORDS[i] for i in ids)


@pytest.fixture(scope="module")
def rollout():
    return jax.device_get(toys.sampled(toys.params()))


def test_a_columns_entry_is_about_its_token(rollout):
    columns = np.arange(rollout.tokens.size, dtype=np.float32)
    logprobs = columns.reshape(rollout.tokens.shape) / 3
    told = sampled_tokens.columns(
        rollout, logprobs=logprobs, ref_logprobs=-logprobs, decode=decode
    )
    texts = tokenization.texts(rollout, decode=decode)
    assert len(told) == len(texts)
    for row, (each, (_, response)) in enumerate(zip(told, texts, strict=True)):
        assert "".join(each["tokens"]) == response
        assert [piece.strip() for piece in each["tokens"]] == response.split()
        places = np.flatnonzero(rollout.response_mask[row])
        wanted = [round(float(logprobs[row, t]), 4) for t in places]
        assert each["logprobs"] == wanted
        assert each["ref_logprobs"] == [-x for x in wanted]
    assert json.loads(json.dumps(told)) == told


def test_without_a_reference_there_are_none_of_its_log_probs(rollout):
    told = sampled_tokens.columns(
        rollout, logprobs=rollout.old_logprobs, ref_logprobs=None, decode=decode
    )
    assert all(each.keys() == {"tokens", "logprobs"} for each in told)


def test_an_empty_response(rollout):
    empty = dataclasses.replace(
        rollout, response_mask=np.zeros_like(rollout.response_mask)
    )
    told = sampled_tokens.columns(
        empty, logprobs=empty.old_logprobs, ref_logprobs=None, decode=decode
    )
    assert told[0] == {"tokens": [], "logprobs": []}
