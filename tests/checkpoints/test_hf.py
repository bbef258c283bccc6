"""Checkpoints: recorded outputs of transformers, round trips, and bad input."""

import dataclasses
import functools
import json
import math
import shutil
import threading
import time
from pathlib import Path

import chex
import huggingface_hub
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizer_zoo
import toy_files
from huggingface_hub.errors import LocalEntryNotFoundError
from jax.sharding import NamedSharding, PartitionSpec
from places import FIXTURES
from safetensors.numpy import load_file, save_file

from rlhf_jax import config, decoder, hf, rewards
from rlhf_jax.checkpoints import shards
from rlhf_jax.data import hub, tokenization
from rlhf_jax.functional.checks import InputError, StopError
from rlhf_jax.models.families import gpt2, llama

CAUSAL = ("gpt2", "llama_sharded", "llama_bf16")
REWARD = ("gpt2_reward", "llama_reward")


@functools.partial(jax.jit, static_argnums=1)
def hidden_states(params, model, tokens, mask):
    return decoder.hidden_states(params, model=model, tokens=tokens, mask=mask)


def tensors_of(folder):
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def edited(tmp_path, name, *, options=None, tensors=None):
    """Copies a fixture with options of config.json or all tensors replaced."""
    folder = shutil.copytree(FIXTURES / name, tmp_path / "edited")
    if options is not None:
        file = folder / "config.json"
        merged = json.loads(file.read_text()) | options
        entries = {name: value for name, value in merged.items() if value is not ...}
        file.write_text(json.dumps(entries))
    if tensors is not None:
        for file in folder.glob("model*"):
            file.unlink()
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", CAUSAL)
def test_logits_are_those_of_transformers(name, side):
    model, params = hf.load(FIXTURES / name, dtype="float32")
    recorded = np.load(FIXTURES / name / "recorded.npz")
    mask = recorded[f"{side}_mask"]
    hidden = hidden_states(params, model, recorded[f"{side}_tokens"], mask)
    logits = np.asarray(decoder.logits(params, hidden, model=model))
    np.testing.assert_allclose(logits[mask], recorded[f"{side}_logits"], atol=1e-4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", REWARD)
def test_scores_are_those_of_transformers(name, side):
    model, params = hf.load_reward(FIXTURES / name)
    recorded = np.load(FIXTURES / name / "recorded.npz")
    mask = recorded[f"{side}_mask"]
    hidden = hidden_states(params["trunk"], model, recorded[f"{side}_tokens"], mask)
    scores = np.asarray(decoder.scores(params["score"], hidden))
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    np.testing.assert_allclose(
        scores[np.arange(len(mask)), last], recorded[f"{side}_scores"], atol=1e-4
    )


def test_gpt2_small_has_its_number_of_parameters():
    model = config.gpt2(
        vocab_size=50257,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        max_positions=1024,
    )
    init = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=model))
    leaves = {
        "/".join(entry.key for entry in path): leaf
        for path, leaf in jax.tree.leaves_with_path(init)
    }
    count = sum(
        math.prod(key.shape(leaves, model.vocab_size)) * len(key.names(model))
        for key in gpt2.key_table(model).keys
    )
    assert count == 124_439_808 == decoder.num_parameters(model)


@pytest.mark.parametrize("max_shard_bytes", [5_000_000_000, 30_000])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_saved_checkpoint_has_the_tensors_that_were_read(
    tmp_path, name, max_shard_bytes
):
    model, params = hf.load(FIXTURES / name)
    hf.save(tmp_path / "out", model, params, max_shard_bytes=max_shard_bytes)
    assert_same_tensors(tmp_path / "out", FIXTURES / name)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes > 30_000)
    again, same = hf.load(tmp_path / "out")
    assert again == model
    chex.assert_trees_all_equal(params, same)


