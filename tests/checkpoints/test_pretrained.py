"""A checkpoint with its tokenizer."""

import dataclasses
import json

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import toy_files

from rlhf_jax import config, decoder, hf, policy
from rlhf_jax.checkpoints import pretrained
from rlhf_jax.data.receipts import Receipts
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models import layout
from rlhf_jax.train import reading
from rlhf_jax.train.config.watch import Text, WatchTexts


def test_a_checkpoint_comes_with_its_tokenizer(tmp_path):
    start = pretrained.load(str(toy_files.checkpoint(tmp_path / "model")))
    assert start.model == layout.fastest(toy_files.MODEL)
    assert start.params["embed"]["tokens"].dtype == jnp.float32
    assert (start.pad_id, start.stop_ids) == (0, (1,))
    assert start.decode([2, 4, 1, 0]) == "the cat"


def test_the_compute_dtype_leaves_the_parameters(tmp_path):
    model = str(toy_files.checkpoint(tmp_path / "model"))
    start = pretrained.load(model, dtype="bfloat16")
    assert start.model.dtype == "bfloat16"
    assert start.params["embed"]["tokens"].dtype == jnp.float32


def test_stop_ids_are_those_of_the_tokenizer_and_of_the_checkpoint(tmp_path):
    folder = tmp_path / "model"
    reader = toy_files.tokenizer()
    hf.save(
        *(folder, toy_files.MODEL, toy_files.params()),
        tokenizer=reader,
        stop_ids=(20, 1, 21),
    )
    assert pretrained.load(str(folder)).stop_ids == (1, 20, 21)


def test_a_tokenizer_from_elsewhere_must_fit(tmp_path):
    model = str(toy_files.checkpoint(tmp_path / "model"))
    more = [*toy_files.WORDS, "bird"]
    toy_files.tokenizer(more).save_pretrained(tmp_path / "more")
    with pytest.raises(InputError, match=r"vocabulary size 24, got id 24 for 'bird'"):
        pretrained.load(model, tokenizer=str(tmp_path / "more"))


PADDED = dataclasses.replace(toy_files.MODEL, vocab_size=30)  # for 24 tokens


@pytest.mark.slow
def test_ids_that_the_tokenizer_lacks_are_never_predicted(tmp_path):
    """Only if a checkpoint is loaded with its tokenizer; its files do not change."""
    folder = toy_files.checkpoint(tmp_path / "model", model=PADDED)
    unused = ((24, 30),)
    assert pretrained.described(str(folder)).model.unused_ids == unused
    start = pretrained.load(str(folder), dtype="bfloat16")
    assert start.model.unused_ids == unused
    assert start.model.num_tokens == 24
    assert hf.load(str(folder))[0].unused_ids == ()
    tokens = np.arange(8, dtype=np.int32)[None]
    shown = {"tokens": tokens, "mask": np.ones((1, 8), bool)}
    logits = policy.logits(start.params, model=start.model, **shown)
    assert np.all(np.isneginf(logits[..., 24:]))
    assert np.all(np.isfinite(logits[..., :24]))
    how = {"start": start, "base": None, "lora": None, "name": "toy"}
    pretrained.save(tmp_path / "out", start.params, **how)
    written = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert written["vocab_size"] == 30
    assert "unused_ids" not in written
    model, params = hf.load(str(tmp_path / "out" / "model"))
    assert model == hf.load(str(folder))[0]
    chex.assert_trees_all_equal(params, start.params)


def test_a_stop_id_without_a_token_is_named(tmp_path, capsys):
    folder, params = tmp_path / "model", toy_files.params(PADDED)
    ids = {"tokenizer": toy_files.tokenizer(), "stop_ids": (1, 27)}
    hf.save(folder, PADDED, params, **ids)
    assert pretrained.described(str(folder)).stop_ids == (1, 27)
    assert "no response will end with the stop ids 27," in capsys.readouterr().err
    toy_files.checkpoint(tmp_path / "whole")
    pretrained.described(str(tmp_path / "whole"))
    assert capsys.readouterr().err == ""


