"""The families beside GPT-2 and Llama, against recorded outputs of `transformers`."""

import dataclasses
import functools
import json
import math
import shutil

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from places import FIXTURES
from safetensors.numpy import load_file, save_file
from tiers import one_in

from rlhf_jax import decode, decoder, frozen, hf, lora
from rlhf_jax.checkpoints import mapping, peft
from rlhf_jax.functional.checks import InputError
from rlhf_jax.models.config import GlobalHeads, RopeScaling
from rlhf_jax.models.families import keys, registry
from rlhf_jax.models.generation.sampling import Shaping

NAMES = (
    *("qwen2", "qwen3", "mistral", "gpt_neox", "gemma2", "gemma3", "gemma4"),
    *("phi3", "gemma4_e2b", "gemma4_moe"),
    *("olmo2", "olmo3", "smollm3", "granite", "granite4", "qwen3_5"),
    *("qwen3_moe", "mixtral", "gpt_oss"),
)
# transformers has no score for Granite and Gemma 4.
REWARDS = tuple(name for name in NAMES if not name.startswith(("granite", "gemma4")))
# Attention beside the MLP; windows, scales and two wavelengths. What each family's
# logits are is told for all, and decoding reads the same options.
STATIC = ("model", "max_new_tokens", "stop_ids", "shaping")
generate = jax.jit(decode.generate, static_argnames=STATIC)
for_each_family = pytest.mark.parametrize("name", NAMES)


@functools.cache
def loaded(name):
    return hf.load(FIXTURES / name, dtype="float32")


@functools.partial(jax.jit, static_argnames="model")
def hidden_of(trunk, *, model, tokens, mask):
    return decoder.hidden_states(trunk, model=model, tokens=tokens, mask=mask)


def hidden_and_recorded(params, *, model, folder):
    """(hidden states of the texts padded left and then right, mask, record).

    One program serves a language model and a reward model of the same shape.
    """
    recorded = np.load(folder / "recorded.npz")
    tokens, mask = (
        np.concatenate([recorded[f"{side}_{what}"] for side in ("left", "right")])
        for what in ("tokens", "mask")
    )
    trunk = {name: params[name] for name in ("embed", "layers", "final_norm")}
    return hidden_of(trunk, model=model, tokens=tokens, mask=mask), mask, recorded


def options_of(name):
    return json.loads((FIXTURES / name / "config.json").read_text())


def model_of(options):
    return hf.FAMILIES[options["model_type"]].config_from_hf(options)


def edited(tmp_path, name, *, options=None, tensors=None):
    """Copies a fixture with options and tensors added or replaced."""
    folder = shutil.copytree(FIXTURES / name, tmp_path / "edited")
    (folder / "config.json").write_text(json.dumps(options_of(name) | (options or {})))
    if tensors is not None:
        file = folder / "model.safetensors"
        save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return folder


@for_each_family
def test_logits_are_those_of_transformers(name):
    model, params = loaded(name)
    hidden, mask, recorded = hidden_and_recorded(
        params, model=model, folder=FIXTURES / name
    )
    logits = np.asarray(decoder.logits(params, hidden, model=model))[mask]
    expected = [recorded[f"{side}_logits"] for side in ("left", "right")]
    np.testing.assert_allclose(logits, np.concatenate(expected), atol=1e-4)


@pytest.mark.parametrize("name", REWARDS)
def test_scores_are_those_of_transformers(name):
    folder = FIXTURES / f"{name}_reward"
    model, params = hf.load_reward(folder, dtype="float32")
    hidden, mask, recorded = hidden_and_recorded(
        params["trunk"], model=model, folder=folder
    )
    scores = np.asarray(decoder.scores(params["score"], hidden))
    last = mask.shape[1] - 1 - np.argmax(mask[:, ::-1], axis=1)
    expected = [recorded[f"{side}_scores"] for side in ("left", "right")]
    np.testing.assert_allclose(
        scores[np.arange(len(mask)), last], np.concatenate(expected), atol=1e-4
    )


@pytest.mark.cases(slow=3)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_greedy_decoding_is_that_of_transformers_far_past_the_window(name):
    model, params = loaded(name)
    recorded = np.load(FIXTURES / name / "recorded.npz")
    tokens, continuation = recorded["left_tokens"], recorded["continuation"]
    rows = np.arange(len(tokens), dtype=np.int32)
    samples = generate(
        params,
        model=model,
        tokens=tokens,
        mask=recorded["left_mask"],
        keys=decode.row_keys(jax.random.key(0), index=rows, sample=rows),
        max_new_tokens=continuation.shape[1],
        stop_ids=(),
        shaping=Shaping(greedy=True),
    )
    np.testing.assert_array_equal(samples.tokens[:, tokens.shape[1] :], continuation)