@pytest.mark.parametrize("name", REWARD)
def test_a_saved_reward_model_has_the_tensors_that_were_read(tmp_path, name):
    model, params = hf.load_reward(FIXTURES / name)
    assert params["score"]["bias"] == 0
    params["score"]["bias"] = jnp.float32(-0.7)
    hf.save_reward(tmp_path / "out", model, params, pad_id=96)
    assert_same_tensors(tmp_path / "out", FIXTURES / name)
    again, same = hf.load_reward(tmp_path / "out")
    assert again == model
    assert same["score"]["bias"] == np.float32(-0.7)


def assert_same_tensors(folder, reference):
    saved, read = tensors_of(folder), tensors_of(reference)
    assert saved.keys() == read.keys()
    for name, tensor in read.items():
        assert saved[name].dtype == tensor.dtype
        np.testing.assert_array_equal(saved[name], tensor, err_msg=name)


@pytest.mark.parametrize("name", [*CAUSAL, *REWARD])
def test_every_option_of_a_saved_config_is_one_that_transformers_wrote(tmp_path, name):
    load, save = (
        (hf.load_reward, hf.save_reward) if name in REWARD else (hf.load, hf.save)
    )
    model, params = load(FIXTURES / name)
    save(tmp_path / "out", model, params, stop_ids=[95], pad_id=96)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    theirs = json.loads((FIXTURES / name / "config.json").read_text())
    # The older form, which transformers 4 reads as well.
    if model.family == "llama":
        rope = saved.pop("rope_scaling") | {"rope_theta": saved.pop("rope_theta")}
        assert rope == theirs["rope_parameters"]
    assert saved.pop("bos_token_id") is None
    assert saved.pop("torch_dtype") == theirs["dtype"]  # its older name
    assert saved == {option: theirs.get(option) for option in saved}


def test_the_tokenizer_gives_the_special_ids(tmp_path, shared_data):
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(
        shared_data / "gpt2-tokenizer"
    )
    model, params = hf.load(FIXTURES / "gpt2")
    hf.save(tmp_path / "out", model, params, tokenizer=tokenizer)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["eos_token_id"] == saved["bos_token_id"] == 50256
    assert saved["pad_token_id"] is None
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    text = "Hello, how are you doing today?"
    assert again(text)["input_ids"] == tokenizer(text)["input_ids"]
    hf.save(
        tmp_path / "chat", model, params, tokenizer=tokenizer, stop_ids=[5, 6], pad_id=7
    )
    assert hf.stop_ids(tmp_path / "chat") == (5, 6)


@pytest.mark.parametrize("side", ["left", "right"])
def test_transformers_scores_the_stop_token_of_a_tokenizer_that_pads_with_it(
    side, tmp_path, capsys
):
    import transformers

    tokenizer = toy_files.tokenizer()
    tokenizer.padding_side, tokenizer.pad_token = side, "<eos>"
    scorer = rewards.init(jax.random.key(1), toy_files.params(), model=toy_files.MODEL)
    hf.save_reward(tmp_path / "out", toy_files.MODEL, scorer, tokenizer=tokenizer)
    assert "padding of the saved reward model is <pad>" in capsys.readouterr().err
    assert tokenizer.pad_token == "<eos>"  # a copy was saved
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = [[5, 6, 1], [7, 1]]
    tokens = np.array(again.pad({"input_ids": texts})["input_ids"])
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    # The rule of `transformers.modeling_layers.GenericForSequenceClassification`.
    last = (np.arange(3) * (tokens != saved["pad_token_id"])).argmax(-1)
    assert list(last) == ([2, 2] if side == "left" else [2, 1])
    assert [row[i] for row, i in zip(tokens, last, strict=True)] == [1, 1]


def test_a_reward_model_without_a_token_to_pad_with_has_no_padding(tmp_path):
    trait = tokenizer_zoo.zoo()["EOS is padding"]
    scorer = rewards.init(jax.random.key(1), toy_files.params(), model=toy_files.MODEL)
    hf.save_reward(tmp_path / "out", toy_files.MODEL, scorer, tokenizer=trait.tokenizer)
    saved = json.loads((tmp_path / "out" / "config.json").read_text())
    assert saved["eos_token_id"] == trait.stop_ids[0]
    assert saved["pad_token_id"] is None  # transformers refuses batches


