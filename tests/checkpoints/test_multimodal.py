"""Language models of multimodal checkpoints that `transformers` wrote."""

import json
import shutil

import chex
import jax
import numpy as np
import pytest
from places import FIXTURES
from safetensors.numpy import load_file, save_file

from rlhf_jax import decoder, hf
from rlhf_jax.devices import sharding
from rlhf_jax.devices.mesh_shape import MeshShape
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.families import registry

# {checkpoint: the language model's name, architecture, and what is left out}
CHECKPOINTS = {
    "qwen3_5_multimodal": ("qwen3_5_text", "Qwen3_5ForCausalLM", "21 of visual"),
    "gemma3_multimodal": (
        *("gemma3_text", "Gemma3ForCausalLM"),
        "2 of multi_modal_projector, 21 of vision_tower",
    ),
    "gemma4_multimodal": (
        *("gemma4_text", "Gemma4ForCausalLM"),
        "1 of embed_vision, 15 of vision_tower",
    ),
}
for_each = pytest.mark.parametrize("name", CHECKPOINTS)


def texts(name):
    """(tokens, masks, logits), padded left and then right."""
    recorded = np.load(FIXTURES / name / "recorded.npz")
    return (
        np.concatenate([recorded[f"{side}_{what}"] for side in ("left", "right")])
        for what in ("tokens", "mask", "logits")
    )


def edited(tmp_path, name, *, tensors=None, drop=(), **options):
    folder = shutil.copytree(FIXTURES / name, tmp_path / "edited")
    config = json.loads((folder / "config.json").read_text()) | options
    for option in drop:
        del config[option]
    (folder / "config.json").write_text(json.dumps(config))
    if tensors is not None:
        file = folder / "model.safetensors"
        save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return folder


@pytest.mark.cases(quick=1)
@for_each
def test_logits_are_those_of_the_whole_model_without_images(name, capsys):
    model, params = hf.load(FIXTURES / name, dtype="float32")
    family, _, left_out = CHECKPOINTS[name]
    assert model.family == family
    assert model == hf.model_config(FIXTURES / name)
    (note,) = capsys.readouterr().err.splitlines()
    assert note.endswith(f"is read; tensors left out: {left_out}")
    tokens, mask, expected = texts(name)
    hidden = decoder.hidden_states(params, model=model, tokens=tokens, mask=mask)
    logits = np.asarray(decoder.logits(params, hidden, model=model))[mask]
    np.testing.assert_allclose(logits, expected, atol=1e-4)


@for_each
def test_what_is_saved_is_the_language_model_alone(tmp_path, name, capsys):
    model, params = hf.load(FIXTURES / name)
    hf.save(tmp_path / "out", model, params, stop_ids=hf.stop_ids(FIXTURES / name))
    capsys.readouterr()
    again, same = hf.load(tmp_path / "out")
    assert again == model
    chex.assert_trees_all_equal(params, same)
    assert not capsys.readouterr().err
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    family, architecture, _ = CHECKPOINTS[name]
    assert config["model_type"] == family
    assert config["architectures"] == [architecture]
    assert config["eos_token_id"] == 95
    assert config["tie_word_embeddings"] is True
    assert hf.stored_dtype(FIXTURES / name) == "bfloat16" == config["dtype"]


@for_each
def test_a_live_transformers_reads_the_language_model_that_we_save(tmp_path, name):
    """Extra `parity`: compares weights and logits of the model without its towers."""
    torch = pytest.importorskip("torch")
    import transformers

    model, params = hf.load(FIXTURES / name)
    hf.save(tmp_path / "out", model, params)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    read = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", **options
    )
    whole = transformers.AutoModelForImageTextToText.from_pretrained(
        FIXTURES / name, **options
    )
    assert type(read).__name__ == CHECKPOINTS[name][1]
    tensors = read.model.state_dict()
    expected = whole.model.language_model.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    tokens, mask, expected = texts(name)
    with torch.no_grad():
        logits = read.eval()(
            input_ids=torch.tensor(tokens, dtype=torch.long),
            attention_mask=torch.tensor(mask, dtype=torch.long),
            position_ids=torch.tensor(np.cumsum(mask, axis=1) - mask),
        ).logits
    np.testing.assert_allclose(logits.numpy()[mask], expected, atol=1e-5)


