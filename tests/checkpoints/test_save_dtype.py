"""The dtype of a saved checkpoint: taken from its source, rounded once, or refused."""

import json

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import toy_files
from places import FIXTURES
from safetensors.numpy import load_file, save_file

from rlhf_jax import frozen, hf, lora, rewards
from rlhf_jax.checkpoints import peft, pretrained
from rlhf_jax.checkpoints.hf import casting
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.lora import LoRA

RANK_2 = LoRA(rank=2, alpha=4.0)
HALVES = ("bfloat16", "float16")


def tensors_of(folder, file="model.safetensors"):
    return load_file(folder / file)


def config_of(folder):
    return json.loads((folder / "config.json").read_text())


def exactly_rounded(x, dtype):
    """The nearest 16-bit number, ties to even, by its two neighbours in float64."""
    exact = np.asarray(x, np.float64)
    with np.errstate(invalid="ignore"):
        grid = np.arange(1 << 16, dtype=np.uint16).view(dtype).astype(np.float64)
    grid = np.unique(grid[np.isfinite(grid)])  # of the two zeros one
    above = np.clip(np.searchsorted(grid, exact), 1, len(grid) - 1)
    low, high = grid[above - 1], grid[above]
    even = (low.astype(dtype).view(np.uint16) & 1) == 0
    nearest = np.where(high - exact < exact - low, high, low)
    return np.where(high - exact == exact - low, np.where(even, low, high), nearest)


@pytest.mark.parametrize("name", HALVES)
def test_weights_are_rounded_to_nearest_even(name):
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    rng = np.random.default_rng(0)
    ties = 1 + (np.arange(64) * 2 + 1) * float(ml_dtypes.finfo(dtype).eps) / 2
    x = np.concatenate([rng.normal(size=3000), ties, 10.0 ** rng.uniform(-9, 4, 3000)])
    x = x.astype(np.float32)
    output = casting.cast(x, name)
    assert output.dtype == dtype
    np.testing.assert_array_equal(output.astype(np.float64), exactly_rounded(x, dtype))


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("name", hf.SAVE_DTYPES)
def test_the_files_are_in_the_dtype_that_the_config_names(tmp_path, name):
    model, params = hf.load(FIXTURES / "gpt2", dtype="float32")
    hf.save(tmp_path / "out", model, params, dtype=name)
    assert config_of(tmp_path / "out")["dtype"] == name
    assert config_of(tmp_path / "out")["torch_dtype"] == name
    read = tensors_of(FIXTURES / "gpt2")
    for key, tensor in tensors_of(tmp_path / "out").items():
        assert tensor.dtype.name == name
        np.testing.assert_array_equal(tensor, read[key].astype(tensor.dtype))
    assert hf.stored_dtype(tmp_path / "out") == name


def test_without_a_dtype_it_is_that_of_the_parameters(tmp_path):
    model, params = hf.load(FIXTURES / "llama_bf16")
    hf.save(tmp_path / "out", model, params)
    assert config_of(tmp_path / "out")["torch_dtype"] == "bfloat16"
    assert hf.stored_dtype(tmp_path / "out") == "bfloat16"


@pytest.mark.parametrize("value", [65520.0, -1e9])
def test_float16_is_refused_before_a_weight_becomes_infinite(tmp_path, value):
    model, params = hf.load(FIXTURES / "gpt2", dtype="float32")
    kernel = params["layers"]["mlp"]["up"]["kernel"]
    params["layers"]["mlp"]["up"]["kernel"] = kernel.at[1, 2, 3].set(value)
    with pytest.raises(InputError) as error:
        hf.save(tmp_path / "out", model, params, dtype="float16")
    assert f"layers/mlp/up/kernel: up to {abs(value):.6g}" in str(error.value)
    assert "at most 65504" in str(error.value)
    assert "--save-dtype bfloat16" not in str(error.value)
    assert "save in bfloat16 or float32" in str(error.value)
    assert list(tmp_path.iterdir()) == []
    hf.save(tmp_path / "out", model, params, dtype="bfloat16")
    up = tensors_of(tmp_path / "out")["transformer.h.1.mlp.c_fc.weight"]
    assert up[2, 3] == np.float32(value).astype(up.dtype)


def test_what_still_rounds_to_the_largest_number_is_kept(tmp_path):
    model, params = hf.load(FIXTURES / "gpt2", dtype="float32")
    params["final_norm"]["bias"] = params["final_norm"]["bias"].at[0].set(65519.0)
    hf.save(tmp_path / "out", model, params, dtype="float16")
    assert tensors_of(tmp_path / "out")["transformer.ln_f.bias"][0] == 65504


# What a checkpoint is stored in.


