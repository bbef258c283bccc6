"""Folders in the wild: tied heads, other tensor names, and additional files."""

import json
import shutil

import chex
import numpy as np
import pytest
from places import FIXTURES
from safetensors.numpy import load_file, save_file

from rlhf_jax import hf
from rlhf_jax.checkpoints import shards
from rlhf_jax.functional.checks import InputError

FAMILIES = {
    "gpt2": ("transformer.", "wte.weight", "lm_head.weight"),
    "gpt_neox": ("gpt_neox.", "embed_in.weight", "embed_out.weight"),
    **dict.fromkeys(
        (
            *("llama_bf16", "mistral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3"),
            *("olmo2", "olmo3", "smollm3", "granite", "granite4", "qwen3_5"),
        ),
        ("model.", "embed_tokens.weight", "lm_head.weight"),
    ),
}
BY_DEFAULT = ("gpt2", "gemma2", "gemma3", "smollm3")
every_family = pytest.mark.parametrize("name", FAMILIES)


def tensors_of(folder):
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def copied(tmp_path, name, tensors, *, files=1, **options):
    """Copies a fixture with these tensors in `files` files, and these options."""
    folder = tmp_path / "copied"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    config = json.loads((FIXTURES / name / "config.json").read_text()) | options
    entries = {option: value for option, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(entries))
    if files == 1:
        save_file(tensors, folder / shards.WEIGHTS)
        return folder
    weight_map = {}
    for number in range(files):
        part = dict(list(tensors.items())[number::files])
        save_file(part, folder / f"model-{number}.safetensors")
        weight_map |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / shards.INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return folder


def tied(name):
    """(tensors without a head, the embedding's name, the head's name) of a family."""
    prefix, embedding, head = FAMILIES[name]
    tensors = tensors_of(FIXTURES / name)
    tensors.pop(head, None)
    return tensors, f"{prefix}{embedding}", head


def assert_equal_trees(one, other):
    chex.assert_trees_all_equal(one, other)


@pytest.mark.cases(quick=6)
@every_family
@pytest.mark.parametrize("by_default", [False, True])
def test_a_head_that_differs_is_used_though_the_config_ties_it(
    tmp_path, capsys, name, by_default
):
    if by_default and name not in BY_DEFAULT:
        pytest.skip("untied by default")
    tensors, embedding, head = tied(name)
    own = tensors[embedding].copy()
    own[-1, -1] += 1
    both = tensors | {head: own}
    apart = hf.load(copied(tmp_path, name, both, tie_word_embeddings=False))
    assert capsys.readouterr().err == ""
    assert "head" in apart[1]

    says = ... if by_default else True
    folder = copied(tmp_path, name, both, tie_word_embeddings=says)
    assert hf.model_config(folder) == apart[0]
    assert capsys.readouterr().err == ""
    model, params = hf.load(folder)
    assert model == apart[0]
    assert_equal_trees(params, apart[1])
    errors = capsys.readouterr().err
    assert errors.startswith(f"note: checkpoint {folder}: config.json says tie_word_em")
    assert f"but {head} is there and differs from the embedding" in errors
    assert ("family's default" in errors) == by_default

    hf.save(tmp_path / "saved", model, params)
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["tie_word_embeddings"] is False
    again = hf.load(tmp_path / "saved")
    assert again[0] == model
    assert_equal_trees(again[1], params)
    assert capsys.readouterr().err == ""


@pytest.mark.cases(quick=6)
@every_family
@pytest.mark.parametrize("files", [1, 3])
def test_a_head_that_is_the_embedding_is_tied_silently(tmp_path, capsys, name, files):
    tensors, embedding, head = tied(name)
    expected = hf.load(copied(tmp_path, name, tensors, tie_word_embeddings=True))
    assert expected[0].tied_head
    tensors[head] = tensors[embedding]
    folder = copied(tmp_path, name, tensors, files=files, tie_word_embeddings=True)
    assert hf.model_config(folder) == expected[0]
    model, params = hf.load(folder)
    assert model == expected[0]
    assert_equal_trees(params, expected[1])
    assert capsys.readouterr().err == ""


@pytest.mark.cases(quick=9)
@every_family
@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("files", [1, 3])
def test_a_tied_tensor_may_stand_under_the_name_of_the_head(
    tmp_path, name, bare, files
):
    """`safetensors.torch.save_model` keeps the first of two names in the alphabet."""
    tensors, embedding, head = tied(name)
    options = {"files": files, "tie_word_embeddings": True}
    expected = hf.load(copied(tmp_path, name, tensors, **options))
    tensors[head] = tensors.pop(embedding)
    if bare:
        prefix = FAMILIES[name][0]
        tensors = {key.removeprefix(prefix): tensors[key] for key in tensors}
    model, params = hf.load(copied(tmp_path, name, tensors, **options))
    assert model == expected[0]
    assert_equal_trees(params, expected[1])