@pytest.mark.parametrize(
    "name", one_in(2, [*NAMES, *(f"{name}_reward" for name in REWARDS)])
)
def test_what_is_saved_is_what_was_read_and_transformers_reads_its_config(
    tmp_path, name
):
    import transformers

    reward = name.endswith("_reward")
    load, save = (hf.load_reward, hf.save_reward) if reward else (hf.load, hf.save)
    model, params = load(FIXTURES / name)
    save(tmp_path / "out", model, params, stop_ids=[95], pad_id=96)
    saved = load_file(tmp_path / "out" / "model.safetensors")
    read = load_file(FIXTURES / name / "model.safetensors")
    assert saved.keys() == read.keys()
    for tensor, values in read.items():
        assert saved[tensor].dtype == values.dtype
        np.testing.assert_array_equal(saved[tensor], values, err_msg=tensor)
    again, same = load(tmp_path / "out")
    assert again == model
    chex.assert_trees_all_equal(params, same)

    ours, theirs = (
        transformers.AutoConfig.from_pretrained(folder).to_dict()
        for folder in (tmp_path / "out", FIXTURES / name)
    )
    # Of layers that layer_types name; which token begins a text is not of a model.
    for option in ("max_window_layers", "bos_token_id", "_name_or_path"):
        assert (option in ours) == (option in theirs)
        ours.pop(option, None), theirs.pop(option, None)
    # Yarn's defaults are written out.
    rope = ours.pop("rope_parameters")
    assert rope == rope | theirs.pop("rope_parameters")
    assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
def test_a_live_transformers_reads_what_we_save_to_the_bit(tmp_path, name):
    """Extra `parity`: compares weights, and logits of texts padded on either side."""
    torch = pytest.importorskip("torch")
    import transformers

    model, params = hf.load(FIXTURES / name)
    hf.save(tmp_path / "out", model, params, max_shard_bytes=30_000)
    ours, theirs = (
        transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        for folder in (tmp_path / "out", FIXTURES / name)
    )
    tensors, expected = ours.state_dict(), theirs.state_dict()
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[key], expected[key]) for key in expected)
    hidden, mask, recorded = hidden_and_recorded(
        loaded(name)[1], model=model, folder=FIXTURES / name
    )
    mine = np.asarray(decoder.logits(loaded(name)[1], hidden, model=model))
    tokens = [recorded[f"{side}_tokens"] for side in ("left", "right")]
    inputs = {
        "input_ids": torch.tensor(np.concatenate(tokens), dtype=torch.long),
        "attention_mask": torch.tensor(mask, dtype=torch.long),
        "position_ids": torch.tensor(np.cumsum(mask, axis=1) - mask),
    }
    with torch.no_grad():
        live, same = (m(**inputs).logits.numpy()[mask] for m in (theirs, ours))
    np.testing.assert_array_equal(same, live)
    np.testing.assert_allclose(mine[mask], live, atol=1e-4)
    print(f"{name}: {np.abs(mine[mask] - live).max():.1e}")


class Counting:
    """A tensor that counts the slices read from it."""

    def __init__(self, values):
        self.values, self.count = values, 0

    def __getitem__(self, window):
        part = self.values[window]
        self.count += part.size
        return part


@pytest.mark.parametrize("layout", ["transposed", "same"])
def test_leaves_that_take_turns_by_head_are_read_and_written_in_part(layout):
    """Three leaves of 4 heads of 2 columns in one tensor: q0 k0 v0 q1 k1 v1 ..."""
    fused = np.arange(24 * 5, dtype=np.float32).reshape(24, 5)  # [4 · 3 · 2, in]
    # Row (head, leaf, column) of theirs is column (head, column) of the leaf.
    expected = np.einsum("hnci->nihc", fused.reshape(4, 3, 2, 5)).reshape(3, 5, 8)
    if layout == "same":  # a bias
        fused, expected = fused[:, 0], expected[:, 0]
    key = keys.Key("qkv", ("query", "key", "value"), layout, head_dim=2)
    table = keys.Table("", (key,))
    leaves = dict(zip(key.paths, expected, strict=True))
    model = model_of(options_of("gpt_neox"))
    assert key.shape(leaves, 97) == fused.shape
    counting = Counting(fused)
    header = {"qkv": mapping.Header(fused.shape, "F32")}
    for path, unread in mapping.read(
        table,
        model=model,
        leaves=leaves,
        headers=header,
        read=lambda _, window: counting[window],
        dtype=None,
    ):
        for columns in (slice(None), slice(3, 7), slice(2, 3), slice(4, 4)):
            counting.count = 0
            index = (slice(1, 4), columns)[-expected[0].ndim :]
            part = unread[index]
            np.testing.assert_array_equal(part, leaves[path][index])
            assert counting.count == part.size
    ((_, written),) = mapping.write(table, model=model, leaves=leaves)
    np.testing.assert_array_equal(written, fused)


