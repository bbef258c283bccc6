"""Rows to token lists, with the GPT-2 tokenizer and a small one of words."""

import json

import jax.numpy as jnp
import places
import pytest
import tokenizers
import transformers

from rlhf_jax import batch
from rlhf_jax.data import (
    digests,
    encoding,
    examples,
    files,
    json_lines,
    tokenization,
)
from rlhf_jax.data.lengths import Limits
from rlhf_jax.data.text import TextContract
from rlhf_jax.functional.checks import InputError
from rlhf_jax.roles.rewards import transcripts

WORDS = {"<pad>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5, "d": 6}


def word_tokenizer(**special):
    """One token per word; adds <s> like Llama's tokenizer."""
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel(WORDS | {"?": 7}, unk_token="?")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **special)


@pytest.fixture
def tokenizer():
    return word_tokenizer(eos_token="</s>", pad_token="<pad>")


@pytest.fixture(scope="module")
def gpt2(shared_data):
    return tokenization.load_tokenizer(shared_data / "gpt2-tokenizer")


def test_gpt2_tokens(gpt2):
    rows = [{"prompt": "Hello, how are you doing today?"}]
    _, (tokens,) = encoding.encode_prompts(TextContract(gpt2), rows, limits=Limits(8))
    assert tokens == [15496, 11, 703, 389, 345, 1804, 1909, 30]
    assert tokenization.eos_token_id(gpt2) == 50256
    assert tokenization.pad_token_id(gpt2) == 0  # it has none; EOS must not stand in


def test_vocabularies_that_disagree(gpt2):
    tokenization.check_vocabulary(gpt2, vocab_size=50257)
    tokenization.check_vocabulary(gpt2, vocab_size=50304)
    with pytest.raises(
        InputError, match=r"size 50256, got id 50256 for '<\|endoftext\|>'; use the"
    ):
        tokenization.check_vocabulary(gpt2, vocab_size=50256)


def test_no_tokenizer(tmp_path):
    expected = "expected a folder with tokenizer.json, or a hub id, got: "
    (tmp_path / "config.json").write_text('{"config": {}, "versions": {}}')  # a run's
    with pytest.raises(
        InputError, match=r"got none of its files; .* RUN/model of a ru"
    ):
        tokenization.load_tokenizer(tmp_path)
    with pytest.raises(InputError, match="nowhere'; that looks like a path, and there"):
        tokenization.load_tokenizer(tmp_path / "nowhere")
    (tmp_path / "tokenizer.json").write_text('{"model":')
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer"})
    )
    with pytest.raises(InputError, match=expected):
        tokenization.load_tokenizer(tmp_path)


def test_special_tokens_stand_at_the_ends(tokenizer):
    rows = [{"prompt": "a b", "response": "c"}]
    assert encoding.encode_demonstrations(
        TextContract(tokenizer), rows, limits=Limits(5)
    ) == [examples.Example([1, 3, 4], [5, 2])]
    assert encoding.encode_prompts(TextContract(tokenizer), rows, limits=Limits(3))[
        1
    ] == [[1, 3, 4]]
    assert tokenization.pad_token_id(tokenizer) == 0
    assert tokenization.pad_token_id(word_tokenizer(eos_token="<pad>")) == 1


def test_an_answer_needs_an_end():
    with pytest.raises(InputError, match="a tokenizer with an EOS token, got none; se"):
        tokenization.eos_token_id(word_tokenizer())


def test_preferences_and_margins(tokenizer):
    rows = [{"prompt": "a", "chosen": "b c", "rejected": "d", "by": 2}]
    plain = examples.Pair([1, 3], [4, 5, 2], [6, 2])
    assert encoding.encode_preferences(
        TextContract(tokenizer), rows, limits=Limits(5)
    ) == [plain]
    (pair,) = encoding.encode_preferences(
        TextContract(tokenizer), rows, limits=Limits(5), margin="by"
    )
    assert pair == plain._replace(margin=2.0)
    with pytest.raises(
        InputError, match=r"row 0 \(from 0\): expected a finite .* 'gap', got N"
    ):
        encoding.encode_preferences(
            TextContract(tokenizer), rows, limits=Limits(5), margin="gap"
        )
    with pytest.raises(
        InputError, match=r"row 0 \(from 0\): expected at most 4 .* got 5 of 'a'"
    ):
        encoding.encode_preferences(TextContract(tokenizer), rows, limits=Limits(4))