def stored(tmp_path, **dtypes):
    """A folder of tensors of 4 entries each, or of the given number."""
    folder = tmp_path / "stored"
    folder.mkdir()
    (folder / "config.json").write_text('{"dtype": "float16"}')
    sizes = {"I64": np.int64, "U8": np.uint8, "F32": np.float32, "F16": np.float16}
    kinds = sizes | {"BF16": ml_dtypes.bfloat16}
    tensors = {name: np.ones(size, kinds[name]) for name, size in dtypes.items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"BF16": 9, "F32": 3}, "bfloat16"),
        ({"BF16": 3, "F32": 9}, "float32"),
        ({"F16": 9, "F32": 8, "U8": 99}, "float16"),
        ({"BF16": 5, "F32": 5}, "float32"),
        ({"BF16": 5, "F16": 5, "F32": 4}, "bfloat16"),
    ],
)
def test_several_dtypes_are_that_of_most_entries(tmp_path, sizes, expected):
    assert hf.stored_dtype(stored(tmp_path, **sizes)) == expected


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "float16"}, "float16"),
        ({}, "float32"),
        ({"dtype": "auto"}, "float32"),
    ],
)
def test_without_weights_the_config_says(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert hf.stored_dtype(tmp_path) == expected


# Through a run: read in one dtype, trained in float32, saved as it was read.


def checkpoint(folder, dtype):
    hf.save(
        *(folder, toy_files.MODEL, toy_files.params()),
        tokenizer=toy_files.tokenizer(),
        dtype=dtype,
    )
    return folder


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("name", hf.SAVE_DTYPES)
def test_a_checkpoint_comes_back_as_it_was_read(tmp_path, name):
    start = pretrained.load(str(checkpoint(tmp_path / "m", name)))
    assert start.save_dtype == name
    assert {x.dtype.name for x in jax.tree.leaves(start.params)} == {"float32"}
    pretrained.save(
        tmp_path / "run", start.params, start=start, base=None, lora=None, name="m"
    )
    before, after = tmp_path / "m", tmp_path / "run" / "model"
    for file in before.iterdir():
        assert (after / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.slow
@pytest.mark.parametrize("stored", [None, "bfloat16"])
@pytest.mark.parametrize("name", ["float32", "float16"])
def test_merged_adapters_are_rounded_once(tmp_path, name, stored):
    start = pretrained.load(str(checkpoint(tmp_path / "m", "bfloat16")))
    start = start._replace(save_dtype=name)
    base = frozen.freeze(start.params, dtype=stored)
    adapters = lora.init(jax.random.key(0), model=toy_files.MODEL, lora=RANK_2)
    adapters = jax.tree.map(
        lambda leaf: jax.random.normal(jax.random.key(1), leaf.shape) / 50, adapters
    )
    pretrained.save(
        tmp_path, adapters, start=start, base=base, lora=RANK_2, name="theirs"
    )
    exact = lora.merge(frozen.freeze(start.params).stored, adapters, lora=RANK_2)
    expected = np.asarray(exact["layers"]["mlp"]["up"]["kernel"])[0]
    merged = tensors_of(tmp_path / "model")["transformer.h.0.mlp.c_fc.weight"]
    assert merged.dtype.name == name
    np.testing.assert_array_equal(merged, expected.astype(name))
    file = tensors_of(tmp_path / "adapter", "adapter_model.safetensors")
    assert {tensor.dtype.name for tensor in file.values()} == {name}


@pytest.mark.slow
def test_adapters_that_do_not_fit_are_refused(tmp_path):
    base = frozen.freeze(toy_files.params())
    adapters = lora.init(jax.random.key(0), model=toy_files.MODEL, lora=RANK_2)
    adapters = jax.tree.map(lambda leaf: leaf + 1e5, adapters)
    with pytest.raises(InputError, match=r"float16: expected weights of at most 65504"):
        peft.save(
            tmp_path / "out",
            model=toy_files.MODEL,
            adapters=adapters,
            lora=RANK_2,
            base_fingerprint=frozen.source_fingerprint_of(base).root,
            dtype="float16",
        )
    assert list(tmp_path.iterdir()) == []


def test_a_model_that_is_there_stays_and_a_line_says_so(tmp_path, capsys):
    start = pretrained.load(str(checkpoint(tmp_path / "m", "bfloat16")))
    how = {"base": None, "lora": None, "name": "m"}
    pretrained.save(tmp_path, start.params, start=start, **how)
    pretrained.save(tmp_path, start.params, start=start, **how)
    assert capsys.readouterr().out == ""
    other = start._replace(save_dtype="float32")
    pretrained.save(tmp_path, start.params, start=other, **how)
    assert "stays as it is, in bfloat16; to write it in float32" in (
        capsys.readouterr().out
    )
    assert hf.stored_dtype(tmp_path / "model") == "bfloat16"


# Reward models.


def test_the_score_of_a_reward_model_is_not_rounded(tmp_path):
    params = rewards.init(jax.random.key(1), toy_files.params(), model=toy_files.MODEL)
    params["score"]["bias"] = jnp.float32(1 / 3)
    hf.save_reward(tmp_path / "out", toy_files.MODEL, params, dtype="bfloat16")
    dtypes = {name: x.dtype.name for name, x in tensors_of(tmp_path / "out").items()}
    assert dtypes.pop("score.weight") == "float32"
    assert set(dtypes.values()) == {"bfloat16"}
    assert config_of(tmp_path / "out")["dtype"] == "bfloat16"
    assert hf.stored_dtype(tmp_path / "out") == "bfloat16"
    _, again = hf.load_reward(tmp_path / "out", dtype="float32")
    np.testing.assert_array_equal(again["score"]["kernel"], params["score"]["kernel"])
    assert again["score"]["bias"] == np.float32(1 / 3)


@pytest.mark.cases(quick=1)
@pytest.mark.parametrize("name", hf.SAVE_DTYPES)
def test_what_is_normalised_is_what_is_saved(tmp_path, name):
    """Parameters before and after a save are equal to the bit."""
    params = rewards.init(jax.random.key(1), toy_files.params(), model=toy_files.MODEL)
    tiny = jnp.geomspace(1e-8, 1e-4, 16)  # subnormal numbers of float16
    params["trunk"]["final_norm"]["bias"] = tiny
    rounded = hf.rounded_reward(params, dtype=name)
    hf.save_reward(tmp_path / "out", toy_files.MODEL, params, dtype=name)
    _, read = hf.load_reward(tmp_path / "out", dtype="float32")
    for model_params in (rounded, read):  # without the rows that pad the vocabulary
        embed = model_params["trunk"]["embed"]
        embed["tokens"] = embed["tokens"][: toy_files.MODEL.vocab_size]
    chex.assert_trees_all_equal(rounded, read)