def test_fused_heads_are_read_onto_a_mesh_and_without_the_prefix(tmp_path):
    mesh = jax.make_mesh(
        (4,),
        ("model",),
        axis_types=(jax.sharding.AxisType.Auto,),
        devices=jax.devices()[:4],
    )
    _, expected = hf.load(FIXTURES / "gpt_neox")
    by_columns = {
        path: NamedSharding(mesh, PartitionSpec(*(None,) * (leaf.ndim - 1), "model"))
        for path, leaf in jax.tree.leaves_with_path(expected["layers"]["attention"])
    }
    attention = jax.tree.map_with_path(
        lambda path, _: by_columns[path], expected["layers"]["attention"]
    )
    everywhere = NamedSharding(mesh, PartitionSpec())
    rest = {"attention_norm": everywhere, "mlp_norm": everywhere, "mlp": everywhere}
    _, sharded = hf.load(
        FIXTURES / "gpt_neox",
        sharding={
            "embed": None,
            "head": None,
            "final_norm": None,
            "layers": {"attention": attention, **rest},
        },
    )
    chex.assert_trees_all_equal(sharded, expected)

    folder = edited(tmp_path, "gpt_neox")
    tensors = {
        name.removeprefix("gpt_neox."): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
    }
    for layer in range(3):
        buffers = f"layers.{layer}.attention."
        tensors[f"{buffers}bias"] = np.ones((1, 1, 48, 48), bool)
        tensors[f"{buffers}masked_bias"] = np.float32(-1e9)[None]
        tensors[f"{buffers}rotary_emb.inv_freq"] = np.ones(3, np.float32)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _, bare = hf.load(folder)
    chex.assert_trees_all_equal(bare, expected)


@pytest.mark.slow
@pytest.mark.parametrize("name", one_in(2, ["phi3", "gpt_neox", "qwen3_5"]))
def test_adapters_of_fused_layers_are_written_where_the_layers_are(tmp_path, name):
    model, params = loaded(name)
    how = lora.LoRA(rank=2, alpha=4.0)
    shapes = jax.eval_shape(
        functools.partial(lora.init, model=model, lora=how), jax.random.key(0)
    )
    rng = np.random.default_rng(0)
    adapters = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(0, 3, x.shape), jnp.float32), shapes
    )
    base = jax.jit(frozen.freeze)(params)
    root = frozen.source_fingerprint_of(base).root
    peft.save(
        tmp_path / "out",
        model=model,
        adapters=adapters,
        lora=how,
        base_fingerprint=root,
    )
    _, again = peft.load(tmp_path / "out", model=model, base=base)
    chex.assert_trees_all_equal(again, adapters)
    # The same as tensors of theirs: of merged weights less those of the base.
    merged = jax.jit(functools.partial(lora.merge, lora=how))(params, adapters)
    hf.save(tmp_path / "merged", model, merged)
    written = load_file(tmp_path / "out" / "adapter_model.safetensors")
    before = load_file(FIXTURES / name / "model.safetensors")
    after = load_file(tmp_path / "merged" / "model.safetensors")
    all_layers = range(model.num_layers)
    fused = {
        "gpt_neox": [("gpt_neox", "attention.query_key_value", all_layers)],
        "phi3": [("model", "self_attn.qkv_proj", all_layers)],
        "qwen3_5": [
            ("model", "linear_attn.in_proj_qkv", (0, 2)),
            ("model", "self_attn.q_proj", (1, 3)),
        ],
    }
    for at in (
        f"{prefix}.layers.{layer}.{linear}"
        for prefix, linear, layers in fused[name]
        for layer in layers
    ):
        down, up = (
            written[f"base_model.model.{at}.lora_{side}.weight"] for side in "AB"
        )
        difference = after[f"{at}.weight"] - before[f"{at}.weight"]
        np.testing.assert_allclose(2.0 * up @ down, difference, rtol=1e-4, atol=1e-4)


