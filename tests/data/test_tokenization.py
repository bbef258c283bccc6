"""Comparing two tokenizers by their tokens and by the ids of texts."""

import pytest
import tokenizers
import toy_files
import transformers

from rlhf_jax.data import tokenization

LETTERS = "abc "


def pairs(*merges, more=(), lower=False):
    """A tokenizer of letters and pairs with these merge ranks; ids never differ."""
    tokens = ["<eos>", *LETTERS, "ab", "bc", "abc", *more]
    model = tokenizers.models.BPE(
        {token: i for i, token in enumerate(tokens)},
        [tuple(merge.split("+")) for merge in merges],
    )
    backend = tokenizers.Tokenizer(model)
    if lower:
        backend.normalizer = tokenizers.normalizers.Lowercase()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>"
    )


USUAL = ("a+b", "b+c", "ab+c")


def test_the_same_rules_differ_nowhere():
    assert tokenization.differing(pairs(*USUAL), pairs(*USUAL)) is None
    words = toy_files.tokenizer()
    assert tokenization.differing(words, toy_files.tokenizer()) is None


def test_a_tokenizer_with_more_tokens_may_read_what_this_one_writes():
    assert tokenization.differing(pairs(*USUAL), pairs(*USUAL, more=["zz"])) is None
    token, ids, read = tokenization.differing(pairs(*USUAL, more=["zz"]), pairs(*USUAL))
    assert (token, ids, read) == ("zz", "8", "no id")


def test_a_token_of_another_id_is_named_with_both():
    other = toy_files.tokenizer(["a", "the", *toy_files.WORDS[2:]])
    differing = tokenization.differing(toy_files.tokenizer(), other)
    assert differing == ("the", "2", "3")


@pytest.mark.parametrize(
    "other",
    [pairs("b+c", "a+b", "ab+c"), pairs("a+b", "b+c"), pairs(*USUAL, lower=True)],
    ids=["ranks", "a merge less", "lower case"],
)
def test_equal_tokens_by_other_rules_are_found_by_a_text(other):
    own = pairs(*USUAL)
    assert own.get_vocab() == other.get_vocab()
    text, ids, read = tokenization.differing(own, other)
    for tokenizer, description in ((own, ids), (other, read)):
        encoded = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert description.startswith(f"{encoded!s:.60} (digest ")
    assert ids.partition("(")[2] != read.partition("(")[2]


def test_a_checkpoint_is_seen_to_have_a_tokenizer(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("")
    assert not tokenization.has_files(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")
    assert tokenization.has_files(tmp_path)


def test_many_texts_are_encoded_some_thousands_at_a_time():
    tokenizer, sizes = toy_files.tokenizer(), []

    def counted(texts, **options):
        sizes.append(len(texts))
        return tokenizer(texts, **options)

    words = (toy_files.WORDS * 500)[:9000]
    ids = tokenization.encode(counted, words, special=False)
    assert ids == [[toy_files.WORDS.index(word) + 2] for word in words]
    assert sizes == [4096, 4096, 808]
    assert tokenization.encode(counted, [], special=True) == []
    assert len(sizes) == 3  # tokenizers raise an error for an empty list
