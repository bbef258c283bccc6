"""A user's files at toy size: a tokenizer of words, a checkpoint, data."""

import dataclasses
import functools
import json
from pathlib import Path

import jax
import tokenizers
import transformers

from rlhf_jax import config, decoder, hf, rewards

WORDS = [
    *("the", "a", "cat", "dog", "sat", "ran", "good", "bad", "very", "so", "and"),
    *("but", "it", "is", "was", "in", "on", "by", "to", "we", ".", "?"),
]
MODEL = config.gpt2(
    vocab_size=len(WORDS) + 2,
    hidden_size=16,
    num_layers=1,
    num_heads=2,
    max_positions=16,
)
MIXTURE = dataclasses.replace(
    config.llama(
        vocab_size=len(WORDS) + 2,
        hidden_size=16,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=12,
        max_positions=32,
    ),
    family="mixtral",
    experts=config.Experts(4, 2),
)


def tokenizer(words=WORDS):
    """One token per word; ids 0 and 1 are padding and EOS."""
    ids = {word: i for i, word in enumerate(["<pad>", "<eos>", *words])}
    model = tokenizers.models.WordLevel(ids, unk_token="?")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<eos>", pad_token="<pad>"
    )


@functools.cache
def params(model=MODEL, *, seed=0):
    init = jax.jit(decoder.init, static_argnames=("model",))
    return init(jax.random.key(seed), model=model)


def checkpoint(folder: Path, *, model=MODEL, words=WORDS, seed=0) -> Path:
    hf.save(folder, model, params(model, seed=seed), tokenizer=tokenizer(words))
    return folder


def reward_model(folder: Path) -> Path:
    scorer = rewards.init(jax.random.key(1), params(), model=MODEL)
    hf.save_reward(folder, MODEL, scorer, tokenizer=tokenizer())
    return folder


def jsonl(file: Path, *rows) -> Path:
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file