def test_layers_that_predict_several_tokens_are_left_out(tmp_path):
    more = {"mtp.fc.weight": np.ones((32, 64), np.float32)}
    _, params = hf.load(edited(tmp_path, "qwen3_5", tensors=more))
    chex.assert_trees_all_equal(params, hf.load(FIXTURES / "qwen3_5")[1])


def test_the_bias_of_a_score_is_read_and_a_head_that_was_left_in_is_not(tmp_path):
    tensors = {
        "score.bias": np.array([-0.75], np.float32),
        "embed_out.weight": np.ones((97, 32), np.float32),
    }
    folder = edited(tmp_path, "gpt_neox_reward", tensors=tensors)
    model, params = hf.load_reward(folder)
    assert params["score"]["bias"] == np.float32(-0.75)
    hf.save_reward(tmp_path / "out", model, params)
    _, again = hf.load_reward(tmp_path / "out")
    chex.assert_trees_all_equal(again, params)

    shutil.rmtree(folder)
    two = {"score.bias": np.zeros(2, np.float32)}
    with pytest.raises(InputError, match=r"expected score\.bias \[1\], got \[2\]"):
        hf.load_reward(edited(tmp_path, "gpt_neox_reward", tensors=two))


def test_yarn_is_computed_as_theirs_and_written_back():
    options = options_of("qwen2")
    scaling = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0}

    def read(**changes):
        return model_of(options | {"rope_parameters": scaling | changes}).rope_scaling

    by_default = 0.1 * math.log(4.0) + 1.0
    assert read() == RopeScaling(
        "yarn", 4.0, original_max_positions=48, attention_factor=by_default
    )
    assert read(mscale=0.7).attention_factor == by_default
    assert read(mscale=0.7, mscale_all_dim=0).attention_factor == by_default
    assert read(mscale=0.7, mscale_all_dim=0.5).attention_factor == (
        (0.07 * math.log(4.0) + 1.0) / (0.05 * math.log(4.0) + 1.0)
    )
    assert read(factor=1).attention_factor == 1.0
    assert read(attention_factor=1.5).attention_factor == 1.5
    assert read(factor=None, original_max_position_embeddings=12).factor == 4.0
    for name in ("qwen2", "qwen3", "mistral", "gpt_neox", "gemma2", "gemma3"):
        plain = model_of(options_of(name))
        expected = dataclasses.replace(
            plain,
            max_positions=192,
            rope_scaling=read(truncate=False, beta_fast=7, beta_slow=2),
        )
        again = hf.FAMILIES[plain.family].config_to_hf(expected)
        assert model_of(again | {"model_type": plain.family}) == expected
        if name == "qwen2":
            assert again["rope_scaling"]["beta_fast"] == 7


def scaled(name, *, spelling, stated=48, **scaling):
    """The model of a config.json with this scaling, in one of two spellings."""
    options = options_of(name) | {"max_position_embeddings": stated}
    base = {"rope_theta": 50.0}
    options |= {"rope_parameters": None, "rope_scaling": None, "rotary_emb_base": 50}
    if spelling == "rope_scaling":
        return model_of(options | base | {"rope_scaling": scaling})
    if name == "gemma3":
        scaling = {"full_attention": scaling | base, "sliding_attention": base}
        return model_of(options | {"rope_parameters": scaling})
    return model_of(options | {"rope_parameters": scaling | base})


@pytest.mark.parametrize("kind", ["type", "rope_type"])
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(
    "name", ["llama", "qwen2", "qwen3", "mistral", "gpt_neox", "gemma2", "gemma3"]
)
def test_yarn_lengthens_the_context_and_nothing_else_does(name, spelling, kind):
    if name == "llama":
        name = "llama_sharded"

    def context(type_, **options):
        model = scaled(name, spelling=spelling, **{kind: type_}, **options)
        assert model.rope_theta == 50.0
        written = hf.FAMILIES[model.family].config_to_hf(model)
        assert model_of(written | {"model_type": model.family}) == model
        assert written["max_position_embeddings"] == model.max_positions
        return model.max_positions

    original = {"original_max_position_embeddings": 48}
    assert context("yarn", factor=4.0, **original) == 192  # as Qwen says
    assert context("yarn", factor=4.0) == 192
    assert context("yarn", factor=4.0, stated=192, **original) == 192
    assert context("yarn", factor=4.0, stated=200, **original) == 200
    assert context("yarn", factor=2.55, **original) == 122
    assert context("yarn", factor=0.5, **original) == 48
    assert context("yarn", factor=None, stated=96, **original) == 96
    assert context("linear", factor=4.0) == 48
    bands = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    assert context("llama3", factor=32.0, **bands, **original) == 48
    assert context("default") == 48
    with pytest.raises(InputError, match=r"or remove the scaling to read max_posi"):
        context("dynamic", factor=2.0)
    with pytest.raises(InputError, match=r"or yarn, got 'longrope'"):
        context("longrope", factor=2.0)
    with pytest.raises(InputError, match=r"to be at most 2147483647, got 1e\+30 × 48"):
        context("yarn", factor=1e30)