def test_dtype_and_sharding_of_what_is_read():
    mesh = jax.make_mesh(
        (4,),
        ("model",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:4],
    )
    rows = NamedSharding(mesh, PartitionSpec("model"))
    replicated = NamedSharding(mesh, PartitionSpec())
    folder = FIXTURES / "llama_bf16"
    _, plain = hf.load(folder)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(plain)} == {"bfloat16"}
    _, sharded = hf.load(
        folder,
        dtype="float32",
        sharding={"embed": rows, "layers": replicated, "final_norm": None},
    )
    assert {leaf.dtype.name for leaf in jax.tree.leaves(sharded)} == {"float32"}
    assert sharded["embed"]["tokens"].sharding == rows
    assert sharded["layers"]["mlp"]["up"]["kernel"].sharding == replicated
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, np.asarray(b, np.float32)),
        sharded,
        plain,
    )
    with pytest.raises(TypeError, match="expected a float dtype for parameters"):
        hf.load(folder, dtype="int8")


def test_rows_of_vocabulary_padding_are_zero():
    model, params = hf.load(FIXTURES / "gpt2")
    tokens = np.asarray(params["embed"]["tokens"])
    assert tokens.shape == (128, 32)
    assert not tokens[model.vocab_size :].any()
    assert tokens[: model.vocab_size].any(axis=1).all()


def test_the_unprefixed_names_of_the_first_gpt2_load(tmp_path):
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in tensors_of(FIXTURES / "gpt2").items()
    }
    mask = np.tril(np.ones((1, 1, 48, 48), np.uint8))
    tensors |= {f"h.{layer}.attn.bias": mask for layer in range(2)}
    _, params = hf.load(edited(tmp_path, "gpt2", tensors=tensors))
    _, expected = hf.load(FIXTURES / "gpt2")
    chex.assert_trees_all_equal(params, expected)


def test_a_tied_head_and_derived_buffers_are_ignored(tmp_path):
    tensors = tensors_of(FIXTURES / "llama_bf16")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"
        tensors[name] = np.ones(6, np.float32)
    _, params = hf.load(edited(tmp_path, "llama_bf16", tensors=tensors))
    _, expected = hf.load(FIXTURES / "llama_bf16")
    chex.assert_trees_all_equal(params, expected)


LLAMA = json.loads((FIXTURES / "llama_sharded" / "config.json").read_text())