@every_family
def test_what_is_no_tied_tensor_is_missing(tmp_path, name):
    tensors, embedding, head = tied(name)
    stored = tensors.pop(embedding)
    folder = copied(tmp_path, name, tensors, tie_word_embeddings=True)
    with pytest.raises(InputError, match=f"missing: {embedding}"):
        hf.load(folder)
    folder = copied(tmp_path, name, tensors | {head: stored}, tie_word_embeddings=False)
    with pytest.raises(InputError, match=f"missing: {embedding}"):
        hf.load(folder)


def test_a_head_of_another_size_is_misshapen(tmp_path):
    tensors, embedding, head = tied("gpt2")
    tensors[head] = np.concatenate([tensors[embedding]] * 2)
    folder = copied(tmp_path, "gpt2", tensors)
    with pytest.raises(InputError, match=r"misshapen: lm_head.weight, expected \[97, "):
        hf.load(folder)
    tensors[head] = tensors[embedding].astype(np.int32)
    folder = copied(tmp_path, "gpt2", tensors)
    with pytest.raises(InputError, match=r"lm_head.weight, expected F32, F16, BF16, g"):
        hf.load(folder)


def test_heads_are_compared_as_numbers_a_part_at_a_time(tmp_path, monkeypatch):
    """A float16 embedding, a float32 head; and a difference in the last row alone."""
    monkeypatch.setattr(shards, "_COMPARED", 100)
    tensors, embedding, head = tied("gpt2")
    tensors[embedding] = tensors[embedding].astype(np.float16)
    tensors[head] = tensors[embedding].astype(np.float32)
    assert hf.load(copied(tmp_path, "gpt2", tensors))[0].tied_head
    for row in (0, 1, 50, 96):
        tensors[head] = tensors[embedding].astype(np.float32)
        tensors[head][row, 0] += 0.5
        assert not hf.load(copied(tmp_path, "gpt2", tensors))[0].tied_head


@pytest.mark.parametrize("name", ["gpt2_reward", "gemma2_reward"])
def test_a_reward_model_s_embedding_by_either_name(tmp_path, capsys, name):
    prefix, embedding, head = FAMILIES[name.removesuffix("_reward")]
    expected = hf.load_reward(FIXTURES / name)
    tensors = tensors_of(FIXTURES / name)
    stored = tensors.pop(f"{prefix}{embedding}")
    folder = copied(tmp_path, name, tensors | {head: stored})
    model, params = hf.load_reward(folder)
    assert model == expected[0] == hf.model_config(folder)
    assert_equal_trees(params, expected[1])

    left_in = {f"{prefix}{embedding}": stored, head: stored + 1}
    folder = copied(tmp_path, name, tensors | left_in)
    model, params = hf.load_reward(folder)  # scores do not read it
    assert model == expected[0] == hf.model_config(folder)
    assert_equal_trees(params, expected[1])
    assert capsys.readouterr().err == ""


@pytest.mark.cases(quick=3)
@pytest.mark.parametrize("name", ["gpt2", "llama_bf16", "gpt2_reward"])
@pytest.mark.parametrize("index", ["of shards", "of missing shards", "damaged"])
def test_a_whole_file_goes_before_an_index(tmp_path, capsys, name, index):
    load = hf.load_reward if name.endswith("_reward") else hf.load
    tensors = tensors_of(FIXTURES / name)
    stale = {key: np.zeros_like(tensor) for key, tensor in tensors.items()}
    folder = copied(tmp_path, name, stale, files=2)
    if index == "of missing shards":
        for file in folder.glob("model-*"):
            file.unlink()
    if index == "damaged":
        (folder / shards.INDEX).write_text('{"weight_map"')
    save_file(tensors, folder / shards.WEIGHTS)
    model, params = load(folder)
    assert model == hf.model_config(folder)
    assert_equal_trees(params, load(FIXTURES / name)[1])
    errors = capsys.readouterr().err
    assert (
        "model.safetensors is read, as transformers does, and model.safetens" in errors
    )
    assert "delete the one that is out of date" in errors


def test_the_shape_of_a_damaged_checkpoint_is_that_of_its_config(tmp_path):
    """Its weights are refused only when they are read."""
    folder = copied(tmp_path, "gpt2", tied("gpt2")[0])
    expected = hf.model_config(FIXTURES / "gpt2")
    (folder / shards.WEIGHTS).write_bytes(b"\0" * 20)
    assert hf.model_config(folder) == expected
    with pytest.raises(InputError, match="it is truncated"):
        hf.load(folder)
    (folder / shards.WEIGHTS).unlink()
    assert hf.model_config(folder) == expected


def test_no_weights_of_any_kind(tmp_path):
    folder = copied(tmp_path, "gpt2", tied("gpt2")[0])
    (folder / shards.WEIGHTS).unlink()
    with pytest.raises(InputError, match=r"expected model.safetensors or model.safete"):
        hf.load(folder)