def test_overlong_prompts(tokenizer):
    rows = [{"prompt": "a", "id": 0}, {"prompt": "a b c"}, {"prompt": "d", "id": 2}]
    with pytest.raises(
        InputError,
        match=r"row 1 \(from 0\): expected at most 2 tokens, got 4 of 'a b c'; shorten",
    ):
        encoding.encode_prompts(TextContract(tokenizer), rows, limits=Limits(2))
    fitting, prompts = encoding.encode_prompts(
        TextContract(tokenizer), rows, limits=Limits(2, overlong="drop")
    )
    assert [row["id"] for row in fitting] == [0, 2]
    assert prompts == [[1, 3], [1, 6]]
    with pytest.raises(
        InputError, match="at most 1 tokens, got 3 rows, the shortest with 2; allow"
    ):
        encoding.encode_prompts(
            TextContract(tokenizer), rows, limits=Limits(1, overlong="drop")
        )


def test_overlong_demonstrations(tokenizer):
    rows = [{"prompt": "a", "response": "b"}, {"prompt": "a", "response": "b c d"}]
    with pytest.raises(InputError, match=r"row 1 .* at most 5 tokens, got 6"):
        encoding.encode_demonstrations(TextContract(tokenizer), rows, limits=Limits(5))
    demonstrations = encoding.encode_demonstrations(
        TextContract(tokenizer), rows, limits=Limits(5, overlong="drop")
    )
    assert demonstrations == [examples.Example([1, 3], [4, 2])]


def test_text_blocks_share_one_token(tokenizer):
    blocks = encoding.encode_text(
        TextContract(tokenizer), "a b c d a b c d", block_size=4
    )
    assert blocks == [((), [3, 4, 5, 6]), ((), [6, 3, 4, 5]), ((), [5, 6])]
    even = encoding.encode_text(TextContract(tokenizer), "a b c d a b c", block_size=4)
    assert even == [((), [3, 4, 5, 6]), ((), [6, 3, 4, 5])]
    with pytest.raises(InputError, match=r"tokens of the text: .* at least 2, got 1"):
        encoding.encode_text(TextContract(tokenizer), "a", block_size=4)
    with pytest.raises(InputError, match=r"tokens of a block: .* at least 2, got 1"):
        encoding.encode_text(TextContract(tokenizer), "a b c", block_size=1)


@pytest.mark.slow
def test_real_text(gpt2, shared_data):
    text = json_lines.read_text(shared_data / "tinyshakespeare.txt")
    blocks = encoding.encode_text(TextContract(gpt2), text, block_size=256)
    assert len(blocks) == 1326  # ceil((338025 - 1) / 255)
    first = [block.response[1:] for block in blocks[:20]]
    tokens = [blocks[0].response[0], *(token for block in first for token in block)]
    assert text.startswith(gpt2.decode(tokens))
    assert sum(len(block.response) - 1 for block in blocks) == 338025 - 1


def test_real_pairs(gpt2, shared_data):
    rows = files.read_preferences(shared_data / "hh-rlhf-harmless" / "pairs.jsonl")
    pairs = encoding.encode_preferences(
        TextContract(gpt2), rows[:64], limits=Limits(256, overlong="drop")
    )
    assert 32 < len(pairs) < 64
    assert gpt2.decode(pairs[1].prompt) == rows[1]["prompt"]
    assert gpt2.decode(pairs[1].chosen) == rows[1]["chosen"] + "<|endoftext|>"


def test_texts_of_a_rollout(tokenizer):
    answered = batch.Rollout(
        tokens=jnp.array([[0, 3, 4, 5, 2, 0], [3, 4, 5, 6, 3, 4]]),
        mask=jnp.array([[0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1]], bool),
        response_mask=jnp.array([[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 1]], bool),
        old_logprobs=jnp.zeros((2, 6)),
        entropy=jnp.zeros((2, 6)),
        index=jnp.arange(2),
        sample=jnp.zeros(2, jnp.int32),
    )
    assert transcripts.texts(answered, decode=tokenizer.decode) == [
        ("a b", "c </s>"),
        ("a b c", "d a b"),
    ]


def test_a_digest_tells_token_lists_apart():
    lists = [[[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[3], [1, 2]]]
    assert len({digests.of_tokens(tokens) for tokens in lists}) == len(lists)
    demonstrations = [examples.Example([1], [2])]
    assert digests.of_tokens(demonstrations) == digests.of_tokens(list(demonstrations))
    assert digests.of_tokens(demonstrations) != digests.of_tokens(
        [examples.Example([1], [3])]
    )


def test_a_checkpoint_without_a_tokenizer():
    """transformers makes an empty tokenizer from its config.json."""
    folder = places.FIXTURES / "gpt2"
    with pytest.raises(InputError, match=r"got none of its files; .*--tokenizer"):
        tokenization.load_tokenizer(folder)