def test_both_forms_of_rope_options_are_read():
    older = dict(LLAMA)
    scaling = dict(older.pop("rope_parameters"))
    older |= {"rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}
    expected = config.RopeScaling("llama3", 4.0, 0.2, 1.2, 8)
    for form in (LLAMA, older):
        model = llama.config_from_hf(form)
        assert (model.rope_theta, model.rope_scaling) == (500.0, expected)
    oldest = older | {"rope_scaling": {"type": "linear", "factor": 3}}
    assert llama.config_from_hf(oldest).rope_scaling == config.RopeScaling(
        "linear", 3.0
    )
    unscaled = older | {"rope_scaling": None}
    assert llama.config_from_hf(unscaled).rope_scaling is None
    without = older | {"rope_theta": None}
    assert llama.config_from_hf(without).rope_theta == 10_000


def test_stop_ids_prefer_the_generation_config(tmp_path):
    folder = edited(tmp_path, "gpt2", options={"eos_token_id": 3})
    assert hf.stop_ids(folder) == (95,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [4, 5]}')
    assert hf.stop_ids(folder) == (4, 5)
    (folder / "generation_config.json").unlink()
    assert hf.stop_ids(folder) == (3,)
    none = edited(tmp_path / "none", "gpt2_reward", options={"eos_token_id": None})
    assert hf.stop_ids(none) == ()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_l"),
        ("gpt2", {"reorder_and_upcast_attn": True}, "expected reorder_and_upcast_attn"),
        ("gpt2", {"scale_attn_weights": False}, "expected scale_attn_weights = True"),
        ("gpt2", {"add_cross_attention": True}, "expected add_cross_attention = False"),
        ("gpt2", {"activation_function": "relu"}, "activation_function to be one of"),
        ("gpt2", {"n_embd": ...}, "expected a value for 'n_embd', got none"),
        (
            "gpt2",
            {"model_type": "mamba"},
            "model_type to be one of gpt2, gpt_neox, llama, ",
        ),
        ("gpt2", {"architectures": ["GPT2DoubleHeadsModel"]}, "it is not supported"),
        ("gpt2_reward", {}, "read it with hf.load_reward"),
        ("llama_bf16", {"hidden_act": "relu"}, "expected hidden_act to be one of"),
        ("llama_bf16", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 1.0"),
        ("llama_bf16", {"rope_scaling": {"type": "dynamic"}}, "or yarn, got 'dyn"),
        (
            "llama_bf16",
            {"rope_scaling": {"type": "linear"}},
            "expected a value for 'fa",
        ),
    ],
)
def test_an_unsupported_option_is_named(tmp_path, name, options, message):
    folder = edited(tmp_path, name, options=options)
    with pytest.raises(InputError, match=message) as error:
        hf.load(folder)
    assert str(folder) in str(error.value)


def test_a_reward_model_has_one_label(tmp_path):
    folder = edited(tmp_path, "gpt2_reward", options={"id2label": {"0": "a", "1": "b"}})
    with pytest.raises(InputError, match=r"expected num_labels = 1 .* got 2"):
        hf.load_reward(folder)
    with pytest.raises(
        InputError, match=r"got GPT2LMHeadModel; train one .* read it with hf\.load$"
    ):
        hf.load_reward(FIXTURES / "gpt2")


def test_every_missing_unknown_and_misshapen_tensor_is_named(tmp_path):
    tensors = tensors_of(FIXTURES / "gpt2")
    del tensors["transformer.h.1.ln_2.bias"]
    tensors["transformer.h.2.ln_2.bias"] = np.zeros(32, np.float32)
    tensors["transformer.h.0.attn.c_attn.weight"] = np.zeros((96, 32), np.float32)
    tensors["transformer.h.0.mlp.c_fc.bias"] = np.zeros(48, np.int8)
    with pytest.raises(InputError) as error:
        hf.load(edited(tmp_path, "gpt2", tensors=tensors))
    lines = str(error.value).split("\n  ")
    assert "do config.json and the weights belong together?" in lines[0]
    assert set(lines[1:]) == {
        "missing: transformer.h.1.ln_2.bias",
        "unknown: transformer.h.2.ln_2.bias [32]",
        "misshapen: transformer.h.0.attn.c_attn.weight, "
        "expected [32, 96], got [96, 32]",
        "misshapen: transformer.h.0.mlp.c_fc.bias, expected F32, F16, BF16, got I8",
    }


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("devices", [1, 4])
def test_weights_that_are_not_finite_are_named(tmp_path, dtype, devices):
    """They are named by tensor and file, and counted once for any split into leaves."""
    tensors = tensors_of(FIXTURES / "gpt2")
    embedding, fused = "transformer.wte.weight", "transformer.h.1.attn.c_attn.weight"
    tensors[embedding][[3, 90], [0, 31]] = np.nan
    tensors[fused][[0, 0, 31], [0, 95, 40]] = [np.nan, np.inf, -np.inf]
    cast = {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in tensors.items()}
    mesh = jax.sharding.Mesh(jax.devices()[:devices], ("model",))
    rows = NamedSharding(mesh, PartitionSpec("model"))
    replicated = NamedSharding(mesh, PartitionSpec())
    with pytest.raises(
        InputError, match=r"checkpoint .*: expected finite wei"
    ) as error:
        hf.load(
            edited(tmp_path, "gpt2", tensors=cast),
            dtype="float32",
            sharding={"embed": rows, "layers": replicated, "final_norm": None},
        )
    assert str(error.value).splitlines()[1:-1] == [
        f"  {fused} in model.safetensors: 1 NaN and 2 infinite of 3072 entries",
        f"  {embedding} in model.safetensors: 2 NaN and 0 infinite of 3104 entries",
    ]