def test_the_length_before_yarn_may_stand_beside_it():
    options = options_of("qwen2") | {"max_position_embeddings": 48}
    yarn = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 50.0}
    options |= {"rope_parameters": yarn | {"original_max_position_embeddings": 48}}
    model = model_of(options | {"original_max_position_embeddings": 16})
    assert model.rope_scaling.original_max_positions == 16
    assert model.max_positions == 64


def test_scaling_added_beside_another_base_is_refused():
    """transformers would use rope_scaling alone, and the base 10 000."""
    options = options_of("qwen2") | {"rope_theta": None, "rope_scaling": None}
    options["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48}
    with pytest.raises(InputError, match=r"got rope_theta = 1e\+06 in rope_parameters"):
        model_of(options | {"rope_scaling": yarn})
    assert (
        model_of(options | {"rope_scaling": yarn, "rope_theta": 1e6}).rope_theta == 1e6
    )
    model = model_of(options | {"rope_scaling": yarn | {"rope_theta": 1e6}})
    assert (model.rope_theta, model.max_positions) == (1e6, 192)


def test_windows_follow_each_family_s_options():
    def local(name, **changes):
        options = options_of(name) | {"layer_types": None} | changes
        model = model_of(options)
        return model.sliding_window, "".join("gl"[x] for x in model.local_layers)

    assert local("qwen2") == (5, "gll")
    assert local("qwen2", max_window_layers=3) == (None, "")
    assert local("qwen2", use_sliding_window=False) == (None, "")
    assert local("qwen3", max_window_layers=2) == (5, "ggl")
    assert local("mistral") == local("phi3") == (5, "lll")
    assert local("mistral", sliding_window=None) == (None, "")
    assert local("phi3", sliding_window=None) == (None, "")
    assert local("gemma2") == (5, "lgl")
    assert local("gemma3") == (5, "llll")
    assert local("gemma3", sliding_window_pattern=2) == (5, "lglg")
    assert local("gemma4", per_layer_config=None) == (5, "lllllg")
    last_local = ["sliding_attention"] * 6  # which transformers makes global
    assert local("gemma4", layer_types=last_local, per_layer_config=None) == (
        *(5, "lllllg"),
    )
    assert local("olmo3") == (5, "lllg")
    assert local("olmo3", sliding_window=None, layer_types=["full_attention"] * 4) == (
        *(None, ""),
    )
    # Without positions, and local for it.
    assert local("smollm3") == (5, "glgl")
    assert local("smollm3", use_sliding_window=False) == (None, "")
    with pytest.raises(InputError, match="and full_attention, got chunked_attention"):
        local("gemma3", layer_types=["chunked_attention"] * 4)


def test_both_forms_of_gemma_3_s_rope_options_are_read():
    newer = options_of("gemma3")
    older = dict(newer)
    del older["rope_parameters"]
    older |= {"rope_theta": 500.0, "rope_local_base_freq": 50.0}
    older |= {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    model = model_of(newer)
    assert model == model_of(older)
    assert (model.rope_theta, model.rope_local_theta) == (500.0, 50.0)
    assert model.rope_scaling == RopeScaling("linear", 2.0)
    for option in ("rope_theta", "rope_local_base_freq", "rope_scaling"):
        del older[option]
    bare = model_of(older)
    assert (bare.rope_theta, bare.rope_local_theta) == (1e6, 1e4)
    assert bare.rope_scaling is None


def test_gemma_4_s_heads_are_read_by_layer_and_as_published():
    by_layer = options_of("gemma4")
    published = {k: v for k, v in by_layer.items() if k != "per_layer_config"}
    published |= {"global_head_dim": 16, "num_global_key_value_heads": 1}
    model = model_of(by_layer)
    assert model == model_of(published)
    assert model.global_heads == GlobalHeads(16, 1, keys_as_values=True)
    # As in transformers: other numbers of heads go with values that are keys.
    other = model_of(published | {"attention_k_eq_v": False})
    assert other.global_heads == GlobalHeads(16, 2)
    # With more than ten layers transformers 5 pads their numbers.
    padded = {f"0{n}": heads for n, heads in by_layer["per_layer_config"].items()}
    assert model_of(by_layer | {"per_layer_config": padded}) == model
    del published["global_head_dim"]
    assert model_of(published).global_heads == GlobalHeads(512, 1, True)


def test_layers_of_gemma_4_run_in_periods_before_and_after_the_last_own_keys():
    names = ("gemma-4-e2b", "gemma-4-e4b", "gemma-4-31b", "gemma-4-26b-a4b")
    assert [registry.KNOWN[name].parts for name in names] == [
        ((0, 15, 5), (15, 20, 5)),
        ((0, 24, 6), (24, 18, 6)),
        ((0, 60, 6),),
        ((0, 30, 6),),
    ]
    # Local and global layers of Gemma 3 have the same modules.
    assert registry.KNOWN["gemma-3-1b"].parts == ((0, 26, 1),)
    small = registry.KNOWN["gemma-4-e2b"]
    assert [small.source(layer) for layer in (14, 15, 19, 34)] == [None, 13, 14, 14]


def test_both_forms_of_olmo_3_s_rope_options_are_read():
    """Flat options cannot express a separate base for local layers."""
    nested = options_of("olmo3")
    scaling = dict(nested["rope_parameters"]["full_attention"])
    near = {"rope_type": "default", "rope_theta": 500_000.0}
    nested["rope_parameters"] = {
        "full_attention": scaling | {"rope_theta": 500_000.0},
        "sliding_attention": near,
    }
    flat = {**nested, "rope_theta": 500_000.0, "rope_parameters": None}
    del scaling["rope_theta"]
    model = model_of(nested)
    assert model == model_of(flat | {"rope_scaling": scaling})
    assert (model.rope_theta, model.rope_local_theta) == (5e5, 5e5)
    assert model.rope_scaling is not None
    assert model_of(flat).rope_scaling is None
    del flat["rope_theta"]
    assert model_of(flat).rope_theta == model_of(flat).rope_local_theta == 5e5
    assert model_of(flat | {"rms_norm_eps": None}).norm_eps == 1e-5
    own = model_of(options_of("olmo3"))
    assert (own.rope_theta, own.rope_local_theta) == (40.0, 50.0)


def test_layers_without_positions_follow_smollm3_s_options():
    def unrotated(**changes):
        model = model_of(options_of("smollm3") | changes)
        return "".join("rn"[x] for x in model.unrotated_layers)

    assert unrotated() == "rnrn"
    assert unrotated(no_rope_layers=None) == "rrrn"
    assert unrotated(no_rope_layers=None, no_rope_layer_interval=2) == "rnrn"
    assert unrotated(no_rope_layers=[0, 1, 1, 1, 0]) == "nrrr"  # four layers
    assert unrotated(no_rope_layers=[1, 1, 1, 1]) == ""
    bare = {k: v for k, v in options_of("smollm3").items() if k != "rope_parameters"}
    assert model_of(bare).rope_theta == 2e6
    del bare["num_key_value_heads"]
    assert model_of(bare).num_kv_heads == 4
    assert model_of(bare | {"num_key_value_heads": None}).num_kv_heads == 4


def test_granite_4_s_layers_are_known_by_either_name():
    options = options_of("granite4")
    model = model_of(options)
    assert (model.intermediate_size, model.unrotated_layers) == (40, (True,) * 3)
    assert model_of(options | {"intermediate_size": 7}) == model  # of experts
    older = {k: v for k, v in options.items() if k != "layer_types"}
    assert model_of(older | {"layers_block_type": ["attention"] * 3}) == model
    rotated = model_of(options | {"position_embedding_type": "rope"})
    assert rotated.unrotated_layers == ()


@pytest.mark.parametrize("model", registry.KNOWN.values(), ids=registry.KNOWN)
def test_known_shapes_are_ones_that_a_config_of_their_family_says(model):
    family = hf.FAMILIES[model.family]
    assert family.config_from_hf(family.config_to_hf(model)) == model


ROPE = "rope_parameters"
LISTED = "use a checkpoint without, of gpt2, gpt_neox, llama, mistral, phi3, qwen2, qwe"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("mistral", {"model_type": "phimoe", "num_local_experts": 8}, LISTED),
        (
            "mistral",
            {"model_type": "phimoe", "num_local_experts": 8},
            r"a phimoe with a mixture of experts \(num_local_experts\)",
        ),
        ("mixtral", {"num_experts_per_tok": 5}, "as many experts .* there are, 4, g"),
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers = \[\], got \[1\]"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step = 1, got 2"),
        ("gpt_oss", {ROPE: None}, "expected a value for 'rope_scaling', got none"),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "awq"}},
            "quant_method = 'mxfp4', got 'awq'",
        ),
        (
            "qwen2",
            {"model_type": "qwen2_moe", "num_experts": 60},
            r"a qwen2_moe with a mixture of experts \(num_experts\)",
        ),
        (
            "gemma3",
            {"model_type": "gemma3", "vision_config": {"hidden_size": 8}},
            r"a gemma3 with a vision tower \(vision_config\)",
        ),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "awq"}},
            r"a qwen3 with quantised weights \(quantization_config\)",
        ),
        (
            "phi3",
            {"model_type": "phi-msft", "auto_map": {"AutoModel": "modeling.Phi"}},
            r"got 'phi-msft' .*its own code \(auto_map\) is never run",
        ),
        ("phi3", {ROPE: {"rope_type": "longrope"}}, "got 'longrope'; use a checkpoint"),
        ("phi3", {ROPE: {"type": "su"}}, "got 'su', which is longrope"),
        ("qwen2", {ROPE: {"rope_type": "dynamic"}}, "yarn, got 'dynamic'; use another"),
        ("qwen2", {"partial_rotary_factor": 0.5}, "expected partial_rotary_factor = 1"),
        ("gemma2", {"use_bidirectional_attention": True}, "_attention = False, got Tr"),
        ("gemma3", {"attn_logit_softcapping": 30.0}, "softcapping = None, got 30.0"),
        (
            "gemma3",
            {ROPE: {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "expected rope_type = 'default', got 'linear'",
        ),
        ("gemma4", {"enable_moe_block": True}, "a value for 'num_experts', got none"),
        ("gemma4_moe", {"top_k_experts": 9}, "as many experts .* there are, 8, got 9"),
        ("gemma4_moe", {"moe_intermediate_size": 0}, "_size to be a whole number from"),
        ("gemma4_moe", {"num_kv_shared_layers": 2}, "experts or shared_layers"),
        ("gemma4", {"use_bidirectional_attention": "all"}, "'vision', got 'all'"),
        (
            "gemma4",
            {ROPE: {"full_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "expected rope_type = 'proportional', got 'yarn'",
        ),
        (
            "gemma4",
            {"per_layer_config": {"0": {"head_dim": 16}}},
            "per_layer_config of one head_dim and one num_key_value_heads",
        ),
        (
            "gemma4",
            {"per_layer_config": {"0": {"head_dim": "16"}}},
            r"per_layer_config\.head_dim to be a whole number",
        ),
        ("gemma4", {"per_layer_config": {"0": 16}}, "_config to be an object, got 16"),
        (
            "gemma4_e2b",
            {"vocab_size_per_layer_input": 96},
            "vocab_size_per_layer_input = 97, got 96",
        ),
        ("gemma4_e2b", {"num_kv_shared_layers": 7}, "got none of one in 1 layers; low"),
        (
            "gemma4",
            {"model_type": "gemma4_unified", "vision_config": {"hidden_size": 8}},
            r"a gemma4_unified with a vision tower",
        ),
        ("gpt_neox", {"hidden_act": "relu"}, "expected hidden_act to be one of"),
        ("gemma2", {"hidden_activation": "relu"}, "hidden_activation to be one of"),
        ("gemma3", {"sliding_window": None}, "sliding_window in tokens, as layer_typ"),
        (
            "gemma2",
            {"sliding_window": None, "layer_types": None},
            "expected a value for 'sliding_window', got none",
        ),
        (
            "qwen2",
            {"use_sliding_window": False, "layer_types": ["sliding_attention"] * 3},
            "expected sliding_window in tokens",
        ),
        ("gpt_neox", {"num_attention_heads": 3}, "num_heads to divide hidden_size, g"),
        ("olmo2", {"model_type": "olmo"}, r"supported \(the nearest is olmo\d\)"),
        (
            "granite",
            {"model_type": "granitemoe", "num_local_experts": 8},
            r"a granitemoe with a mixture of experts .* \(the nearest is granite",
        ),
        ("olmo2", {"clip_qkv": 8.0}, "expected clip_qkv = None, got 8.0"),
        ("olmo2", {"mlp_bias": True}, "expected mlp_bias = False, got True"),
        (
            "olmo3",
            {ROPE: {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
            "expected rope_type = 'default', got 'linear'",
        ),
        (
            "olmo3",
            {ROPE: None, "rope_theta": 1e6},
            r"got rope_theta = 1e\+06 alone, which transformers 4 takes .*; add it",
        ),
        ("smollm3", {"no_rope_layers": [1, 0]}, "each of 4 layers .* got 2 entries"),
        ("smollm3", {"no_rope_layers": [1, 0, 2, 1]}, "to be a list of 0 and 1"),
        ("smollm3", {"no_rope_layer_interval": 0}, "a whole number from 1 to 2147"),
        (
            "qwen3_5",
            {"layer_types": ["linear_attention", "sliding_attention"]},
            "_types of linear_attention and full_attention, one for each of 4 layers, "
            "got 2 with sliding_attention; use another",
        ),
        ("qwen3_5", {"attn_output_gate": False}, "_output_gate = True, got False"),
        ("qwen3_5", {"linear_num_key_heads": 3}, "num_value_heads, got 3 and 4"),
        ("qwen3_5", {"linear_conv_kernel_dim": 0}, "_kernel_dim to be a whole number"),
        (
            "qwen3_5",
            {"model_type": "qwen3_5", "vision_config": {"depth": 2}},
            r"a qwen3_5 with a vision tower .* \(the nearest is qwen3_5_text\)",
        ),
        ("granite", {"logits_scaling": 0.0}, "logits_scaling to be a finite number ab"),
        ("granite4", {"num_local_experts": 8}, r"of experts \(num_local_experts\)"),
        ("granite4", {"num_local_experts": None}, "a value for 'num_local_experts', g"),
        (
            "granite4",
            {"layer_types": ["attention", "mamba", "attention"]},
            "expected layer_types of attention alone, got mamba; use a dense",
        ),
        ("granite4", {"layer_types": None}, "expected a value for 'layer_types', got"),
        (
            "granite4",
            {"position_embedding_type": "alibi"},
            "_type = 'rope', got 'alibi",
        ),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, name, options, message):
    folder = edited(tmp_path, name, options=options)
    with pytest.raises(InputError, match=message) as error:
        hf.load(folder)
    assert str(folder) in str(error.value)


def test_null_is_as_absent():
    """For options where null has no meaning of its own."""
    for name, options in (
        ("gemma2", ("tie_word_embeddings", "query_pre_attn_scalar", "head_dim")),
        ("gemma3", ("rope_theta", "sliding_window_pattern")),
        ("gemma4", ("rope_parameters", "layer_types", "per_layer_config")),
        ("qwen3", ("head_dim", "use_sliding_window", "layer_types")),
        ("phi3", ("rms_norm_eps",)),
        ("gpt_neox", ("use_parallel_residual", "attention_bias", "layer_norm_eps")),
        ("olmo3", ("rms_norm_eps", "rope_parameters", "layer_types")),
        ("smollm3", ("tie_word_embeddings", "rope_parameters", "no_rope_layers")),
        ("granite", ("logits_scaling", "residual_multiplier", "hidden_act")),
        ("gpt2", ("activation_function",)),
        ("qwen3_5", ("layer_types", "linear_conv_kernel_dim", "rope_parameters")),
    ):
        config = {k: v for k, v in options_of(name).items() if k not in options}
        nulls = config | dict.fromkeys(options)
        assert model_of(nulls) == model_of(config)


def test_a_gemma_without_local_layers_is_saved_with_a_window():
    """transformers requires the window."""
    config = options_of("gemma3") | {"layer_types": ["full_attention"] * 4}
    model = model_of(config)
    assert (model.sliding_window, model.local_layers) == (None, ())
    written = hf.FAMILIES["gemma3_text"].config_to_hf(model)
    assert written["sliding_window"] == 4096
    assert hf.FAMILIES["gemma3_text"].config_from_hf(written) == model


def test_code_that_comes_with_a_checkpoint_is_left_alone(tmp_path):
    code = {"AutoConfig": "configuration_phi3.Phi3Config"}
    model, _ = hf.load(edited(tmp_path, "phi3", options={"auto_map": code}))
    assert model == hf.model_config(FIXTURES / "phi3")
