"""Ids without a token: tails, holes, added tokens, several ids of one text."""

import types

import pytest
import tokenizers
import toy_files
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_jax.data import tokenization
from rlhf_jax.functional import unused_ids


def word_level(ids: dict[str, int]):
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(ids, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend)


@settings(max_examples=15, deadline=None)
@given(st.sets(st.integers(1, 40), max_size=20), st.integers(0, 9))
def test_ids_without_a_token_are_unused(others, room):
    used = {0, *others}
    reader = word_level({f"w{i}": i for i in used})
    size = 1 + max(used) + room
    ranges = tokenization.ids_without_token(reader, vocab_size=size)
    assert unused_ids.listed(ranges) == [i for i in range(size) if i not in used]


def test_added_tokens_are_tokens_and_holes_are_not():
    """The number of tokens is below the largest id."""
    reader = word_level({"w0": 0, "w1": 1, "w5": 5})
    reader.add_tokens(["<tool>"])
    reader.add_special_tokens({"eos_token": "<eos>"})
    tool, eos = reader.convert_tokens_to_ids(["<tool>", "<eos>"])
    used = {0, 1, 5, tool, eos}
    ranges = tokenization.ids_without_token(reader, vocab_size=12)
    assert unused_ids.listed(ranges) == [i for i in range(12) if i not in used]
    assert len(reader) <= max(used)


def test_an_id_whose_text_another_id_has_too_is_a_token():
    pieces = [("<unk>", 0.0), ("a", -1.0), ("a", -2.0), ("b", -1.5)]
    backend = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0))
    reader = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
    assert sorted(reader.get_vocab().values()) == [0, 2, 3]
    assert tokenization.ids_without_token(reader, vocab_size=6) == ((4, 6),)


def test_a_tokenizer_in_python_is_read_by_its_vocabulary():
    reader = types.SimpleNamespace(is_fast=False, get_vocab=lambda: {"a": 0, "b": 2})
    assert tokenization.ids_without_token(reader, vocab_size=4) == ((1, 2), (3, 4))


@pytest.mark.parametrize("more", [0, 1])
def test_a_vocabulary_of_tokens_alone_has_none(more):
    size = toy_files.MODEL.vocab_size
    expected = ((size, size + more),) if more else ()
    assert (
        tokenization.ids_without_token(toy_files.tokenizer(), vocab_size=size + more)
        == expected
    )