def test_a_shard_with_weights_that_are_not_finite_is_named(tmp_path):
    folder = shutil.copytree(FIXTURES / "llama_sharded", tmp_path / "edited")
    shard = folder / "model-00004-of-00004.safetensors"
    tensors = load_file(shard)
    tensors["lm_head.weight"][:] = -np.inf
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(InputError, match=f"lm_head.weight in {shard.name}: 0 NaN and "):
        hf.load(folder)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_largest_weights_are_finite_and_what_is_ignored_is_not_looked_at(
    tmp_path, dtype
):
    tensors = tensors_of(FIXTURES / "gpt2")
    largest = float(jnp.finfo(dtype).max)
    tensors["transformer.wpe.weight"][:] = [[largest, -largest] * 16]
    tensors["transformer.h.0.attn.bias"] = np.full((4, 4), np.nan, np.float32)
    cast = {name: tensor.astype(jnp.dtype(dtype)) for name, tensor in tensors.items()}
    _, params = hf.load(edited(tmp_path, "gpt2", tensors=cast))
    assert float(params["embed"]["positions"][5, 1]) == -largest


def test_a_reward_model_s_score_is_finite(tmp_path):
    tensors = tensors_of(FIXTURES / "gpt2_reward")
    tensors["score.weight"][0, 7] = np.nan
    folder = edited(tmp_path, "gpt2_reward", tensors=tensors)
    with pytest.raises(
        InputError, match=r"score.weight in .*: 1 NaN and 0 .* of 32 en"
    ):
        hf.load_reward(folder)
    shutil.rmtree(folder)
    for bias in (math.inf, 1e39):  # the second is infinite in float32
        folder = edited(tmp_path, "gpt2_reward", options={"score_bias": bias})
        message = r"config\.json: expected score_bias to be a finite number, got "
        with pytest.raises(InputError, match=message):
            hf.load_reward(folder)
        shutil.rmtree(folder)


def test_a_vocabulary_that_is_not_the_embedding_s_is_named(tmp_path):
    with pytest.raises(InputError, match=r"expected \[90, 32\], got \[97, 32\] \(rows"):
        hf.load(edited(tmp_path, "gpt2", options={"vocab_size": 90}))


def test_damaged_folders(tmp_path):
    folder = shutil.copytree(FIXTURES / "llama_sharded", tmp_path / "damaged")
    shard = folder / "model-00002-of-00004.safetensors"
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(
        InputError, match=r"expected safetensors in model-00002-of.*trunc"
    ):
        hf.load(folder)
    shard.unlink()
    with pytest.raises(InputError, match=r"none of .'model-00002-of-00004.safetensors"):
        hf.load(folder)
    shard.mkdir()
    with pytest.raises(InputError, match=r"expected model-00002-of.*to be readable"):
        hf.load(folder)
    shard.rmdir()
    index = folder / "model.safetensors.index.json"
    for written in ("{}", '{"weight_map": ["a"]}', '{"weight_map": {"a": 3}}'):
        index.write_text(written)
        with pytest.raises(InputError, match=r"expected a weight_map .*fetch it again"):
            hf.load(folder)
    for file in folder.glob("model*"):
        file.unlink()
    (folder / "pytorch_model.bin").touch()
    with pytest.raises(InputError, match=r"to convert a pytorch_model.bin"):
        hf.load(folder)
    (folder / "config.json").write_text("[1, 2]")
    with pytest.raises(
        InputError, match=r"config.json: expected a JSON object, got list .1, 2"
    ):
        hf.load(folder)
    (folder / "config.json").write_text('{"model_type": ')
    with pytest.raises(
        InputError, match=r"config\.json: expected a JSON object, got .*Expecting"
    ):
        hf.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(InputError, match=r"expected config\.json, got a folder with"):
        hf.stop_ids(folder)