def test_the_limit_of_a_row(tmp_path):
    start = pretrained.load(str(toy_files.checkpoint(tmp_path / "model")))
    assert start.limit(None) == 16
    assert start.limit(16) == 16
    assert start.limit(3) == 3
    message = (
        "max_length: expected a number of at most 16, got 17; the model's context has"
    )
    with pytest.raises(InputError, match=message) as learned:
        start.limit(17)
    assert "max_position_embeddings" not in str(learned.value)


@pytest.mark.slow
def test_the_limit_of_rotary_positions_is_said_to_be_an_option(tmp_path):
    longer = "says so in its config.json, by max_position_embeddings or a rope_scaling"
    model = config.llama(
        vocab_size=toy_files.MODEL.vocab_size,
        hidden_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=2,
        intermediate_size=8,
        max_positions=16,
    )
    hf.save(
        tmp_path / "model",
        model,
        decoder.init(jax.random.key(0), model=model),
        tokenizer=toy_files.tokenizer(),
    )
    start = pretrained.described(str(tmp_path / "model"))
    with pytest.raises(
        InputError, match=f"at most 16, got 17; .*{longer} of type yarn"
    ):
        start.limit(17)
    with pytest.raises(InputError, match=f"has to hold a prompt too.*{longer}"):
        start.room(max_new_tokens=16)
    file = tmp_path / "model" / "config.json"
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    options = json.loads(file.read_text()) | {"rope_scaling": yarn}
    file.write_text(json.dumps(options))
    start = pretrained.described(str(tmp_path / "model"))
    assert start.limit(None) == start.limit(64) == 64
    assert start.room(max_new_tokens=24) == 40


def test_texts_to_watch(tmp_path):
    """Blocks of plain text share a token; demonstrations count by their responses."""
    start = pretrained.load(str(toy_files.checkpoint(tmp_path / "model")))
    plain = tmp_path / "plain.txt"
    plain.write_text("the cat sat\na dog ran so it was good and very bad")
    ids = start.tokenizer("the cat sat a dog ran so it was good")["input_ids"]
    texts = pretrained.read_texts(
        start, str(plain), batch_size=2, max_rows=3, max_length=4
    )
    rows = [ids[0:4], ids[3:7], ids[6:10], [start.pad_id, 0, 0, 0]]
    np.testing.assert_array_equal(texts.tokens, np.reshape(rows, (2, 2, 4)))
    read = np.ones((4, 4), bool) & [False, True, True, True]
    read[3] = False
    np.testing.assert_array_equal(texts.response_mask, read.reshape(2, 2, 4))
    watch = WatchTexts(
        texts=(Text("book", str(plain)),), text_rows=3, text_max_length=4
    )
    watched = reading.read_texts(watch, start, receipts=Receipts())
    np.testing.assert_array_equal(watched["book"].tokens, [rows[:3]])

    answers = toy_files.jsonl(
        tmp_path / "answers.jsonl",
        {"prompt": "the cat", "response": "sat"},
        {"prompt": "the cat", "response": "sat so it was good"},
        {"prompt": "a", "response": "dog ran"},
    )
    texts = pretrained.read_texts(
        start, str(answers), batch_size=1, max_rows=9, max_length=4
    )
    reader = start.tokenizer
    rows = [
        [*reader("the cat sat")["input_ids"], reader.eos_token_id],
        [*reader("a dog ran")["input_ids"], reader.eos_token_id],
    ]
    np.testing.assert_array_equal(texts.tokens[:, 0], rows)
    np.testing.assert_array_equal(
        texts.response_mask[:, 0], [[0, 0, 1, 1], [0, 1, 1, 1]]
    )
    with pytest.raises(InputError, match=r"answers\.jsonl|at most 2 tokens"):
        pretrained.read_texts(
            start, str(answers), batch_size=1, max_rows=9, max_length=2
        )
