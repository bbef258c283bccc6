"""Rows of samples.jsonl: the pieces join to the text, with their tokens' numbers."""

import dataclasses
import json

import jax
import numpy as np
import pytest
import toys

from rlhf_jax import batch
from rlhf_jax.roles.rewards import transcripts
from rlhf_jax.train.watch import sampled_tokens

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
    records = sampled_tokens.columns(
        rollout, logprobs=logprobs, ref_logprobs=-logprobs, decode=decode
    )
    texts = transcripts.texts(rollout, decode=decode)
    assert len(records) == len(texts)
    for row, (record, (_, response)) in enumerate(zip(records, texts, strict=True)):
        assert "".join(record["tokens"]) == response
        assert [piece.strip() for piece in record["tokens"]] == response.split()
        places = np.flatnonzero(rollout.response_mask[row])
        expected = [round(float(logprobs[row, t]), 4) for t in places]
        assert record["logprobs"] == expected
        assert record["ref_logprobs"] == [-x for x in expected]
    assert json.loads(json.dumps(records)) == records


def test_without_a_reference_there_are_none_of_its_log_probs(rollout):
    records = sampled_tokens.columns(
        rollout, logprobs=rollout.old_logprobs, ref_logprobs=None, decode=decode
    )
    assert all(record.keys() == {"tokens", "logprobs"} for record in records)


def test_an_empty_response(rollout):
    empty = dataclasses.replace(
        rollout, response_mask=np.zeros_like(rollout.response_mask)
    )
    records = sampled_tokens.columns(
        empty, logprobs=empty.old_logprobs, ref_logprobs=None, decode=decode
    )
    assert records[0] == {"tokens": [], "logprobs": []}


@pytest.fixture
def two_turns():
    """it is <stop> | a fine | gift <eos>, and it <stop> | dull, which is read only."""
    row = [0, 8, 9, 3, 4, 2, 5, 6, 7, 1, 0]
    other = [8, 9, 9, 3, 2, 12, 0, 0, 0, 0, 0]
    sampled = [[0, 0, 0, 1, 1, 1, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0]]
    mask = np.array([row, other]) > 0
    logprobs = -np.arange(22, dtype=np.float32).reshape(2, 11)
    return batch.Rollout(
        tokens=np.array([row, other]),
        mask=mask,
        response_mask=np.array(sampled, bool),
        old_logprobs=logprobs,
        entropy=logprobs,
        index=np.arange(2),
        sample=np.zeros(2, int),
    )


@pytest.mark.slow
def test_observed_tokens_stand_in_their_places_without_numbers(two_turns):
    records = sampled_tokens.columns(
        two_turns, logprobs=two_turns.old_logprobs, ref_logprobs=None, decode=decode
    )
    assert "".join(records[0]["tokens"]) == "it is <stop> a fine gift <eos>"
    assert records[0]["logprobs"] == [-3.0, -4.0, -5.0, None, None, -8.0, -9.0]
    assert records[0]["observed"] == [False, False, False, True, True, False, False]
    assert records[1] == {
        "tokens": ["it", " <stop>", " dull"],
        "logprobs": [-14.0, -15.0, None],
        "observed": [False, False, True],
    }
    np.testing.assert_array_equal(np.nonzero(two_turns.observed)[1], [6, 7, 5])


def test_texts_have_what_was_observed_in_its_place_and_not_in_the_prompt(two_turns):
    assert transcripts.texts(two_turns, decode=decode) == [
        ("we love", "it is <stop>⟦a fine⟧gift <eos>"),
        ("we love love", "it <stop>⟦dull⟧"),
    ]


def test_an_observed_token_has_no_alternatives(two_turns):
    ids = np.tile(np.array([3, 4]), (2, 11, 1))
    likely = ids, ids.astype(np.float32), ids.astype(np.float32)
    records = sampled_tokens.alternatives(two_turns, likely, decode=decode)
    assert [len(places) for places in records[0]] == [2, 2, 2, 0, 0, 2, 2]
    assert records[0][0] == [["it", 3.0, 3.0], ["is", 4.0, 4.0]]
    assert records[0][5] == [[" it", 3.0, 3.0], [" is", 4.0, 4.0]]