def test_what_is_neither_folder_nor_on_the_hub(tmp_path, monkeypatch):
    def offline(repo_id, **_):
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.chdir(tmp_path)  # where there is no folder of that name
    with pytest.raises(InputError, match=r"'runs/sft'; .* the hub says: no connection"):
        hf.load("runs/sft")
    with pytest.raises(InputError, match=r"there is no such folder; correct it$"):
        hf.load(tmp_path / "missing")


def test_a_hub_id_is_downloaded(monkeypatch):
    repo_ids = []

    def snapshot_download(repo_id, *, allow_patterns):
        repo_ids.append(repo_id)
        assert "pytorch_model.bin" not in allow_patterns
        return str(FIXTURES / "gpt2")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    model, _ = hf.load("owner/tiny")
    assert (set(repo_ids), model.hidden_size) == ({"owner/tiny"}, 32)


def test_a_folder_in_use_is_not_touched(tmp_path):
    model, params = hf.load(FIXTURES / "gpt2")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "notes.txt").write_text("mine")
    for path in (tmp_path / "used", tmp_path / "used" / "notes.txt"):
        with pytest.raises(InputError, match=r"new or empty folder .* is in use"):
            hf.save(path, model, params)
    assert [file.name for file in tmp_path.rglob("*")] == ["used", "notes.txt"]
    (tmp_path / "empty").mkdir()
    hf.save(tmp_path / "empty", model, params)
    assert (tmp_path / "empty" / "model.safetensors").exists()


def test_a_save_leaves_all_or_nothing(tmp_path, monkeypatch):
    model, params = hf.load(FIXTURES / "gpt2")
    killed = tmp_path / ".out.partial"
    killed.mkdir()
    (killed / "3.shard").touch()
    hf.save(tmp_path / "out", model, params)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "config.json",
        "model.safetensors",
    }

    def full(*_, **__):
        raise OSError("No space left on device")

    monkeypatch.setattr(shards, "save_file", full)
    with pytest.raises(StopError, match="No space left"):
        hf.save(tmp_path / "second", model, params)
    assert list(tmp_path.iterdir()) == [tmp_path / "out"]


def test_only_the_model_s_own_parameters_are_saved(tmp_path):
    model, params = hf.load(FIXTURES / "gpt2")
    del params["final_norm"]["bias"]
    params["adapter"] = {"kernel": jnp.zeros((3,))}
    params["embed"]["tokens"] = params["embed"]["tokens"][:97]
    with pytest.raises(InputError) as error:
        hf.save(tmp_path / "out", model, params)
    assert set(str(error.value).split("\n  ")[1:]) == {
        "missing: final_norm/bias",
        "unknown: adapter/kernel [3]",
        "misshapen: embed/tokens, expected [128, 32], got [97, 32]",
    }
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "changes", [{"positions": "rope"}, {"norm": "rmsnorm"}, {"num_kv_heads": 2}]
)
def test_a_model_that_the_config_cannot_express_is_not_saved(tmp_path, changes):
    tiny = config.gpt2(
        vocab_size=97, hidden_size=32, num_layers=1, num_heads=4, max_positions=16
    )
    model = dataclasses.replace(tiny, **changes)
    shapes = jax.eval_shape(lambda: decoder.init(jax.random.key(0), model=model))
    params = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    field, value = next(iter(changes.items()))
    with pytest.raises(InputError, match=f"config.json of gpt2 .* {field} = {value!r}"):
        hf.save(tmp_path / "out", model, params)