def test_the_mixture_of_gemma_4_is_read_as_it_is_published(tmp_path, capsys):
    """26B-A4B is multimodal, and in several files; devices read their own experts."""
    text = json.loads((FIXTURES / "gemma4_moe" / "config.json").read_text())
    config = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": text,
        "vision_config": {"model_type": "gemma4_vision"},
        "tie_word_embeddings": True,
    }
    tensors = load_file(FIXTURES / "gemma4_moe" / "model.safetensors")
    named = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in tensors.items()
    }
    named["model.vision_tower.weight"] = np.ones(2, np.float32)
    (tmp_path / "published").mkdir()
    (tmp_path / "published" / "config.json").write_text(json.dumps(config))
    save_file(named, tmp_path / "published" / "model.safetensors")
    model, params = hf.load(tmp_path / "published")
    assert "left out: 1 of vision_tower" in capsys.readouterr().err
    expected, same = hf.load(FIXTURES / "gemma4_moe")
    assert model == expected
    chex.assert_trees_all_equal(params, same)
    hf.save(tmp_path / "out", model, params, max_shard_bytes=30_000)
    assert len([*(tmp_path / "out").glob("*.safetensors")]) > 3
    mesh = MeshShape(data=2, expert=2, tensor=2).make()
    places = sharding.shardings(params, mesh=mesh)
    _, apart = hf.load(tmp_path / "out", sharding=places)
    gate = apart["layers"]["experts"]["gate"]["kernel"]
    assert gate.sharding.shard_shape(gate.shape) == (4, 4, 32, 6)
    chex.assert_trees_all_equal(jax.device_get(apart), jax.device_get(params))


def test_layers_that_predict_several_tokens_are_left_out_and_counted(tmp_path, capsys):
    more = {f"mtp.{name}.weight": np.ones((4, 4), np.float32) for name in ("fc", "a")}
    folder = edited(tmp_path, "qwen3_5_multimodal", tensors=more)
    _, params = hf.load(folder)
    assert "2 of mtp, 21 of visual" in capsys.readouterr().err
    chex.assert_trees_all_equal(params, hf.load(FIXTURES / "qwen3_5_multimodal")[1])


def test_options_beside_the_language_models_go_before_its_own(tmp_path):
    folder = edited(tmp_path, "qwen3_5_multimodal", eos_token_id=[94, 93])
    assert hf.stop_ids(folder) == (95,)  # of generation_config.json
    (folder / "generation_config.json").unlink()
    assert hf.stop_ids(folder) == (94, 93)
    shutil.rmtree(folder)
    # Its own, untied, asks for a head that is not there.
    untied = edited(tmp_path, "qwen3_5_multimodal", drop=["tie_word_embeddings"])
    with pytest.raises(InputError, match=r"missing: lm_head\.weight"):
        hf.load(untied)


def test_the_options_of_published_checkpoints(tmp_path):
    """Gemma 3 4B's config.json has few options, Qwen 3.5's three position axes."""
    gemma = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10_240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    }
    (tmp_path / "config.json").write_text(json.dumps(gemma))
    assert hf.model_config(tmp_path) == registry.KNOWN["gemma-3-4b"]
    assert hf.stored_dtype(tmp_path) == "bfloat16"
    assert hf.stop_ids(tmp_path) == (1, 106)
    shutil.rmtree(tmp_path)
    rope = {"mrope_interleaved": True, "mrope_section": [1, 1, 0]}
    config = json.loads((FIXTURES / "qwen3_5_multimodal/config.json").read_text())
    text = config["text_config"]
    text["rope_parameters"] |= rope
    folder = edited(tmp_path, "qwen3_5_multimodal", text_config=text)
    assert hf.model_config(folder) == hf.model_config(FIXTURES / "qwen3_5_multimodal")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_config": None}, r"a qwen3_5 with a vision tower \(vision_config\)"),
        ({"text_config": {"vocab_size": "97"}}, "vocab_size to be a whole number"),
        ({"model_type": "qwen3_vl"}, "a qwen3_vl with a vision tower"),
        (
            {"architectures": ["Qwen3_5ForSequenceClassification"]},
            "architecture Qwen3_5ForCausalLM, got Qwen3_5ForSequenceClassification",
        ),
    ],
)
def test_other_checkpoints_are_refused(tmp_path, options, message):
    folder = edited(tmp_path, "qwen3_5_multimodal", **options)
    with pytest.raises(InputError, match=message):
        hf.load(folder)


def test_a_tensor_of_no_known_part_is_refused(tmp_path):
    more = {"model.hearing.weight": np.ones(4, np.float32)}
    folder = edited(tmp_path, "gemma3_multimodal", tensors=more)
    with pytest.raises(InputError, match=r"unknown: model\.hearing\.weight \[4\]"):
        hf.load(folder)