def test_how_a_model_runs_is_no_part_of_its_checkpoint(tmp_path):
    model, params = hf.load(FIXTURES / "gpt2")
    how = {"dtype": "bfloat16", "remat": "full", "unroll": True, "transposed_rows": 4}
    ran = dataclasses.replace(model, **how, attention="cudnn")
    assert ran == model.run_as(ran) != model == ran.run_as(model)
    hf.save(tmp_path / "out", ran, params)
    assert hf.load(tmp_path / "out")[0] == model


@pytest.mark.parametrize("name", [*CAUSAL, *REWARD])
def test_transformers_computes_the_same_from_what_we_save(tmp_path, name):
    torch = pytest.importorskip("torch")
    import transformers

    recorded = np.load(FIXTURES / name / "recorded.npz")
    tokens, mask = recorded["left_tokens"], recorded["left_mask"]
    if name in REWARD:
        model, params = hf.load_reward(FIXTURES / name)
        params["score"]["bias"] = jnp.float32(0.5)  # which theirs cannot hold
        hf.save_reward(tmp_path / "out", model, params, pad_id=96)
        auto, expected = (
            transformers.AutoModelForSequenceClassification,
            recorded["left_scores"],
        )
    else:
        model, params = hf.load(FIXTURES / name)
        hf.save(tmp_path / "out", model, params, max_shard_bytes=30_000)
        auto, expected = transformers.AutoModelForCausalLM, recorded["left_logits"]
    theirs, info = auto.from_pretrained(
        tmp_path / "out", dtype=torch.float32, output_loading_info=True
    )
    assert not any(info.values()), info
    with torch.no_grad():
        logits = theirs(
            input_ids=torch.tensor(tokens, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            position_ids=torch.tensor(np.cumsum(mask, axis=1) - mask),
        ).logits.numpy()
    got = logits[:, 0] if name in REWARD else logits[mask]
    np.testing.assert_allclose(got, expected, atol=1e-4)


BILLION = 1_000_000_000


@pytest.mark.cases(quick=8)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_layer": BILLION}, "expected n_layer to be a whole number from 1 to 10000"),
        ({"n_layer": 10_000}, "a number of layers that .* got 10000; do config.json"),
        ({"n_embd": BILLION}, "misshapen: transformer.wte.weight, expected"),
        ({"n_embd": 2**31 - 1, "n_head": 1}, "misshapen: transformer.wte.weight"),
        ({"n_positions": BILLION}, r"misshapen: transformer.wpe.weight, expected \[10"),
        ({"vocab_size": BILLION}, "vocab_size disagrees"),
        ({"n_inner": BILLION}, "misshapen: transformer.h.0.mlp.c_fc.weight"),
        ({"vocab_size": 10**400}, "vocab_size to be a whole number .* more than 30"),
        ({"n_embd": "32"}, "expected n_embd to be a whole number .* got '32'; correct"),
        ({"n_head": True}, "expected n_head to be a whole number .* got True"),
        ({"n_embd": 32.5}, "expected n_embd to be a whole number .* got 32.5"),
        ({"layer_norm_epsilon": "x"}, "layer_norm_epsilon to be a finite number above"),
        ({"layer_norm_epsilon": math.nan}, "layer_norm_epsilon to be .* got nan"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings to be true or false"),
        ({"activation_function": ["gelu"]}, "activation_function to be a text, got"),
        ({"model_type": ["gpt2"]}, "expected model_type to be a text, got"),
        ({"architectures": "GPT2LMHeadModel"}, "architectures to be a list of texts"),
        ({"rope_scaling": [1]}, "expected rope_scaling to be an object, got"),
        ({"rope_scaling": {"factor": "8"}}, "rope_scaling.factor to be a finite numb"),
    ],
)
def test_sizes_and_types_that_no_checkpoint_has(tmp_path, options, message):
    started = time.perf_counter()
    with pytest.raises(InputError, match=message) as got:
        hf.load(edited(tmp_path, "gpt2", options=options))
    assert time.perf_counter() - started < 20
    assert len(str(got.value)) < 20_000


@pytest.mark.parametrize("eos", ["2", [2, "3"], 2.0, True, 10**12, {"id": 2}])
def test_a_stop_id_is_a_whole_number(tmp_path, eos):
    folder = edited(tmp_path, "gpt2", options={"eos_token_id": eos})
    (folder / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(InputError, match="expected eos_token_id to be a token id, or"):
        hf.stop_ids(folder)


@pytest.mark.parametrize("how", ["above", "absolute", "link", "missing", "nul", "dot"])
def test_an_index_names_files_of_its_own_folder(tmp_path, how):
    folder = edited(tmp_path, "llama_sharded")
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    first = min(weight_map.values())
    outside = Path(shutil.move(folder / first, tmp_path / "outside.safetensors"))
    name = {
        "above": "../outside.safetensors",
        "absolute": str(outside),
        "nul": "a\0b",
        "dot": ".",
    }.get(how, first)
    if how == "link":
        (folder / first).symlink_to(outside)
    renamed = {t: name if file == first else file for t, file in weight_map.items()}
    index.write_text(json.dumps({"weight_map": renamed}))
    message = "got none of" if how == "missing" else "which leads out of it; put the"
    with pytest.raises(InputError, match=message):
        hf.load(folder)
    # As the hub's cache has it: a link to a blob beside the snapshots.
    cache = tmp_path / "models--owner--name"
    snapshot, blobs = cache / "snapshots" / "1234", cache / "blobs"
    shutil.copytree(FIXTURES / "llama_sharded", snapshot)
    blobs.mkdir()
    shutil.move(snapshot / first, blobs / "5678")
    (snapshot / first).symlink_to("../../blobs/5678")
    model, _ = hf.load(snapshot)
    assert model.family == "llama"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./gpt2", "looks like a path, and there is no such folder"),
        ("a/b/c", "looks like a path"),
        ("a" * 300, "got 'aaa"),
        ("a\0b", "looks like a path"),
        (__file__, "which is a file; give the folder that holds it"),
    ],
)
def test_a_name_that_is_a_path_is_told_so(monkeypatch, name, message):
    def offline(repo_id, **_):
        raise LocalEntryNotFoundError("no connection\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    for load in (hf.load, tokenization.load_tokenizer):
        with pytest.raises(InputError, match=message) as got:
            load(name)
        assert "\n" not in str(got.value)
        assert len(str(got.value)) < 500


def test_a_name_without_an_owner_is_refused_first(monkeypatch, tmp_path):
    """Except the hub's old models with such names, and names in the local cache."""
    asked, cached = [], {}

    def offline(repo_id, **_):
        asked.append(repo_id)
        raise LocalEntryNotFoundError("Got: ConnectError: no route")

    def from_cache(repo_id, file):
        return cached.get((repo_id, file))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", from_cache)
    monkeypatch.chdir(tmp_path)
    for load in (hf.load, tokenization.load_tokenizer):
        with pytest.raises(InputError) as error:
            load("nofolder")
        assert str(error.value) == (
            "expected a folder with a checkpoint or a hub id, got 'nofolder'; there is "
            f"no such folder in {tmp_path}, and no OWNER/ of the hub; correct the path"
        )
    assert asked == []
    cached["old", "config.json"] = "a path"
    for name in ("old", "gpt2-large", "owner/model"):
        with pytest.raises(InputError) as error:
            hf.load(name)
        assert asked.pop() == name
        assert str(error.value).endswith(
            "the hub says: ConnectError: no route; correct the name, or see to the "
            "network"
        )


def test_a_hub_that_does_not_answer_is_not_waited_for(monkeypatch):
    answered = threading.Event()
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda *_, **__: answered.wait()
    )
    monkeypatch.setattr(hub, "SECONDS", 0.1)
    started = time.perf_counter()
    for load in (hf.load, tokenization.load_tokenizer):
        with pytest.raises(InputError, match=r"the hub says: no answer in 0.1 s; is "):
            load("owner/mistyped")
    assert time.perf_counter() - started < 5
    answered.set()
